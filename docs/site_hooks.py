"""What `make docs` adds to MkDocs: pages for files outside of docs/, and formulas as MathML.

Pages link to examples, benchmarks and other files of the repository. Here each of these files becomes
a page of the site, so that all links stay within it. Formulas need no JavaScript and no network.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml"}

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


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
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"


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
