"""The documentation from the package: every link leads somewhere, nothing is fetched, and words are found."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from steelyard import manual
from steelyard.errors import UserError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return manual.write_pages(tmp_path_factory.mktemp("manual"))


def test_every_link_and_picture_is_there_with_its_heading(written: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in written.rglob("*.html")}
    assert len(pages) > 60
    anchors = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    lost: list[str] = []
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if link.startswith("https://"):
                continue
            to, _, place = unquote(link).partition("#")
            target = (path.parent / to).resolve() if to else path
            if not target.is_file() or (place and place not in anchors[target]):
                lost.append(f"{path.relative_to(written)}: {link}")
    assert lost == []


def test_nothing_is_fetched_and_no_script_runs(written: Path) -> None:
    for path in written.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.search(r'<(?:img|link|iframe)[^>]*"https?:', text)


def test_a_page_has_its_tables_its_heading_and_the_list_of_pages(written: Path) -> None:
    page = (written / "guide" / "which-rule.html").read_text(encoding="utf-8")
    assert "<h1" in page
    assert "<table>" in page
    assert 'href="privacy.html"' in page
    assert "<!-- not run" not in manual.title(page)


def test_the_page_whose_headings_have_the_words_comes_first() -> None:
    assert manual.search("hostile clients")[0][1] == "guide/hostile-clients"
    assert manual.search("choose epsilon")[0][1] == "guide/privacy"
    assert manual.search("nowhereatall") == []


def test_a_package_without_pages_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(manual, "PLACES", (tmp_path,))
    with pytest.raises(UserError, match="this installation has no pages"):
        manual.sources()
