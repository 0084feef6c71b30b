"""The report in a real browser: opens from the file system with the network off, weighs again as Python does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.made_run import make_run

from steelyard.report.html import write_report
from steelyard.report.reweigh import reweigh
from steelyard.report.view import RunView
from steelyard.weighing.rule import WeighingSettings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("browser") / "run", rounds=6, clients=8, seeds=(1,))
    write_report(RunView([folder]), folder / "report.html")
    return folder


class Opened:
    """A page with the network off; everything that went wrong in it is kept."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: said.type == "error" and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")

    def draw_all(self) -> None:
        for figure in self.page.query_selector_all(".drawing"):
            figure.scroll_into_view_if_needed()
            figure.wait_for_selector("svg, canvas, .empty")


@pytest.fixture
def opened(browser: Any, run: Path) -> Iterator[Opened]:
    found = Opened(browser, run / "report.html")
    yield found
    found.context.close()


def test_it_opens_offline_draws_everything_and_nothing_goes_wrong(opened: Opened) -> None:
    opened.draw_all()
    opened.page.click("#cards .open")
    opened.page.wait_for_selector(".course svg")
    assert opened.problems == []
    assert all(url.startswith(("file:", "data:")) for url in opened.requests)


def test_choosing_a_rule_changes_the_figures_and_the_cards(opened: Opened) -> None:
    before = opened.page.inner_text("#cards")
    opened.page.select_option("#clients select.rule", "fedavg")
    assert opened.page.inner_text("#cards") != before
    assert opened.page.input_value("#weights select.rule") == "fedavg"
    opened.page.fill("#cards-search", "client-1")
    assert opened.page.locator("#cards .card").count() == 1
    assert "few steps" in opened.page.inner_text("#cards")
    opened.page.fill("#cards-search", "nobody")
    assert "clear the search" in opened.page.inner_text("#cards-count")
    assert opened.problems == []


def test_weighing_again_equals_python(opened: Opened, run: Path) -> None:
    view = RunView([run])
    for normalise in ("share", "max", "rank"):
        weigh_again(opened, view, "mean", normalise)
    others = {"prioritized": "max", "weighted-mean": "rank", "owa": "share", "product": "max", "power": "rank"}
    for score, normalise in others.items():
        weigh_again(opened, view, score, normalise)
    assert opened.problems == []


def weigh_again(opened: Opened, view: RunView, score: str, normalise: str) -> None:
    """Choose a rule on the control and compare what it shows with what Python computes."""
    page = opened.page
    page.select_option("#reweigh .control label:has-text('updates of') select", "fedavg")  # back to its own order
    page.select_option("#reweigh .control label:has-text('updates of') select", "VP>DS")
    page.select_option("#reweigh .control label:has-text('score') select", score)
    page.select_option("#reweigh .control label:has-text('normalised') select", normalise)
    options: dict[str, Any] = {}
    criteria = ["VP", "DS"]
    if score == "prioritized":
        page.focus("#reweigh button[aria-label='move DS up']")
        page.keyboard.press("Enter")
        criteria = ["DS", "VP"]
    elif score == "weighted-mean":
        page.fill("#reweigh input[aria-label='weight of DS']", "3")
        options["weights"] = (1.0, 3.0)
    elif score == "owa":
        options["quantifier"] = "most"
    elif score == "power":
        options["power"] = 2.0
    shown = {row["name"]: row["weight"] for row in page.evaluate("document.getElementById('reweigh').result")}
    settings = WeighingSettings(criteria=tuple(criteria), score=score, normalise=normalise, **options)  # type: ignore[arg-type]
    expected = {row["client"]: row["weight"] for row in reweigh(view, view.federation("VP>DS"), settings)["clients"]}
    assert shown == pytest.approx(expected, abs=1e-12), (score, normalise)
    assert "not a result" in page.inner_text("#reweigh")


def test_one_criterion_alone_and_dragging(opened: Opened, run: Path) -> None:
    page = opened.page
    page.select_option("#reweigh .control label:has-text('updates of') select", "VP>DS")
    page.drag_and_drop("#reweigh li[data-criterion=DS]", "#reweigh li[data-criterion=VP]")
    assert page.locator("#reweigh .order li").first.get_attribute("data-criterion") == "DS"
    page.uncheck("#reweigh li[data-criterion=VP] input")
    shown = {row["name"]: row["weight"] for row in page.evaluate("document.getElementById('reweigh').result")}
    view = RunView([run])
    found = reweigh(view, view.federation("VP>DS"), WeighingSettings(criteria=("DS",)))
    assert shown == pytest.approx({row["client"]: row["weight"] for row in found["clients"]}, abs=1e-12)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone_scrolls_one_way_only(browser: Any, run: Path, scheme: str) -> None:
    opened = Opened(browser, run / "report.html", width=390, scheme=scheme)
    opened.draw_all()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in ground[4:-1].split(",")) > 380
    assert light == (scheme == "light")
    assert opened.problems == []
    opened.context.close()


def test_the_keyboard_reaches_what_can_be_used(opened: Opened) -> None:
    page = opened.page
    reached: set[str] = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName + '.' + document.activeElement.className"))
    assert {"A.", "SELECT.rule", "BUTTON.save", "DIV.scroll"} <= reached
