"""What `make docs` adds to MkDocs: pages for files outside of docs/, formulas, and docstrings.

Pages link to examples, benchmarks and other files of the repository. Each of these files becomes a
page of the site, so that all links stay within it. Formulas are MathML, which needs neither
JavaScript nor a network. Roles and examples of docstrings are written as mkdocstrings expects them.
"""

from __future__ import annotations

import html
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml"}

_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_ROLE = re.compile(r":(?:attr|class|data|func|meth):`~?([^`]+)`")
_CODE_EXAMPLE = re.compile(r"^( *)Example::\n\n((?:\1 +\S.*\n?|\n)+)", re.MULTILINE)
_MATH = re.compile(r"^( *)\.\. math::(.*\n(?:\1 +\S.*\n?)*)", re.MULTILINE)
_ROLE_OF_MATH = re.compile(r":math:`([^`]+)`")
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


def site_path(path: Path) -> str:
    """Where a file of the repository is in the site, as a path of its source."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = f"source/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{name}/README.md"
    return name if path.suffix == ".md" else f"{name}.md"


def linked_files(markdown: str, folder: Path) -> Iterator[Path]:
    """The files of the repository, but outside of docs/, to which a page in this folder links."""
    for link in _LINK.findall(markdown):
        path = (folder / link).resolve()
        if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
            yield path


def with_site_links(markdown: str, path: Path) -> str:
    """The page at `path` with its links as they are in the site."""
    here = os.path.dirname(site_path(path))

    def replace(match: re.Match[str]) -> str:
        target = (path.parent / match[0]).resolve()
        known = target.exists() and target.is_relative_to(ROOT)
        return os.path.relpath(site_path(target), here) if known else match[0]

    return _LINK.sub(replace, markdown)


def blocks_of(notebook: dict[str, Any]) -> Iterator[str]:
    """The Markdown, the code and the kept outputs of a notebook."""
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


def page_of(path: Path) -> str:
    """The Markdown of the page for a file or folder outside of docs/."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.is_file())
        return with_site_links(
            f"# {name}\n\n" + "\n".join(f"- [{file}]({file})" for file in files),
            path / "README.md",
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return with_site_links(text, path)
    if path.suffix == ".ipynb":
        return with_site_links("\n\n".join(blocks_of(json.loads(text))), path)
    language = LANGUAGES.get(path.suffix, "text")
    return f"{_NO_SEARCH}# {name}\n\n````{language}\n{text.rstrip()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file to which a page links, directly or through such a file."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, site_path(path), content=page_of(path)))
        if path.is_dir():
            found = {file for file in path.iterdir() if file.is_file()}
        elif path.suffix == ".md":
            found = set(linked_files(path.read_text(encoding="utf-8"), path.parent))
        else:
            found = set()
        waiting += sorted(found - seen)
        seen |= found
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of a page in docs/ lead to the pages of this site."""
    if page.file.generated_by is not None:
        return markdown
    return with_site_links(markdown, DOCS / page.file.src_uri)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write formulas as MathML."""

    def replace(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _FORMULA.sub(replace, content)


def _annotation_of(parameter: inspect.Parameter) -> str | None:
    """The type of a parameter, without the modules of names."""
    if parameter.annotation is parameter.empty:
        return None
    annotation = parameter.annotation
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", written)


def as_markdown(docstring: str) -> str:
    """A docstring with Markdown in place of reStructuredText."""
    docstring = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", docstring)
    docstring = _ROLE_OF_MATH.sub(r"$\1$", docstring)
    docstring = _MATH.sub(lambda math: f"{math[1]}$${' '.join(math[2].split())}$$\n", docstring)
    docstring = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)

    def fenced(match: re.Match[str]) -> str:
        indent = match[1] + "    "
        return f"{match[1]}Examples:\n{indent}```python\n{match[2].rstrip()}\n{indent}```\n\n"

    return _CODE_EXAMPLE.sub(fenced, docstring)


class RuntimeSignatures(griffe.Extension):
    """Gives griffe what this package has at run time: signatures, and docstrings as Markdown."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite a docstring; an attribute that is no property has that of its value's type."""
        if obj.is_attribute and "property" not in obj.labels:
            obj.docstring = None
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class_members(
        self, *, node: griffe.ObjectNode, cls: griffe.Class, **kwargs: Any
    ) -> None:
        """Take the arguments of a constructor from its signature, as `help` does."""
        constructor = cls.members.get("__init__")
        if isinstance(constructor, griffe.Function):
            constructor.parameters = griffe.Parameters(
                *(
                    griffe.Parameter(
                        parameter.name,
                        annotation=_annotation_of(parameter),
                        kind=_KINDS[parameter.kind],
                        default=None
                        if parameter.default is parameter.empty
                        else repr(parameter.default),
                    )
                    for parameter in inspect.signature(node.obj.__init__).parameters.values()
                )
            )
