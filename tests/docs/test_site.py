"""What the site adds to the pages; `make docs` builds all of it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    for name in ("latex2mathml", "mkdocs", "griffe"):  # of the extra docs
        pytest.importorskip(name)
    return runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))


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
    ],
)
def test_links_stay_in_the_site(hooks: dict[str, Any], page: str, link: str, expected: str) -> None:
    written = hooks["with_site_links"](f"see [this]({link}).", ROOT / page)
    assert written == f"see [this]({expected})."


def test_docstrings_become_markdown(hooks: dict[str, Any]) -> None:
    docstring = """Uses :class:`~lightning_loco.algorithms.DiLoCo` and :math:`S_t`.

    .. math::
        a = b
        + c

    Example::

        Trainer(strategy="diloco")

    Raises:
        ValueError: If not.
    """
    assert hooks["as_markdown"](docstring).split("\n")[:-1] == [
        "Uses `DiLoCo` and $S_t$.",
        "",
        "    $$a = b + c$$",
        "",
        "    Examples:",
        "        ```python",
        '        Trainer(strategy="diloco")',
        "        ```",
        "",
        "    Raises:",
        "        ValueError: If not.",
    ]


def test_formulas_become_mathml(hooks: dict[str, Any]) -> None:
    html = r'<p>Is <span class="arithmatex">\(a &lt; b\)</span>?</p>'
    written = hooks["on_page_content"](html, None, None, None)
    assert "arithmatex" not in written
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in written


def test_a_notebook_becomes_a_page(hooks: dict[str, Any]) -> None:
    page = hooks["page_of"](Path(ROOT / "examples" / "compare_methods.ipynb"))
    assert page.startswith("# Compare methods")
    assert "```python\nimport matplotlib" in page
    assert '<img alt="Figure" src="data:image/png;base64,' in page
    assert "(../../guides/local_steps_and_outer_lr.md)" in page
