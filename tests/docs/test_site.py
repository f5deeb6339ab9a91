"""Pages of the documentation site; `make docs` builds the whole site."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.harness.sources import ROOT


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    for name in ("latex2mathml", "griffe"):  # from the extra "docs"
        pytest.importorskip(name)
    return runpy.run_path(str(ROOT / "docs" / "write_pages.py"))


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/limits.md", "results.md#on-a-gpu", "results.md#on-a-gpu"),
        ("docs/limits.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/methods/gasloc.md", "../topologies.md", "../topologies.md"),
        (
            "docs/methods/gasloc.md",
            "../../examples/05_slow_worker.py",
            "../source/examples/05_slow_worker.py.md",
        ),
        ("docs/README.md", "../CHANGELOG.md", "source/CHANGELOG.md"),
        ("README.md", "docs/results.md#on-a-gpu", "../results.md#on-a-gpu"),
        ("README.md", "LICENSE", "LICENSE.md"),
        ("docs/results.md", "../benchmarks/libraries", "source/benchmarks/libraries/README.md"),
        ("docs/results.md", "../no_such_file.md", "../no_such_file.md"),
        ("docs/testing.md", "../tests/lightning_matrix/table.py", "feature_matrix.md"),
    ],
)
def test_links_stay_in_the_site(site: dict[str, Any], page: str, link: str, expected: str) -> None:
    written = site["with_site_links"](f"see [this]({link}).", ROOT / page)
    assert written == f"see [this]({expected})."


def test_docstrings_become_markdown(site: dict[str, Any]) -> None:
    mathml = site["mathml"]
    docstring = """Uses :class:`~lightning_loco.algorithms.DiLoCo` and :math:`S_t`.

    .. math::
        a = b
        + c

    Example::

        Trainer(strategy="diloco")

    Raises:
        ValueError: If not.
    """
    assert site["as_markdown"](docstring).split("\n")[:-1] == [
        f"Uses `DiLoCo` and {mathml('S_t', 'inline')}.",
        "",
        f"    {mathml('a = b + c', 'block')}",
        "",
        "    Examples:",
        "        ```python",
        '        Trainer(strategy="diloco")',
        "        ```",
        "",
        "    Raises:",
        "        ValueError: If not.",
    ]


def test_formulas_become_mathml(site: dict[str, Any]) -> None:
    written = site["with_mathml"]("It is $a | b$, and\n$$a\n< b$$\n")
    assert "$" not in written
    assert "|" not in written  # it would end a table cell
    assert written.count("\n") == 2
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in written
    assert 'display="block"' in written


def test_code_and_prices_are_not_formulas(site: dict[str, Any]) -> None:
    for text in ("`$a` and `$b`", "```bash\necho $A $B\n```", "5 $ or 6 $", "$5 or $6"):
        assert site["with_mathml"](text) == text


def test_a_notebook_becomes_a_page(site: dict[str, Any]) -> None:
    page = site["page_of"](Path(ROOT / "examples" / "compare_methods.ipynb"))
    assert page.startswith("# Compare methods")
    assert "```python\nimport matplotlib" in page
    assert '<img alt="Figure" src="data:image/png;base64,' in page
    assert "(../../guides/local_steps_and_outer_lr.md)" in page


def test_every_page_and_what_it_links_to_is_written(site: dict[str, Any], tmp_path: Path) -> None:
    site["write_pages"](tmp_path)
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(ROOT / "docs")).exists()
    assert (tmp_path / "source" / "examples" / "01_quickstart.py.md").exists()
    assert (tmp_path / "feature_matrix.md").read_text(encoding="utf-8").startswith("# Feature")
    assert (tmp_path / "fonts" / "stix_two_math.woff2").exists()
    assert not list(tmp_path.rglob("*.py"))
