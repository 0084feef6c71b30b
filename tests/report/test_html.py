"""The report as a file: no markup that came from a run, nothing from a network; a browser weighs as Python does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import CommandLine
from tests.kit import assert_refused
from tests.report.made_run import make_run, shared_run
from tests.runs.contents import change

from steelyard.api import Experiment
from steelyard.report import html as made_html
from steelyard.report.figures import KINDS, draw, svg
from steelyard.report.html import embedded, headlines, html, notebook_html, write_report
from steelyard.report.recommended import recommended
from steelyard.report.tables import comparison_csv
from steelyard.report.view import RunView, reweigh
from steelyard.runs.facts import RunFacts
from steelyard.runs.store import Store
from steelyard.weighing.rule import WeighingSettings


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return html(RunView([run]))


class Tags(HTMLParser):
    """Collects tags and every address that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_json_cannot_end_its_element() -> None:
    evil = {"name": "</script><script>alert(1)</script><!--"}
    text = embedded(evil)
    assert "<" not in text
    assert json.loads(text) == evil
    with pytest.raises(ValueError, match="Out of range"):
        embedded({"share": float("nan")})  # no browser reads it


def test_every_registered_figure_has_its_place(run: Path) -> None:
    """Also those that this run has nothing for: a chart of another figure stands in for them."""
    view = RunView([run])
    chart = draw(view, "accuracy")
    attributes = {"view": "data-figure", "federation": "data-part"}
    for kind in KINDS.values():
        of = view.federations if kind.of == "federation" else [()]
        view.charts |= {(kind.name, *([each] if each else [])): chart for each in of}
    page = html(view)
    placed = {kind.name: f'{attributes[kind.of]}="{kind.name}"' for kind in KINDS.values() if kind.of in attributes}
    assert [name for name, attribute in placed.items() if attribute not in page] == []


def test_cards_hold_what_was_recorded(run: Path, page: str) -> None:
    view = RunView([run])
    part = view.federation("fedavg", 1)
    frame = view.clients(part)
    cards = {card["name"]: card for card in data_of(page)["clients"]["fedavg"]["clients"]}
    for name, card in cards.items():
        mine = frame[frame["client"] == name]
        assert (card["asked"], len(card["failures"])) == (len(mine), mine["failure"].notna().sum())
        assert card["share"] == pytest.approx(mine["weight"].sum() / frame["weight"].sum())
    assert cards["client-1"]["flaws"] == ["few steps"]


def test_text_of_runs_is_never_markup_and_nothing_is_fetched(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert "b" not in tags.names  # the flaw of client-0 is "labels flipped <b>badly</b>"
    assert page.count("<script") == 6  # data, bundle and four of ours; none from the description
    assert "alert(1)&lt;/script&gt;" in page
    names = json.dumps(data_of(page))
    assert "labels flipped <b>badly</b>" in names
    assert "no answer within <i>30 s</i>" in names
    assert all(address.startswith("#") for address in tags.addresses)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none';" in policy.group(1)
    assert "unsafe-eval" not in policy.group(1)


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="([^"]+)">', page)


def found_in(page: str, pattern: str) -> list[str]:
    """Everything that stands between two tags, as it is read."""
    return [unescape(text) for text in re.findall(pattern, page, re.S)]


CAPTIONS = r"<caption><span>([^:]*:)?.*?</span></caption>"


def test_a_report_of_one_run_says_what_was_run_and_what_it_has_nothing_for(run: Path, page: str) -> None:
    assert found_in(page, "<title>(.*?)</title>") == [f"{run.name} · Steelyard"]
    assert found_in(page, "</h1><p>(.*?)</p>") == ["A run <script>alert(1)</script> written by hand."]
    assert found_in(page, '<p class="tools"><label>Shown for the rule <select class="rule">(.*?)</select>')[0].count(
        "<option"
    ) == len(data_of(page)["clients"])
    assert "for the first of 2 seeds" in page
    assert "have no figures of" not in page
    words = [rule.in_words for rule in RunView([run]).documents[0].rules if rule.in_words]
    assert found_in(page.partition("in words</summary>")[2], "<li>(.*?)</li>")[: len(words) + 1][:-1] == words
    absent = [
        f"{KINDS[name].title}: {KINDS[name].empty}"
        for name in ("measures", "contributions", "listening", "time", "adapters", "drift")
    ]
    assert found_in(page.partition("Not in this report")[2], "<li>(.*?)</li>") == absent
    assert '<div class="wide">' in page
    facts = dict(zip(found_in(page, "<dt>(.*?)</dt>"), found_in(page, "<dd>(.*?)</dd>"), strict=True))
    final = RunView([run]).documents[0].chain.closing
    assert (facts["status"], facts["chain"]) == ("finished", f"final hash (round 6): {final}")
    assert facts["python"]
    assert "notes" not in facts
    (toml,) = found_in(page, '<pre tabindex="0">(.*?)</pre>')
    assert toml == (run / "experiment.toml").read_text()
    made = datetime.strptime(found_in(page, "Made by Steelyard, (.*?) UTC")[0], "%Y-%m-%d %H:%M")
    assert abs((datetime.now(UTC).replace(tzinfo=None) - made).total_seconds()) < 3600


def test_each_script_of_a_report_is_allowed_by_its_digest(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    allowed = re.findall(r"'sha256-([^']+)'", page)
    assert [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts] == allowed


def test_a_report_of_two_runs_names_the_run_of_everything(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_run(tmp_path / name, rounds=2, clients=4, seeds=(1,)) for name in ("one", "two")]
    toml = folders[1] / "experiment.toml"
    toml.write_text(toml.read_text().replace('description = "', 'description = "Once more. '))
    store = Store(folders[1])
    store.note(RunFacts(notes="two were late", engine_choice="loop"))
    store.close()
    monkeypatch.setattr(made_html, "RULES", 2)
    view = RunView(folders)
    page = html(view)
    assert found_in(page, "<title>(.*?)</title>") == ["one and two · Steelyard"]
    text = "A run <script>alert(1)</script> written by hand."
    assert found_in(page, "</h1><p>(.*?)</p>") == [f"{text}; Once more. {text}"]
    assert set(found_in(page, CAPTIONS)) == {"one:", "two:"}
    lines = headlines(view)
    assert [line.partition(": ")[0] for line in lines] == ["one", "two"]
    assert lines[1] == f"two: {' '.join(headlines(RunView(folders[1:])))}"
    assert found_in(page, "<h3>(one|two)</h3>") == ["one", "two"]
    assert "4 rules have no figures of their own here" in page
    assert "for the first of" not in page
    facts = list(zip(found_in(page, "<dt>(.*?)</dt>"), found_in(page, "<dd>(.*?)</dd>"), strict=True))
    assert [words for name, words in facts if name in ("notes", "engine choice")] == ["loop", "two were late"]


def test_a_notebook_shows_the_answer_the_table_and_a_curve(run: Path, tmp_path: Path) -> None:
    shown = notebook_html(RunView([run]))
    assert found_in(shown, "<p>(.*?)</p>") == headlines(RunView([run]))
    assert len(found_in(shown, "<table>(.*?)</table>")) == 1
    assert svg(draw(RunView([run]), "server")) in shown
    untested = shutil.copytree(run, tmp_path / "untested")
    change(untested, "UPDATE rounds SET server_accuracy = NULL, server_metrics = NULL")
    view = RunView([untested])
    assert svg(draw(view, "accuracy")) in notebook_html(view)
    begun = notebook_html(RunView([make_run(tmp_path / "begun", rounds=0, clients=3, seeds=(1,), status="running")]))
    assert "<svg" not in begun


def test_a_report_that_cannot_be_written_is_refused_and_odd_letters_are_replaced(tmp_path: Path) -> None:
    view = RunView([make_run(tmp_path / "run", rounds=0, clients=3, seeds=(1,), status="running")])
    view.names = ["a\udc80"]
    write_report(view, tmp_path / "report.html")
    assert "<title>a? ·" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert_refused(lambda: write_report(view, tmp_path / "report.html" / "inside"), "--out", "inside")


def test_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    page = html(RunView([make_run(tmp_path / "begun", rounds=0, clients=3, seeds=(1,), status="running")]))
    assert "begun is running: round 0 of 5" in page
    assert sections(page) == ["result", "tables", "experiment"]


def test_the_command(command: CommandLine, refused: Callable[..., str], tmp_path: Path) -> None:
    make_run(tmp_path / "run", rounds=1, clients=3, seeds=(1,), rules=("fedavg",))
    assert "mine.html" in command("report", "run", "-o", "mine.html").stdout
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    assert "--out: got 'mine.pdf'" in refused("report", "run", "--output", "mine.pdf")  # the old word is still taken


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recommended")
    chance = np.random.default_rng(3)
    rows = [
        f"{user}\t{item}\t5\t{time}"
        for user in range(20)
        for time, item in enumerate(chance.choice(30, size=12, replace=False))
    ]
    (folder / "ratings.tsv").write_text("\n".join(rows) + "\n")
    changes = [f'interactions.path="{folder / "ratings.tsv"}"', "interactions.min_user=5", "rounds.epochs=2"]
    return (
        Experiment.load("fpl-amazon", [*changes, "rounds.evaluate_every=1", "ranking.cutoff=5"])
        .run(folder / "run")
        .folder
    )


def test_metrics_and_figures_stand_beside_the_most_popular(lists: Path) -> None:
    view = RunView([lists])
    made = recommended(view)
    (grid,) = made.tables
    assert grid.title == "Metrics of the lists of 5"
    assert [row[0] for row in grid.rows] == [view.labels[0], "most popular"]
    assert {"nDCG", "coverage", "Gini", "PopREO"} <= set(grid.headings)
    (points,) = made.figures["tradeoff"]["datasets"].values()
    shown = next(row for row in points if row["rule"] == "most popular")
    column = grid.headings.index("coverage")
    assert float(grid.rows[1][column]) == pytest.approx(shown["coverage"], abs=1e-4)
    (document,) = view.documents
    lines = comparison_csv(document).splitlines()
    assert any(line.startswith(f"{document.rules[0].rule},final,") for line in lines), "no header alone"


def test_lists_of_two_lengths_have_a_table_each(lists: Path, tmp_path: Path) -> None:
    other = shutil.copytree(lists, tmp_path / "other")
    toml = other / "experiment.toml"
    toml.write_text(toml.read_text().replace("cutoff = 5", "cutoff = 3"))
    titles = [table.title for table in recommended(RunView([lists, other])).tables]
    assert titles == ["Metrics of the lists of 5", "Metrics of the lists of 3"]


class Opened:
    """A page with the network off; everything that went wrong in it is kept."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.context = browser.new_context(offline=True)
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "report.html"
    write_report(RunView([shared_run(tmp_path_factory)]), path)
    return path


@pytest.fixture
def opened(browser: Any, written: Path) -> Iterator[Opened]:
    found = Opened(browser, written)
    yield found
    assert found.problems == []
    found.context.close()


@pytest.mark.slow
def test_it_opens_offline_and_draws_everything(opened: Opened) -> None:
    page = opened.page
    opened.draw_all()
    page.click("#cards .open")
    page.wait_for_selector(".course svg")
    assert all(url.startswith(("file:", "data:")) for url in opened.requests)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    before = page.inner_text("#cards")
    page.select_option("#clients select.rule", "fedavg")
    assert page.inner_text("#cards") != before
    assert page.input_value("#weights select.rule") == "fedavg"
    page.fill("#cards-search", "client-1")
    assert page.locator("#cards .card").count() == 1
    assert "few steps" in page.inner_text("#cards")


@pytest.mark.slow
def test_nothing_is_wider_than_a_telephone_or_a_window_that_was_narrowed(opened: Opened) -> None:
    page = opened.page
    page.click("#cards .open")
    page.wait_for_selector(".course svg")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(400)  # Figures are drawn again once the width has come to rest.
        opened.draw_all()
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth", timeout=5000)


@pytest.mark.slow
def test_weighing_again_equals_python_over_all_rounds(opened: Opened, run: Path) -> None:
    page, view = opened.page, RunView([run])

    def check(*criteria: str, **settings: Any) -> None:
        shown = {row["name"]: row["weight"] for row in page.evaluate("document.getElementById('reweigh').result")}
        found = reweigh(view, view.federation("VP>DS"), WeighingSettings(criteria=criteria, **settings))
        assert shown == pytest.approx({row["client"]: row["weight"] for row in found["clients"]}, abs=1e-12)

    check("VP", "DS")
    page.focus("#reweigh button[aria-label='move DS up']")
    page.keyboard.press("Enter")
    check("DS", "VP")
    for label, value in (("score", "owa"), ("normalised", "max")):
        page.select_option(f"#reweigh .control label:has-text('{label}') select", value)
    check("DS", "VP", score="owa", quantifier="most", normalise="max")
    for value in ("fedavg", "VP>DS"):  # back to its own order
        page.select_option("#reweigh .control label:has-text('updates of') select", value)
    check("VP", "DS")
    assert "not a result" in page.inner_text("#reweigh")
