"""The documentation that comes with the package: its pages made into HTML that needs no network, and a search in them.

A wheel holds the sources of guide, gallery, algorithms and reference; in a checkout they lie beside `src`. Pages that
are made from the code (every field, every command) and the results are on the site alone: links to them are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from os.path import normpath, relpath
from pathlib import Path

from markdown_it import MarkdownIt

from steelyard import __version__
from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.base.files import cache_folder

PLACES = (Path(__file__).parent / "docs", Path(__file__).parents[2] / "docs")
PARTS = {"": "Steelyard", "guide": "Guide", "algorithms": "Algorithms", "reference": "Reference"}
PICTURES = (".svg", ".png")
_FROM_DOCSTRINGS = re.compile(r"^::: ([\w.]+)\n(?:    .*\n)*", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_STYLE = """
:root{color-scheme:light dark;--ink:#263238;--paper:#fff;--soft:#eceff1;--link:#00629b}
@media(prefers-color-scheme:dark){:root{--ink:#e0e6ea;--paper:#1d2327;--soft:#2c353b;--link:#7fc4f5}}
body{margin:0;font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);display:flex;flex-wrap:wrap}
nav{flex:0 0 15rem;padding:1rem;box-sizing:border-box;font-size:.9rem}nav ul{list-style:none;padding-left:.6rem}
main{flex:1 1 20rem;max-width:52rem;padding:1rem;min-width:0}a{color:var(--link)}img{max-width:100%;background:#fff}
pre,code{background:var(--soft);border-radius:4px}pre{padding:.7rem;overflow:auto}code{padding:.1em .25em}
@media(max-width:45rem){nav{order:1;flex-basis:100%}}
table{border-collapse:collapse;display:block;overflow:auto}td,th{border:1px solid var(--soft);padding:.3rem .6rem}
"""
_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{style}</style></head><body>{navigation}<main>
{body}</main></body></html>
"""


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
    """Return the pages that hold all the words, as rank, path and title; the guide's pages first."""
    wanted = words.casefold().split()
    found: list[tuple[int, str, str]] = []
    for path, text in pages().items():
        body = text.casefold()
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
    return _FRAME.format(title=escape(title(texts[path])), style=_STYLE, navigation=_navigation(path, texts), body=body)


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


def _navigation(path: str, texts: Mapping[str, str]) -> str:
    parts: list[str] = []
    for part, heading in PARTS.items():
        inside = [each for each in texts if each.rpartition("/")[0] == part]
        links = "".join(
            f'<li><a href="{relpath(each, path + "/..")}.html">{escape(title(texts[each]))}</a></li>' for each in inside
        )
        shown = " open" if part in ("", path.rpartition("/")[0]) else ""
        parts.append(f"<details{shown}><summary>{heading}</summary><ul>{links}</ul></details>")
    return f"<nav>{''.join(parts)}</nav>"
