"""Parts of a comparison: joined they are the run made at once, bit for bit; what does not fit is named in one line."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kit import SMALL, assert_refused, changed
from tests.rounds.test_soundness import broken_from
from tests.runs.contents import assert_same_bits, change, change_fact, query

from steelyard import History, UserError
from steelyard.base.processor import KERNELS, kernels
from steelyard.experiment.loading import build
from steelyard.experiment.parts import Part, in_order, join_runs
from steelyard.experiment.running import resume, run
from steelyard.runs.kept_updates import read_round

DOCUMENT = changed(
    SMALL,
    seed=3,
    partition={"minimum": 12},
    rounds={"count": 4, "fraction": 0.5, "samples": True},
    store={"checkpoint_every": 2, "clients_every": 3, "keep": "updates"},
    compute={"threads": 1},
    weighing={"criteria": ["DS", "LD"]},
    beside={"LD": {"criteria": ["LD"]}},
)


SEEDS = (3, 4)


FACTS = "SELECT key, value FROM info WHERE key NOT IN ('writer', 'memory_peak_gb', 'memory_limit_gb') ORDER BY key"


def parts_of(folder: Path, document: dict[str, Any], of: int) -> list[Path]:
    return [run(build(document), out=folder / f"part-{n}", seeds=SEEDS, part=Part(n, of)) for n in range(1, of + 1)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four federations in three parts; never written to."""
    return parts_of(tmp_path_factory.mktemp("three"), DOCUMENT, 3)


def test_joined_they_are_the_run_made_at_once(tmp_path: Path, three: list[Path]) -> None:
    whole = run(build(DOCUMENT), out=tmp_path / "whole", seeds=SEEDS)
    joined = join_runs([three[2], three[0], three[1]], tmp_path / "joined")
    assert_same_bits(joined, whole)
    numbered = "SELECT id, name FROM clients", "SELECT federation, round, clients FROM updates ORDER BY 1, 2"
    for text in (*numbered, "SELECT federation, round, marks FROM digests ORDER BY 1, 2"):
        assert query(joined, text) == query(whole, text)
    facts, expected = (dict(query(one, FACTS)) for one in (joined, whole))
    assert {key: _read(value) for key, value in facts.items()} == {key: _read(value) for key, value in expected.items()}
    assert History(joined).chain.problem == ""
    assert (joined / "experiment.toml").read_text() == (whole / "experiment.toml").read_text()
    kept = [read_round(one, 4) for one in (joined, whole)]
    assert set(kept[0].updates) == set(kept[1].updates)
    assert all(kept[0].models[name].equal(model) for name, model in kept[1].models.items())
    assert resume(joined) == joined


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def test_a_part_whose_rules_all_end_early_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    document = {**DOCUMENT, "store": {"clients_every": 3}, "rounds": {"count": 3, "fraction": 0.5}}
    broken_from(monkeypatch, "LD#4", 2)
    whole = run(build(document), out=tmp_path / "whole", seeds=SEEDS)
    joined = join_runs(parts_of(tmp_path, document, 4), tmp_path / "joined")
    assert_same_bits(joined, whole)
    assert History(joined).ended == History(whole).ended != {}


def test_a_stopped_part_goes_on_as_that_part(tmp_path: Path, three: list[Path]) -> None:
    folder = shutil.copytree(three[0], tmp_path / "part")
    change_fact(folder, "status", "stopped")
    with pytest.raises(UserError, match=r"part: is not at its end; allowed: parts that are \(`steelyard resume "):
        join_runs([folder, *three[1:]], tmp_path / "joined")
    resume(folder)
    assert query(folder, "SELECT name FROM federations ORDER BY id") == [("DS>LD#3",), ("LD#4",)]
    assert_same_bits(folder, three[0])


def test_a_part_of_another_processor_is_said_and_named_beside_the_others(
    tmp_path: Path, three: list[Path], messages: list[str]
) -> None:
    other = shutil.copytree(three[1], tmp_path / "other")
    change_fact(other, KERNELS, "AVX0 0")
    joined = join_runs([three[0], other, three[2]], tmp_path / "joined")
    said = f"{KERNELS}: {kernels()} in {three[0]}, AVX0 0 in {other}: last bits may differ from one run's"
    assert [line for line in messages if "last bits" in line] == [said]
    assert History(joined).info[KERNELS] == f"{kernels()}; AVX0 0"


def test_what_does_not_fit_is_named_in_one_line(tmp_path: Path, three: list[Path]) -> None:
    out = tmp_path / "joined"

    def assert_no_join(folders: list[Path], *parts: object) -> None:
        assert_refused(lambda: join_runs(folders, out), *parts)
        assert not out.exists()

    copy = shutil.copytree(three[1], tmp_path / "copy")
    assert_no_join([three[1], copy], f"missing: 1/3, 3/3; doubled: 2/3 ({three[1]}, {copy})")
    other = run(build(changed(DOCUMENT, training={"epochs": 2})), out=tmp_path / "other", seeds=SEEDS)
    assert_no_join([three[0], other], f"{other}: is not a part")
    change_fact(other, "part", "2/3")
    assert_no_join([three[0], other, three[2]], "training.epochs")
    change_fact(other, "part", "2/9")
    assert_no_join([three[0], other], "is one of 9 parts")
    change(copy, "UPDATE rounds SET accuracy = 1 WHERE round = 2")
    assert_no_join([three[0], copy, three[2]], "round 2 is not as it was written")


def test_parts_are_a_partition_and_none_is_empty() -> None:
    for of in range(1, 6):
        shares = [Part(number, of).share(range(5), "runs") for number in range(1, of + 1)]
        assert sorted(item for share in shares for item in share) == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for text in ("0/3", "4/3", "3", "1/99999"):
        assert_refused(partial(Part.read, text), "--part", text)
    with pytest.raises(UserError, match="--part: got 1/6, but there are 5 runs; allowed: at most 5"):
        Part(1, 6).share(range(5), "runs")
    assert in_order({Path("b"): Part(2, 2), Path("a"): Part(1, 2)}) == [Path("a"), Path("b")]
