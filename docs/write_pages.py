"""Write the pages of the site into build/pages; `make docs` runs this, and MkDocs on the result.

Pages link to examples, benchmarks and other files of the repository. Each of these files becomes a
page of the site, so that all links stay within it. A link to the table of Lightning's features
leads to a page that is generated from it. Formulas become MathML, which needs neither JavaScript
nor a network.

Any generator that reads Markdown can build the site from that folder, except the pages of docs/api:
their lines `:::` are directives of mkdocstrings, which loads `Docstrings` from this file.
"""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from typing_extensions import get_type_hints, is_typeddict

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = ROOT / "build" / "pages"
LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml"}
FEATURES = ROOT / "tests" / "lightning_matrix" / "table.py"
FEATURES_PAGE = "feature_matrix.md"
NIGHTS = DOCS / "exploration_nights.csv"

_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_CODE_OR_FORMULA = re.compile(
    r"^ *(`{3,}).*?^ *\1|`[^`\n]+`|\$\$(?P<block>.+?)\$\$|\$(?P<inline>\S(?:[^$\n]*\S)?)\$(?!\d)",
    re.DOTALL | re.MULTILINE,
)
_ROLE = re.compile(r":(?:attr|class|data|func|meth):`~?([^`]+)`")
_CODE_EXAMPLE = re.compile(r"^( *)Example::\n\n((?:\1 +\S.*\n?|\n)+)", re.MULTILINE)
_MATH = re.compile(r"^( *)\.\. math::(.*\n(?:\1 +\S.*\n?)*)", re.MULTILINE)
_ROLE_OF_MATH = re.compile(r":math:`([^`]+)`")
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    _KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


def site_path(path: Path) -> str:
    """Return where the page of a file of the repository is, below build/pages."""
    if path == FEATURES:
        return FEATURES_PAGE
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = f"source/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{name}/README.md"
    return name if path.suffix == ".md" else f"{name}.md"


def linked_files(markdown: str, folder: Path) -> Iterator[Path]:
    """Yield the files of the repository, but outside of docs/, to which a page links."""
    for link in _LINK.findall(markdown):
        path = (folder / link).resolve()
        if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
            yield path


def with_site_links(markdown: str, path: Path) -> str:
    """Return the page at `path` with its links as they are in the site."""
    here = os.path.dirname(site_path(path))

    def replace(match: re.Match[str]) -> str:
        target = (path.parent / match[0]).resolve()
        known = target.exists() and target.is_relative_to(ROOT)
        return os.path.relpath(site_path(target), here) if known else match[0]

    return _LINK.sub(replace, markdown)


def mathml(formula: str, display: str) -> str:
    """Return a formula as HTML in one line, in which no character is one of Markdown's."""
    written = convert(" ".join(formula.split()), display=display).replace("|", "&#x7C;")
    return f'<span class="formula">{written}</span>'


def with_mathml(markdown: str) -> str:
    """Return a page with its formulas, `$...$` and `$$...$$`, as MathML; code is left alone."""

    def replace(match: re.Match[str]) -> str:
        if match["block"] is not None:
            return mathml(match["block"], "block")
        return match[0] if match["inline"] is None else mathml(match["inline"], "inline")

    return _CODE_OR_FORMULA.sub(replace, markdown)


def blocks_of(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown, the code and the kept outputs of a notebook."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            if "text" in output:
                yield f"```text\n{''.join(output['text']).rstrip()}\n```"
            else:
                picture = output["data"]["image/png"]
                yield f'<img alt="Figure" src="data:image/png;base64,{picture}">'


def nights_table() -> str:
    """Return the counts of `make soak`, newest first, as a table."""
    header, *nights = csv.reader(NIGHTS.read_text(encoding="utf-8").splitlines())
    rows = [header, ["---"] * len(header), *reversed(nights)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_of(path: Path) -> str:
    """Return the Markdown of the page for a file or folder."""
    name = path.relative_to(ROOT).as_posix()
    if path == FEATURES:
        from tests.lightning_matrix.render import page

        return page()
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.is_file())
        listed = "\n".join(f"- [{file}]({file})" for file in files)
        return with_site_links(f"# {name}\n\n{listed}", path / "README.md")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = text.replace("<!-- nights -->", nights_table())
        return with_mathml(with_site_links(text, path))
    if path.suffix == ".ipynb":
        return with_mathml(with_site_links("\n\n".join(blocks_of(json.loads(text))), path))
    language = LANGUAGES.get(path.suffix, "text")
    return f"{_NO_SEARCH}# {name}\n\n````{language}\n{text.rstrip()}\n````\n"


def write_pages(folder: Path) -> None:
    """Write all pages, and a page for each file to which one links, also through such a file."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.md", "*.py", "__pycache__"))
    waiting = sorted(DOCS.rglob("*.md"))
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        target = folder / site_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_of(path), encoding="utf-8")
        if path.is_dir():
            found = {file for file in path.iterdir() if file.is_file()}
        elif path.suffix == ".md":
            found = set(linked_files(path.read_text(encoding="utf-8"), path.parent))
        else:
            found = set()
        waiting += sorted(found - seen)
        seen |= found


def as_markdown(docstring: str) -> str:
    """Return a docstring with Markdown in place of reStructuredText."""
    docstring = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", docstring)
    docstring = _ROLE_OF_MATH.sub(lambda role: mathml(role[1], "inline"), docstring)
    docstring = _MATH.sub(lambda math: f"{math[1]}{mathml(math[2], 'block')}\n", docstring)
    docstring = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)

    def fenced(match: re.Match[str]) -> str:
        indent = match[1] + "    "
        return f"{match[1]}Examples:\n{indent}```python\n{match[2].rstrip()}\n{indent}```\n\n"

    return _CODE_EXAMPLE.sub(fenced, docstring)


def _annotation_of(parameter: inspect.Parameter) -> str | None:
    """Return the type of a parameter, without the modules of names."""
    if parameter.annotation is parameter.empty:
        return None
    annotation = parameter.annotation
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", written)


def _default_of(parameter: inspect.Parameter) -> str | None:
    """Return the default of a parameter as it is written."""
    if parameter.default is parameter.empty:
        return None
    return "..." if parameter.default is ... else repr(parameter.default)


class Docstrings(griffe.Extension):
    """Gives griffe what this package has at run time: signatures, and docstrings as Markdown."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite a docstring; drop the one that an attribute gets from the type of its value."""
        if obj.is_attribute and "property" not in obj.labels:
            obj.docstring = None
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class_members(
        self, *, node: griffe.ObjectNode, cls: griffe.Class, **kwargs: Any
    ) -> None:
        """Take the arguments of a constructor from its signature, as `help` does."""
        if is_typeddict(node.obj):  # optional keys; their defaults are in the docstring
            options = [
                inspect.Parameter(name, _KEYWORD_ONLY, default=..., annotation=hint)
                for name, hint in get_type_hints(node.obj).items()
            ]
            cls.set_member("__init__", griffe.Function("__init__"))
        else:
            options = [*inspect.signature(node.obj.__init__).parameters.values()]
        constructor = cls.members.get("__init__")
        if isinstance(constructor, griffe.Function):
            constructor.parameters = griffe.Parameters(
                *(
                    griffe.Parameter(
                        option.name,
                        annotation=_annotation_of(option),
                        kind=_KINDS[option.kind],
                        default=_default_of(option),
                    )
                    for option in options
                )
            )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the table of features is in tests/
    write_pages(PAGES)
