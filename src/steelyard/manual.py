"""The documentation that comes with the package: its pages made into HTML that needs no network, and a search in them.

A wheel holds the sources of guide, gallery, algorithms and reference; in a checkout they lie beside `src`. Pages that
are made from the code (every field, every command) and the results are on the site alone: links to them are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from os.path import normpath, relpath
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from steelyard import __version__
from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.base.files import cache_folder
from steelyard.report.rendering import filled

PLACES = (Path(__file__).parent / "docs", Path(__file__).parents[2] / "docs")
PARTS = {"": "Overview", "guide": "Guide", "algorithms": "Algorithms", "reference": "Reference"}
PICTURES = (".svg", ".png")
_FROM_DOCSTRINGS = re.compile(r"^::: ([\w.]+)\n(?:    .*\n)*", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


class Part(NamedTuple):
    """A part of the documentation in the list beside a page: its pages' titles, each with a link."""

    heading: str
    open: bool
    links: dict[str, str]


def sources() -> Path:
    """Return the folder of the pages' sources; a package that was built without them is refused."""
    for place in PLACES:
        if (place / "guide" / "index.md").is_file():
            return place
    raise UserError("docs: this installation has no pages; allowed: a wheel or a checkout of the repository")


def pages(folder: Path | None = None) -> dict[str, str]:
    """Return the text of every page by its path without the suffix: `guide/privacy`."""
    folder = folder or sources()
    found = [
        *sorted(folder.glob("*.md")),
        *(path for part in PARTS if part for path in sorted(folder.glob(f"{part}/*.md"))),
    ]
    return {path.relative_to(folder).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in found}


def title(text: str) -> str:
    """Return the heading of a page."""
    return text.partition("\n")[0].lstrip("# ")


def search(words: str) -> list[tuple[int, str, str]]:
    """Return the pages that hold all the words, as rank, path and title; the guide's pages first.

    The name of a page counts as a heading: hostile-clients is about malicious ones.
    """
    wanted = words.casefold().split()
    found: list[tuple[int, str, str]] = []
    for path, text in pages().items():
        body = f"# {path}\n{text}".casefold()
        if wanted and all(word in body for word in wanted):
            headings = " ".join(line for line in body.splitlines() if line.startswith("#"))
            said = sum(body.count(word) for word in wanted) + 100 * sum(word in headings for word in wanted)
            found.append((said, path, title(text)))
    return sorted(found, key=lambda each: (not each[1].startswith("guide/"), -each[0]))


def write_pages(target: Path | None = None) -> Path:
    """Write every page and picture as HTML into a folder, by default one in the cache; return that folder."""
    folder = sources()
    target = target or cache_folder() / f"docs-{__version__}"
    texts = pages(folder)
    contents: dict[Path, bytes] = {target / f"{path}.html": page_html(path, texts).encode("utf-8") for path in texts}
    for picture in (path for path in folder.rglob("images/**/*") if path.suffix in PICTURES):
        contents[target / picture.relative_to(folder)] = picture.read_bytes()
    for place in sorted({path.parent for path in contents}):
        place.mkdir(parents=True, exist_ok=True)
    files.write_all(contents)
    return target


def page_html(path: str, texts: Mapping[str, str]) -> str:
    """Return one page as HTML, with the list of all pages beside it."""
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(_linked(path, texts))
    for heading, inside in pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", anchor(inside.content))
    body = markdown.renderer.render(tokens, markdown.options, {})
    home = f"{relpath('index', path + '/..')}.html"
    return filled("manual.html.j2", title=title(texts[path]), home=home, parts=_parts(path, texts), body=body)


def anchor(heading: str) -> str:
    """Return the name by which links reach a heading, as on the site."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _linked(path: str, texts: Mapping[str, str]) -> str:
    """Return a page's text with its links seen from the HTML; what is not here stands as plain text."""

    def link(match: re.Match[str]) -> str:
        mark, words, to, place = (group or "" for group in match.groups())
        if mark or not to or "://" in to:
            return match.group()
        target = normpath(f"{path}/../{to}").removesuffix(".md")
        return f"[{words}]({to.removesuffix('.md')}.html{place})" if target in texts else words

    here = _FROM_DOCSTRINGS.sub(r"`\1` (`python -m pydoc \1` describes it)\n\n", texts[path])
    return _LINK.sub(link, here)


def _parts(path: str, texts: Mapping[str, str]) -> list[Part]:
    """Return all pages by part in the order of its index, with links as seen from one page; its own part is open."""
    found: list[Part] = []
    for part, heading in PARTS.items():
        index = texts.get(f"{part}/index", "")
        names = {each: each.rpartition("/")[2] for each in texts if each.rpartition("/")[0] == part and each != "index"}
        inside = sorted(
            names, key=lambda each: (names[each] != "index", index.find(f"({names[each]}.md") % (len(index) + 1))
        )
        links = {title(texts[each]): f"{relpath(each, path + '/..')}.html" for each in inside}
        found.append(Part(heading, part in ("", path.rpartition("/")[0]), links))
    return found
