"""`steelyard paper`: every entry runs in small, verdicts and tests by hand, values that are kept and taken up again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.kit import assert_refused, inside, named
from tests.warm import ROOT

from steelyard.base.errors import UserError
from steelyard.experiment.loading import load
from steelyard.studies.paper import Paper, plan
from steelyard.studies.paper_table import ROWS, Value, as_csv, entries, entry_of, found_of, read_rows, verdict

RUNS = {name: entry_of(name) for name in entries() if not entry_of(name).command}
QUICK = {"figure-3.3": "", "001-figure-2": "adafed-2", "figure-4.4": "amazon"}
"""Run by default; the others are slow."""


def tiny(name: str, data: str, folder: Path) -> list[Value]:
    """Run an entry in small and return its values; a machine without a data set skips with its name."""
    words = ["--data", data] if data else []
    done = inside("-q", "paper", name, "--tiny", *words, "--out", folder / "out", folder=ROOT)
    if ": found no" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "mean nothing" in done.stdout or RUNS[name].releases
    return [] if RUNS[name].releases else read_rows(folder / "out" / ROWS)


def hold(name: str, data: str, values: list[Value]) -> None:
    """Hold values to their entry: each system of the data has each measure that its run can have."""
    entry = RUNS[name]
    for system in entry.of(data):
        found = {value.measure for value in values if value.system == system.name and value.data == data}
        assert found <= set(entry.measures)
        assert found, system.name
        for series in found:
            # A series goes from rank 1 on, also where each value of a field is a system.
            if series.startswith(("sent:", "shown:")):
                ranks = [value.x for value in values if (value.system, value.measure) == (system.name, series)]
                assert ranks == list(range(1, len(ranks) + 1))
                assert len(ranks) > 100


@pytest.mark.parametrize(("name", "data"), QUICK.items())
def test_an_entry_runs_in_small(name: str, data: str, tmp_path: Path) -> None:
    values = tiny(name, data, tmp_path)
    if data:
        hold(name, data, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for name, entry in RUNS.items() for data in entry.data if QUICK.get(name) != data]
)
def test_every_entry_runs_in_small(name: str, data: str, tmp_path: Path) -> None:
    hold(name, data, tiny(name, data, tmp_path))


def test_the_list_names_every_entry_and_a_command_stands_for_what_paper_does_not_run(tmp_path: Path) -> None:
    listing = inside("-q", "paper", "--format", "json", folder=tmp_path)
    assert list(json.loads(listing.stdout)) == entries()
    shown = inside("-q", "paper", "001-table-1", folder=tmp_path)
    assert "steelyard show adafed-2 --split" in shown.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "named"),
    named(
        [
            ("entry", ["table-4.9"], ["paper", "table-4.9"]),
            ("data", ["table-4.2", "--data", "amazn"], ["--data", "amazn", "amazon"]),
            ("picture", ["table-4.2", "--out", "f.svg"], ["--out", "f.svg"]),
            ("rows", ["contrasts", "--rows", "nowhere.csv"], ["nowhere.csv"]),
            ("other file", ["contrasts", "--rows", str(ROOT / "README.md")], ["README.md"]),
        ]
    ),
)
def test_a_mistake_is_one_line(words: list[str], named: list[str], tmp_path: Path) -> None:
    done = inside("-q", "paper", *words, folder=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert [part for part in named if part not in done.stderr] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ours", "printed", "said"),
    [
        ((), 1.0, ""),
        ((0.5,), None, ""),
        ((0.0159,), 0.0142, "above"),
        ((0.1405,), 0.142, "reproduced"),  # within 2 %
        ((0.1390,), 0.142, "below"),
        # Three seeds, s = 1: a single further run lies within t(2) · √(1 + 1/3) = 4.968 of their mean.
        ((9.0, 10.0, 11.0), 14.9, "reproduced"),
        ((9.0, 10.0, 11.0), 15.0, "below"),
        ((9.0, 10.0, 11.0), 5.0, "above"),
    ],
)
def test_the_verdict_by_hand(ours: tuple[float, ...], printed: float | None, said: str) -> None:
    assert verdict(ours, printed) == said


def test_a_claim_with_too_few_seeds_is_not_tested_and_counts() -> None:
    entry = entry_of("contrasts")
    first, second = entry.claims[:2]
    values = [Value(first.data, first.rule, seed, "score", 0.0, 1.0) for seed in range(10)]
    values += [Value(first.data, first.against, seed, "score", 0.0, 0.0) for seed in range(10)]
    values += [Value(second.data, second.rule, 1, "score", 0.0, 0.5)]
    found = found_of("contrasts", values).claims
    assert found[0].verdict == "ahead"
    assert found[0].p == pytest.approx(14 * 2 / 2**10)  # of ten equal signs, times the family
    assert found[1].verdict == "not tested: 1 of 10 seeds"


def test_kept_values_are_the_same_bits(tmp_path: Path) -> None:
    values = [Value("a", "x, pi 0.1", 1, "f1@10", 0.1, 1 / 3), Value("", 'with "quotes"', 2, "ratio", 0.0, 1e-300)]
    path = tmp_path / ROWS
    path.write_text(as_csv(values))
    assert read_rows(path) == values


def test_points_of_a_grid_come_first_and_the_best_is_fitted(tmp_path: Path) -> None:
    paper = plan("table-6.1b", [], 2, [], tiny=False)
    points, others = list(paper.looks(tmp_path))
    mf = [cell for cell in points if cell.changes["system"] == "mf"]
    assert len(mf) == 27
    assert [cell.seeds for cell in others if cell.changes["system"] == "mf"] == [(1,), (2,)]
    for number, cell in enumerate(mf):
        score = 1.0 if number == 5 else 0.1
        (tmp_path / f"{cell.folder}.csv").write_text(as_csv([Value("books", "mf", 1, "ndcg@10", 0.0, score)]))
    assert paper.ended(tmp_path, mf[5])
    own = next(cell for cell in others if cell.changes["system"] == "mf")
    assert paper._best(tmp_path, own) == {"factors": 16, "rate": 0.003, "decay": 0.01, "epochs": 50}
    described = paper.described(mf[0]).model_dump()
    assert described["interactions"]["validation"] == 0.2


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    paper = plan("figure-4.4", ["amazon"], None, [], tiny=True)
    assert [cell.seeds for cell in paper.cells()] == [(1,)] * 8
    first = paper.cells()[0]
    (tmp_path / f"{first.folder}.csv").write_text(as_csv([Value("amazon", "sFPL, pi 0.0", 1, "sent:1000", 1.0, 3.0)]))
    assert [paper.ended(tmp_path, cell) for cell in paper.cells()] == [True] + [False] * 7
    assert paper.answer(tmp_path).left == 7
    paper.write(tmp_path)
    assert Paper.read(tmp_path) == paper


RECIPES = {
    "fpl-amazon": ("table-4.2", "amazon", "pFPL+"),
    "fpl-italy": ("table-4.2", "italy", "pFPL+"),
    "fpl-librarything": ("table-4.2", "librarything", "pFPL+"),
    "fpl-ml1m": ("table-4.2", "ml1m", "pFPL"),
    "kgflex-yahoo": ("table-6.1a", "yahoo", "KGFlex"),
    "kgflex-books": ("table-6.1b", "books", "KGFlex"),
}


@pytest.mark.parametrize(("recipe", "row"), RECIPES.items())
def test_a_recipe_is_the_row_of_its_table(recipe: str, row: tuple[str, str, str]) -> None:
    """`steelyard run RECIPE` is what `steelyard paper TABLE` runs for that row."""
    name, data, system = row
    paper = plan(name, [data], 1, [])
    cell = next(cell for cell in paper.cells() if cell.changes["system"] == system)
    assert paper.described(cell) == load(recipe)


SECTIONS = {
    "ml1m": "## MovieLens 1M",
    "amazon": "## Amazon Digital Music",
    "italy": "<summary>Foursquare: six cities of Italy together",
    "librarything": "## LibraryThing",
}


@pytest.mark.parametrize("data", SECTIONS)
def test_settings_of_fpl_are_those_of_the_results_page(data: str) -> None:
    """Mode, π, factors, rate and epochs of each row; validation rows chose them."""
    page = (ROOT / "docs" / "results" / "recommend.md").read_text(encoding="utf-8").split(SECTIONS[data], 1)[1]
    paper = plan("table-4.2", [data], 1, [])
    for mode in ("sFPL", "sFPL+", "pFPL", "pFPL+"):
        words = re.escape(f"{mode} (tables)" if mode.endswith("+") else mode)
        row = re.search(rf"\| {words}, π = (\S+) \| (?:α (\S+), )?f (\d+), epoch (\d+) \|", page)
        assert row is not None, (data, mode)
        cell = next(cell for cell in paper.cells() if cell.changes["system"] == mode)
        found = paper.described(cell).model_dump()
        fpl = found["fpl"]
        assert (fpl["mode"], fpl["pi"], fpl["learning_rate"]) == (mode, float(row[1]), float(row[2] or 0.05)), data
        assert (fpl["factors"], found["rounds"]["epochs"]) == (int(row[3]), int(row[4])), data
        assert fpl["epoch"] == ("tables" if mode.endswith("+") else "formula")


@pytest.mark.parametrize(
    ("recipe", "training", "rounds"),
    [
        # Paper 000, "Hyperparameters": E = 5, full batch, a tenth of the clients; the rates are those of its grid.
        ("mnist-iid", {"epochs": 5, "batch_size": "full", "learning_rate": 0.215}, {"fraction": 0.1}),
        ("mnist-noniid", {"epochs": 5, "batch_size": "full", "learning_rate": 0.1}, {"fraction": 0.1}),
        # Paper 001, §4: E = 5, B = 100, R = 20.
        ("adafed-1", {"epochs": 5, "batch_size": 100}, {"count": 20}),
        ("adafed-2", {"epochs": 5, "batch_size": 100}, {"count": 20}),
        ("adafed-3", {"epochs": 5, "batch_size": 100}, {"count": 20}),
    ],
)
def test_settings_of_the_image_recipes_are_the_papers(
    recipe: str, training: dict[str, object], rounds: dict[str, object]
) -> None:
    found = load(recipe).model_dump()
    assert {name: found["training"][name] for name in training} == training
    assert {name: found["rounds"][name] for name in rounds} == rounds


def test_every_claim_and_figure_names_what_its_entry_has() -> None:
    for name, entry in RUNS.items():
        systems = {data: [each.name for each in entry.of(data)] for data in entry.data or ("",)}
        for claim in entry.claims:
            assert {claim.rule, claim.against} <= {*systems[claim.data]}, name
            assert claim.measure in entry.measures, name
        for system in entry.systems:
            assert {*system.given, *system.printed, *system.data} <= {"all", "", *entry.data}, name
            assert all(len(row) <= len(entry.measures) for row in system.printed.values()), name
        if entry.figure is not None and not entry.releases:
            assert {entry.figure.x, entry.figure.y} <= {"x", *entry.measures}, name


def test_changes_of_the_command_win_over_the_entry() -> None:
    paper = plan("000-figure-2a", [], 1, ["rounds.count=7"])
    assert paper.described(paper.cells()[0]).model_dump()["rounds"]["count"] == 7
    assert_refused(lambda: plan("000-figure-2a", ["x"], 1, []), "--data", "'x'", "mnist-iid")
    with pytest.raises(UserError):
        plan("000-figure-2a", [], 1, ["rounds.cuont=7"]).described(paper.cells()[0])
