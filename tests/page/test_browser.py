"""The page in a real browser: rounds that appear without a reload, a comparison, start and stop, weighing again.

Chromium is Debian's; of a view that fails, a screenshot is beside the runs in the test's own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kit import wait_until
from tests.page.page_server import Page, Written, finished, serving

pytestmark = pytest.mark.slow


class Tab:
    """One browser tab on a page; whatever the browser complains of fails the test."""

    def __init__(self, browser: Any, page: Page, where: str = "") -> None:
        self.context = browser.new_context()
        self.tab = self.context.new_page()
        self.problems: list[str] = []
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)
        self.picture = page.root / "failed.png"
        self.tab.goto(page.opened(where))

    def __enter__(self) -> Any:
        return self.tab

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None or self.problems:
            self.tab.screenshot(path=self.picture, full_page=True)
        self.context.close()
        if kind is None:
            assert self.problems == []


def drawn(tab: Any, kind: str, times: int = 1) -> None:
    """Wait until a figure has been drawn so many times."""
    figure = tab.locator(f".figure.{kind}")
    figure.wait_for(state="attached", timeout=30000)
    wait_until(lambda: figure.get_attribute("hidden") is None)
    figure.scroll_into_view_if_needed()
    # Asked from here: the page's policy lets nobody evaluate text in it, the tests' browser included.
    wait_until(lambda: int(figure.get_attribute("data-drawn") or 0) >= times)


def test_a_new_round_appears_without_a_reload(tmp_path: Path, browser: Any) -> None:
    run = Written(tmp_path / "live", rounds=4)
    run.round(0.25)
    run.round(0.5)
    with serving(tmp_path) as page, Tab(browser, page, "/#/run/live") as tab:
        drawn(tab, "accuracy")
        tab.evaluate("window.untouched = true")
        tab.wait_for_selector("main >> text=round 1 of 4")
        assert tab.locator("tbody td").first.inner_text() == "50.00 %"
        run.round(0.875)
        tab.wait_for_selector("main >> text=round 2 of 4", timeout=15000)
        tab.wait_for_selector("tbody >> text=87.50 %")
        drawn(tab, "accuracy", 2)
        drawn(tab, "weights", 2)
        assert "0.875" in tab.locator(".figure.accuracy .drawing").get_attribute("aria-label")
        run.end()
        tab.wait_for_selector(".head .state.finished", timeout=15000)
        assert tab.evaluate("window.untouched") is True


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, browser: Any, width: int) -> None:
    finished(tmp_path / "a-run-with-a-name-as-long-as-those-that-people-give-their-runs", rounds=8)
    with serving(tmp_path) as page, Tab(browser, page) as tab:
        tab.set_viewport_size({"width": width, "height": 900})
        drawn(tab, "accuracy")
        drawn(tab, "weights")
        wait_until(lambda: tab.evaluate("document.documentElement.scrollWidth") <= width)


def test_names_from_runs_are_never_markup(tmp_path: Path, browser: Any) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    name = "<svg onload=window.hacked=1>"
    finished(tmp_path / name, name=evil, clients=(f"{evil}a", "b"))
    with serving(tmp_path) as page, Tab(browser, page) as tab:
        tab.get_by_text(name).first.click()
        drawn(tab, "accuracy")
        drawn(tab, "weights")
        tab.wait_for_selector("#reweigh .line")
        assert evil in tab.locator("tbody").inner_text()
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("main img, nav img").count() == 0
