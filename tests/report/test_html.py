"""The report as a file: everything in it, nothing of it markup that came from a run, nothing from a network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.conftest import CommandLine
from tests.report.made_run import make_run

from steelyard.errors import UserError
from steelyard.report.headline import headline
from steelyard.report.html import embedded, html, write_report
from steelyard.report.sign import sign
from steelyard.report.view import RunView
from steelyard.result import Result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("html") / "run", rounds=6, clients=8, seeds=(1, 2))


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


def test_text_of_runs_and_clients_is_never_markup(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert "b" not in tags.names  # the flaw of client-0 is "labels flipped <b>badly</b>"
    assert page.count("<script") == 6  # data, bundle and four of ours; none from the description
    assert "alert(1)&lt;/script&gt;" in page
    names = json.dumps(data_of(page))
    assert "labels flipped <b>badly</b>" in names
    assert "no answer within <i>30 s</i>" in names


def test_nothing_is_fetched(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert all(address.startswith("#") for address in tags.addresses)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy.group(1)
    assert "unsafe-eval" not in policy.group(1)


def test_json_cannot_end_its_element() -> None:
    text = embedded({"name": "</script><script>alert(1)</script><!--"})
    assert "<" not in text
    assert json.loads(text) == {"name": "</script><script>alert(1)</script><!--"}


def test_every_part_is_there(page: str) -> None:
    sections = re.findall(r'<section id="([^"]+)">', page)
    assert sections == [
        *("result", "weights", "clients", "weigh-again", "targets"),
        *("devices", "orders", "classes", "split", "tables", "experiment"),
    ]
    data = data_of(page)
    known = {"accuracy", "bytes", "server", "macro-f1", "class-f1", "flawed", "targets", "devices"}
    assert set(data["figures"]) == known
    assert set(data["parts"]["weights"]) == {"VP>DS", "fedavg", "online(DS>LD)"}
    assert set(data["parts"]["orders"]) == {"online(DS>LD)"}
    assert "[partition]" in page
    assert "steelyard" in page


def test_cards_hold_what_was_recorded(run: Path, page: str) -> None:
    view = RunView([run])
    part = view.federation("fedavg", 1)
    frame = view.clients(part)
    cards = {card["name"]: card for card in data_of(page)["clients"]["fedavg"]["clients"]}
    assert sum(card["share"] for card in cards.values()) == pytest.approx(1)
    for name, card in cards.items():
        mine = frame[frame["client"] == name]
        assert card["asked"] == len(mine)
        assert len(card["failures"]) == int(mine["failure"].notna().sum())
        assert card["share"] == pytest.approx(mine["weight"].sum() / frame["weight"].sum())
    assert cards["client-1"]["flaws"] == ["few steps"]


def test_the_sentence_on_top_says_who_won(run: Path, tmp_path: Path) -> None:
    first, second = headline(RunView([run]))
    assert re.match(
        r"VP>DS is ahead of fedavg by \d+\.\d points on the server's clean rows, but two seeds cannot", first
    )
    assert "2 of 8 clients were flawed" in second
    (document,) = RunView([run]).documents
    assert document is not None
    means = {row["rule"]: row["weight"]["mean"] for row in document["flawed"]}  # over both seeds, as in the table
    assert f"fedavg gave them {means['fedavg']:.0%}" in second
    assert f"VP>DS gave them {means['VP>DS']:.0%}" in second
    assert f"got {means['VP>DS']:.0%} of the weight" in sign(RunView([run]))[1]
    one = make_run(tmp_path / "one", rounds=3, clients=4, seeds=(1,), rules=("fedavg",), status="stopped")
    told = " ".join(headline(RunView([one])))
    assert "No recommendation: the run is stopped, after round 3 of 3." in told


def test_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    page = html(RunView([make_run(tmp_path / "begun", rounds=0, clients=3, seeds=(1,), status="running")]))
    assert "begun is running: round 0 of 5" in page
    assert "No round has been tested: no accuracy is known." in page
    assert re.findall(r'<section id="([^"]+)">', page) == ["result", "tables", "experiment"]


def test_several_runs_in_one_report(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", rounds=3, clients=4, seeds=(1,))
    page = html(RunView([run, other]))
    assert "run and other" in page
    assert "other · fedavg" in data_of(page)["parts"]["weights"]


@pytest.mark.slow
def test_the_command_and_its_figures(steelyard: CommandLine, run: Path, tmp_path: Path) -> None:
    done = steelyard("report", run, "-o", "mine.html", "--figures", "figures")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"weights.svg", "weights.png", "weights.pdf"}


def test_the_command(steelyard: CommandLine, run: Path, tmp_path: Path) -> None:
    done = steelyard("report", run, "-o", "mine.html")
    assert done.returncode == 0, done.stderr
    assert "report to open: mine.html" in done.stdout
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    for option in ("--out", "--output"):  # the old word is still taken
        wrong = steelyard("report", run, option, "mine.pdf")
        assert (wrong.returncode, "--out: got 'mine.pdf'" in wrong.stderr) == (2, True)


def test_a_file_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"--out: .*taken/report.html cannot be written"):
        write_report(RunView([run]), tmp_path / "taken" / "report.html")


def test_a_result_shows_itself_and_draws(run: Path, tmp_path: Path) -> None:
    result = Result(run)
    shown = result._repr_html_()
    assert "<svg" in shown
    assert "<script" not in shown
    assert "VP&gt;DS is ahead of fedavg" in shown
    assert result.plot().to_dict()["layer"]
    assert result.plot("weights", rule="fedavg", seed=2).to_dict()["layer"]
    assert result.plot("client", client="client-3").to_dict()["vconcat"]
    with pytest.raises(UserError, match="kind: got 'nothing'"):
        result.plot("nothing")
    assert result.report(tmp_path / "own.html").read_text().endswith("</html>")
    assert "no run here" in Result(tmp_path / "gone")._repr_html_()
