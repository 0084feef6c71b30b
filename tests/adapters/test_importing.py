"""`steelyard import`: a federation's own records become a run folder, or one line says which cell is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import CommandLine

import steelyard as package
from steelyard.adapters.importing import import_file
from steelyard.errors import UserError
from steelyard.runs.reader import History

HEADER = "round,client,DS,quality,weight,reason,accuracy,loss"
ROWS = (
    "1,north,100,0.9,0.7,,0.5,1.2",
    "1,south,50,0.5,0.3,,0.4,",
    "1,east,,,,model holds NaN,,",
    "2,north,100,0.8,2,,0.7,1.0",
    "2,south,50,0.6,2,,0.5,1.1",
)


def written(folder: Path, *lines: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_csv_becomes_a_run_that_commands_read(tmp_path: Path, steelyard: CommandLine) -> None:
    file = written(tmp_path, HEADER, *ROWS)
    done = steelyard("import", file, "--out", tmp_path / "run")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"2 rounds stored in {tmp_path / 'run'}"), done.stderr
    history = History(tmp_path / "run")
    assert history.cohorts("as imported", 0).weight.tolist() == [0.7, 0.3, 0.5, 0.5]
    assert history.cohorts("as imported", 0).samples.tolist() == [100, 50, 100, 50]
    assert list(history.failures_after()["failure"]) == ["model holds NaN"]
    assert history.rounds["accuracy"].tolist()[1:] == [pytest.approx(0.45), pytest.approx(0.6)]
    assert history.chain.problem == ""
    again = steelyard("weigh", tmp_path / "run", "--by", "quality>DS", "--format", "json")
    assert json.loads(again.stdout)["rounds"] == 2, again.stderr
    assert "was imported from a file" in steelyard("resume", tmp_path / "run").stderr


def test_a_rule_weighs_where_the_file_does_not(tmp_path: Path) -> None:
    rows = [{"round": n, "client": c, "DS": 10 * n, "VP": v} for n in (0, 1) for c, v in (("a", 0.2), ("b", 0.8))]
    file = written(tmp_path, *map(json.dumps, rows), "", name="log.jsonl")
    assert import_file(file, tmp_path / "run", "VP>DS/max") == 2
    found = History(tmp_path / "run").cohorts("VP>DS/max", 0)
    expected = package.weigh({"a": {"VP": 0.2, "DS": 10}, "b": {"VP": 0.8, "DS": 10}}, "VP>DS/max").weights
    assert found.weight[2:] == pytest.approx(expected, abs=1e-12)
    assert import_file(file, tmp_path / "equal", "EQ") == 2
    assert History(tmp_path / "equal").cohorts("EQ", 0).weight.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ((HEADER, "1,north,many,0.9,1,,,"), "line 2, DS: got 'many'; allowed: a number from 0 to 1e12"),
        ((HEADER, ROWS[0], "1,south,5,nan,1,,,"), "line 3, quality: got nan; allowed: a number from 0 to 1e30"),
        ((HEADER, "1,north,1,0.9,-1,,,"), "line 2, weight: got -1; allowed: a number from 0 to 1e30"),
        ((HEADER, "1,north,1,0.9,,,,"), "line 2, weight: got ''; allowed: a number from 0 to 1e30"),
        ((HEADER, "1.5,north,1,0.9,1,,,"), "line 2, round: got '1.5'; allowed: a whole number from 0 on"),
        ((HEADER, "1,north,1,0.9,1,,inf,"), "line 2, accuracy: got 'inf'; allowed: a number"),
        ((HEADER, "1,north,1e13,0.9,1,,,"), "line 2, DS: got 1e+13; allowed: a number from 0 to 1e12"),
        (("round,client,q,samples,weight", "1,a,1,1e19,1"), "line 2, samples: got 1e+19; allowed: a number from 0 to"),
        (
            ("round,client,D\x1bS,weight", "1,a,1,1"),
            r"line 1: the column 'D\x1bS' holds characters that",
        ),
        (('{"round": 1, "client": "a", "D\\nS": 1, "weight": 1}',), r"line 1: the column 'D\nS' holds characters that"),
        ((HEADER, "1,no\x1brth,1,0.9,1,,,"), r"line 2, client: 'no\x1brth' holds characters that cannot be shown"),
        ((HEADER, "1,,1,0.9,1,,,"), "line 2, client: is empty; allowed: a name for each client"),
        ((HEADER, ROWS[0], ROWS[0]), "line 3, client: 'north' comes twice in round 1; allowed: once"),
        ((HEADER, "1,north,1"), "line 2: 3 cells; allowed: 8, as in the header"),
        ((HEADER, ROWS[0], "3,north,1,0.9,1,,,"), "round 2 is missing; allowed: every round from 1 to 3"),
        ((HEADER, "4,north,1,0.9,1,,,"), "begins with round 4; allowed: rounds from 1 on, or from 0 on"),
        ((HEADER, "1,north,1,0.9,0,,,"), "the weights of round 1 are all 0; allowed: at least one above 0"),
        ((HEADER,), "holds no rounds; allowed: a row for each client of each round"),
        (("",), "holds no rounds; allowed: a row for each client of each round"),
        (("client,DS", "a,1"), "line 1: has no round among client, DS; allowed: round, client, criteria"),
        (("round,client,weight", "1,a,1"), "has no criteria; allowed: columns beside round, client, weight"),
        (("round,client,DS,DS", "1,a,1,1"), "line 1: header round,client,DS,DS; allowed: each column named"),
        (('{"round": 1, "client": "a", "DS": 1, "weight": 1}', "{"), "line 2: is no JSON"),
        (('{"round": 1, "client": "a", "DS": 1, "weight": 1}', "[1]"), "line 2: got [1]; allowed: an object"),
        (('{"round": 1, "client": "a", "DS": {}, "weight": 1}',), "line 1, DS: got {}; allowed: a number from 0"),
        (
            ('{"round": 1, "client": "a", "DS": 1, "weight": 1}', '{"round": 1, "client": "b", "weight": 1}'),
            "line 2, DS: missing; allowed: the same fields in every line",
        ),
    ],
)
def test_what_is_wrong_is_named_by_line_and_column(tmp_path: Path, lines: tuple[str, ...], line: str) -> None:
    file = written(tmp_path, *lines)
    with pytest.raises(UserError) as found:
        import_file(file, tmp_path / "run")
    assert str(found.value).startswith(f"{file}")
    assert line in str(found.value)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_options_that_are_wrong_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    file = written(tmp_path, "round,client,DS", "1,a,3")
    out = ("--out", tmp_path / "run")
    assert refused("import", file, *out).startswith("steelyard: --by: missing, and ")
    assert "--by: 'VP' names no rule or criterion 'VP'" in refused("import", file, *out, "--by", "VP")
    given = written(tmp_path, "round,client,DS,weight", "1,a,3,1", name="given.csv")
    assert "--by: table: has no column 'KL'" in refused("import", given, *out, "--by", "feddisco")
    assert not (tmp_path / "run").exists()
    assert "--by: 'median(DS)' needs updates" in refused("import", file, *out, "--by", "median(DS)")
    assert "No such file" in refused("import", tmp_path / "none.csv", *out)
    (tmp_path / "other.csv").write_bytes(b"\xff\xfe\x00round")
    assert "is not UTF-8 text" in refused("import", tmp_path / "other.csv", *out)
    import_file(file, tmp_path / "run", "DS")
    assert "holds a run already; allowed: a new folder" in refused("import", file, *out, "--by", "DS")


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_is_imported_or_refused_in_one_line(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "log").write_bytes(content)
    with pytest.raises(UserError) as found:
        import_file(folder / "log", folder / "run", "DS")
    assert "\n" not in str(found.value).replace(str(folder), "")


@settings(max_examples=10)
@given(table=st.lists(st.lists(st.floats(0, 1e6), min_size=2, max_size=2), min_size=2, max_size=5))
def test_weights_are_those_of_a_table(table: list[list[float]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same rule gives the same weights as `steelyard.weigh`, to 1e-12."""
    folder = tmp_path_factory.mktemp("table")
    file = written(folder, "round,client,DS,q", *(f"1,c{i},{a!r},{b!r}" for i, (a, b) in enumerate(table)))
    import_file(file, folder / "run", "q>DS")
    found = History(folder / "run").cohorts("q>DS", 0).weight
    expected = package.weigh({f"c{i}": {"DS": a, "q": b} for i, (a, b) in enumerate(table)}, "q>DS").weights
    assert np.abs(found - expected).max() <= 1e-12
