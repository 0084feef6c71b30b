"""Figures on pages of results are those of their tables, archives and papers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.pages import beside
from tests.warm import ROOT

from steelyard.base.measures import show_estimate
from steelyard.studies.arena import judge
from steelyard.studies.checking import ArenaArchive, check_archive
from steelyard.studies.paper_table import entries, found_of, read_rows
from steelyard.studies.verdict import ArenaDocument

RESULTS = ROOT / "docs" / "results"


PICTURES = beside("result_pictures").PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_a_table_has_its_numbers(name: str) -> None:
    """Drawn to the last step but one: what is left is the layout."""
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert f"]({name}.svg)" in page
    document = PICTURES[name]().to_dict()
    values = {abs(row["value"]) for rows in document["datasets"].values() for row in rows}
    assert len(values) >= 5
    assert not values - {float(figure) for figure in re.findall(r"\d*\.?\d+", page.split("<details")[0])}


def test_what_is_said_of_the_third_papers_table_follows_from_its_cells() -> None:
    """Rounds of its Table 1: 20, 30, 40, 50, 70 and 75 % of the devices at 75 %, then 20 to 50 % of them at 80 %."""
    alone = {
        "DS": (22, 29, 39, 62, 304, 801, 31, 45, 72, 136),
        "LD": (25, 32, 43, 70, 278, 532, 36, 53, 90, 161),
    }
    orders = {
        "DS>LD>MD": (20, 29, 39, 60, 300, 823, 30, 45, 72, 135),
        "DS>MD>LD": (20, 29, 39, 60, 300, 669, 30, 45, 72, 135),
        "MD>DS>LD": (24, 32, 45, 70, 255, 532, 36, 53, 84, 161),
        "MD>LD>DS": (24, 32, 46, 70, 255, 620, 36, 53, 90, 161),
    }

    def far(first: str, criterion: str) -> list[str]:
        found = [
            100 * sum(abs(cell / other - 1) for cell, other in zip(cells, alone[criterion], strict=True)) / len(cells)
            for order, cells in orders.items()
            if order.startswith(first)
        ]
        return [f"{value:.1f}" for value in sorted(found)]

    page = " ".join((RESULTS / "seeds.md").read_text(encoding="utf-8").split())
    assert "with DS first {} and {} % from DS".format(*far("DS", "DS")) in page
    assert "MD-first orders are {} and {} % from *LD alone*".format(*far("MD", "LD")) in page


def test_the_page_of_the_papers_is_made_from_the_ledger() -> None:
    """`python docs/ledger.py` writes it; every row says how it stands, and entries are those of `steelyard paper`."""
    ledger = beside("ledger")
    page = (RESULTS / "seeds.md").read_text(encoding="utf-8")
    assert ledger.written(page) == page
    claims = ledger.claims()
    assert len({claim["id"] for claim in claims}) == len(claims)
    stands = r"reproduced|differs|run|built|not shown|removed|contradicted|not found|as Table"
    assert [claim["id"] for claim in claims if not re.search(stands, claim["here"])] == []
    assert {claim["entry"] for claim in claims if "entry" in claim} <= {*entries()}


VALUES = ROOT / "benchmarks" / "results" / "papers"


@pytest.mark.parametrize("name", sorted(path.stem for path in VALUES.glob("*.csv")))
def test_stored_values_have_every_seed_of_their_claims(name: str) -> None:
    values = read_rows(VALUES / f"{name}.csv")
    stored = {value.data for value in values}
    found = found_of(name, values)
    whole = [claim for claim in found.claims if claim.claim.partition(":")[0] in stored]
    assert [claim.claim for claim in whole if claim.verdict.startswith("not tested")] == []
    assert any(row.ours.values for row in found.rows)


@pytest.mark.parametrize("page", ["seeds", "adafed"])
def test_contrasts_on_pages_follow_from_the_stored_seeds(page: str) -> None:
    """Gain, p and verdict of each row of a table of contrasts are those of a claim."""
    found = found_of("contrasts", read_rows(VALUES / "contrasts.csv"))
    claims = {show_estimate(each.gain, 2, 100.0, signed=True).replace("+0.00", "0.00"): each for each in found.claims}
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| contrast \| seeds \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, flags=re.M)
    rows = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]
    assert len(rows) >= (len(claims) if page == "seeds" else 1)
    for row in rows:
        claim = claims[row[2]]
        assert claim.p == pytest.approx(float(row[3]), rel=0.2)  # printed with one digit
        said = claim.verdict.replace("within the margin", "within a point").replace("than the margin", "than a point")
        assert row[5].replace("*", "") == said


def in_points(gain: float) -> str:
    """Return a gain as tables have it; what is a little below 0 is 0."""
    text = f"{100 * gain:+.1f}"
    return "0.0" if text == "-0.0" else text.replace("-", "−")


def counts_and_gains(found: ArenaDocument) -> str:
    """Return the cells of a row of the board that say how a candidate did against the baseline."""
    gains = [scene.gain.mean for scene in found.scenes if scene.gain is not None]
    counts = f"{found.better} | {found.worse} | {found.equal}"
    return f"{counts} | {show_estimate(found.gain_over_seeds, 1, 100.0, signed=True)} | {in_points(min(gains))}"


def board_rows(path: Path) -> list[str]:
    """Return the rows of the board that an archive comes to, the best rank first: each rule as the candidate."""
    archive = ArenaArchive.read(path)
    arena, rows = archive.plan, list[str]()
    assert arena.whole, f"{path.name}: not the whole suite"
    for rank in judge(arena, archive.figures).ranks:
        found = judge(arena.model_copy(update={"candidate": rank.rule}), archive.figures)
        told = "| | | | " if rank.rule == found.baseline else f"{counts_and_gains(found)} "
        worst = show_estimate(rank.worst, 1, 100.0)
        rows.append(f"| `{found.suite}` | `{rank.rule}` | {told}| {worst} | {rank.rank:.2f} |")
    return rows


@pytest.mark.parametrize("name", ["arena.json", "arena-standard.json"])
def test_the_arenas_board_says_what_its_archive_says(name: str) -> None:
    path = RESULTS / name
    assert not check_archive(path, anew=False).differs
    archive = ArenaArchive.read(path)
    page = (RESULTS / "arena.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    assert [row for row in board_rows(path) if row not in lines] == []
    for scene in judge(archive.plan, archive.figures).scenes:
        assert scene.gain is not None
        gain = in_points(scene.gain.mean)
        line = rf"^\| {scene.scene} \|.* \| {re.escape(gain)} ± [^|]+\|.*\| {scene.verdict} \|$"
        assert re.search(line, page, re.MULTILINE), line


def board_row(path: Path) -> str:
    """Return the row of the board that an idea's archive comes to: what a pull request puts there."""
    archive = ArenaArchive.read(path)
    found = judge(archive.plan, archive.figures)
    assert found.whole, f"{path.name}: not the whole suite"
    mine = next(row for row in found.ranks if row.rule == found.candidate)
    name = f"| `{found.candidate}` | [{path.stem}](arena/{path.name}) | `{found.suite}` {found.version}"
    return f"{name} | {counts_and_gains(found)} | {show_estimate(mine.worst, 1, 100.0)} |"


def test_ideas_that_were_sent_in_stand_on_the_board_as_their_archives_have_them() -> None:
    page = (RESULTS / "arena.md").read_text(encoding="utf-8")
    archives = sorted((RESULTS / "arena").glob("*.json"))
    assert sorted(re.findall(r"\]\(arena/([^)]+)\)", page)) == [path.name for path in archives]
    for path in archives:
        checked = check_archive(path, anew=False)
        assert not checked.differs, checked.lines
        assert board_row(path) in page.splitlines(), board_row(path)
