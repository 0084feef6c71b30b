"""The papers' runs as archives: what is kept, how seeds and rules that were run apart come together again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.benchmarks.made_archives import make_archive

from benchmarks import paper_pages, paper_results
from steelyard.experiment.loading import read_experiment
from steelyard.report.comparison import compare_run
from steelyard.report.curves import Curve, read_curves
from steelyard.report.groups import group_tables
from steelyard.runs.reader import History

SHORT = ("--set", "compute.device=cpu", "--set", "model.name=logistic")


def test_parts_name_the_papers_rules() -> None:
    assert len(paper_results.FIFTEEN.split(",")) == 15
    faces = [rule for half in paper_results.FACES.values() for rule in half.split(",")]
    assert len(set(faces)) == 10
    assert faces[0] == "DS"


@pytest.mark.slow
def test_runs_of_other_seeds_and_rules_are_joined_as_far_as_all_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        "toy-seed1": ("quickstart", "--rules", "DS,LD", "--set", "seed=1", "--set", "rounds.count=3", *SHORT),
        "toy-seed2": ("quickstart", "--rules", "DS,LD", "--set", "seed=2", "--set", "rounds.count=2", *SHORT),
    }
    monkeypatch.setattr(paper_results, "PARTS", parts)
    for name in parts:
        told = paper_results.run_part(name, tmp_path, tmp_path / "runs", 120, [])
        assert told["status"] == "finished", (tmp_path / f"{name}.log").read_text()
    again = paper_results.run_part("toy-seed1", tmp_path, tmp_path / "runs", 120, [])
    assert again["rounds"] == 3
    for name in parts:
        paper_pages.unpack(tmp_path / f"{name}.tar.xz", tmp_path / "unpacked")
    folders = [tmp_path / "unpacked" / name for name in parts]
    joined = History(paper_pages.join(folders, tmp_path / "joined"))
    pairs = set(zip(joined.federations["rule"], joined.federations["seed"], strict=True))
    assert pairs == {("DS", 1), ("LD", 1), ("DS", 2), ("LD", 2)}
    for rule in ("DS", "LD"):
        for seed, folder in enumerate(folders, 1):
            rounds, scores = joined.scores(rule, seed)
            assert rounds.tolist() == [1, 2]
            assert scores.tolist() == History(folder).scores(rule, seed)[1][:2].tolist()
    assert [told["part"] for told in json.loads((tmp_path / "joined" / "told.json").read_text())] == list(parts)


def unpacked(out: Path) -> list[Path]:
    for archive in sorted(out.glob("*.tar.xz")):
        paper_pages.unpack(archive, out / "unpacked")
    return sorted((out / "unpacked").iterdir())


def test_halves_of_the_rules_and_seeds_become_one_comparison(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for half in "ab":
            ended = "IS>CB>DS" if (seed, half) == (2, "b") else ""
            rounds = 5 if (seed, half) == (3, "a") else 6
            # The last half has seen its clients in another order: their numbers differ, their names do not.
            order = -1 if (seed, half) == (3, "b") else 1
            make_archive(f"celeba-seed{seed}-{half}", tmp_path, rounds, 20, ended=ended, order=order)
    folders = unpacked(tmp_path)
    joined = paper_pages.join(folders, tmp_path / "joined")
    history = History(joined)
    assert history.ended == {("IS>CB>DS", 2): (3, "it exploded")}
    document = compare_run(history, read_experiment(joined).rounds)
    assert document["baseline"] == "DS"
    assert set(document["rules"]) == {rule for half in paper_results.FACES.values() for rule in half.split(",")}
    assert document["seeds"] == [1, 2, 3]
    assert document["rounds"] == 5  # as far as all went, but for the one that exploded
    for folder in folders:
        single = History(folder)
        for rule, seed in zip(single.federations["rule"], single.federations["seed"], strict=True):
            kept = min(6, single.tested(rule, seed).round.max() + 1)
            assert history.scores(rule, seed, -1)[1].tolist() == single.scores(rule, seed, -1)[1][:kept].tolist()


def test_a_part_that_is_missing_leaves_out_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("celeba-seed1-a", "celeba-seed1-b", "celeba-seed2-a"):
        make_archive(part, tmp_path, 2, 5)
    joined = History(paper_pages.join(unpacked(tmp_path), tmp_path / "joined"))
    assert set(joined.federations["seed"]) == {1}
    assert len(joined.federations) == 10
    assert "joined: DS, seed 2 is left out" in capsys.readouterr().out
    assert paper_pages.ragged([(1, "DS", 1), (2, "LD", 1), (3, "DS", 2), (4, "MD", 2)]) == {
        2: "LD, seed 1",
        4: "MD, seed 2",
    }


def test_fifteen_rules_and_three_seeds_come_out_as_the_papers_table(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_archive(f"unipen62-seed{seed}", tmp_path, 12, 40, leads=1.0)
    joined = paper_pages.join(unpacked(tmp_path), tmp_path / "joined")
    (grid,) = group_tables(read_curves(History(joined)), [0.5], 12)
    assert [row[0] for row in grid.rows] == ["Ind"] * 3 + ["MCA"] * 7 + ["Final"] * 7
    assert [row[1] for row in grid.rows if row[1] == "Mean"] == ["Mean", "Mean"]
    assert grid.headings[2:] == (
        *("Low 20%", "Low 30%", "Low mean", "Mid 40%", "Mid 50%", "Mid mean", "High 70%", "High 75%", "High mean"),
    )
    # DS goes twice as fast; clients have a pace of 10 to 49 rounds, one of each, and are at 50 % after half of it:
    # 8 of 40 (pace 10 to 17) after 8.5 rounds, so round 5 at double speed; 12 (to 21) after 10.5, so round 6.
    assert grid.rows[0][:5] == ("Ind", "DS", "5.0", "6.0", "5.5")
    # 28 of 40 (to 37) after 18.5 rounds and 30 (to 39) after 19.5: round 10 at double speed, too late for the others.
    assert grid.rows[0][8:] == ("10.0", "10.0", "10.0")
    assert grid.rows[1][8:] == ("—", "—", "—")


def test_the_distance_to_ds_is_paired_by_seed_and_averaged_over_rounds_nearby() -> None:
    def curve(rule: str, seed: int, overall: list[float]) -> Curve:
        scores = np.array(overall)
        return Curve(rule, seed, np.arange(1, len(scores) + 1), scores[:, None], scores, 0, {}, {})

    rounds = 24
    curves = [
        *(curve("DS", seed, [0.5 * seed] * rounds) for seed in (1, 2)),
        # One point ahead in seed 1, three in seed 2; a round that jumps counts for a part of its neighbourhood.
        *(curve("online(DS>LD)", seed, [0.5 * seed + 0.01 + 0.02 * (seed == 2)] * rounds) for seed in (1, 2)),
        *(curve("LD>DS", seed, [0.5 * seed] * 11 + [0.5 * seed + 0.21] + [0.5 * seed] * 12) for seed in (1, 2)),
    ]
    found = paper_pages.distances(curves)
    assert set(zip(found["rule"], found["bundle"], strict=True)) == {
        ("online(DS>LD)", "online adjustment"),
        ("LD>DS", "LD first"),
    }
    online = found[found["rule"] == "online(DS>LD)"]
    # Ten rounds on either side are needed: 11 to 14 of 24, a third of them.
    assert online["round"].tolist() == [11, 14]
    assert online["points"].to_numpy() == pytest.approx([2.0, 2.0])
    assert found[found["rule"] == "LD>DS"]["points"].to_numpy() == pytest.approx([1.0, 1.0])
