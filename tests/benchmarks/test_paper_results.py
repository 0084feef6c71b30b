"""The papers' runs as archives: what is kept, how seeds and rules that were run apart come together again."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks import paper_results
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
        with tarfile.open(tmp_path / f"{name}.tar.xz") as packed:
            packed.extractall(tmp_path / "unpacked", filter="data")
    folders = [tmp_path / "unpacked" / name for name in parts]
    joined = History(paper_results.join(folders, tmp_path / "joined"))
    pairs = set(zip(joined.federations["rule"], joined.federations["seed"], strict=True))
    assert pairs == {("DS", 1), ("LD", 1), ("DS", 2), ("LD", 2)}
    for rule in ("DS", "LD"):
        for seed, folder in enumerate(folders, 1):
            rounds, scores = joined.scores(rule, seed)
            assert rounds.tolist() == [1, 2]
            assert scores.tolist() == History(folder).scores(rule, seed)[1][:2].tolist()
    assert [told["part"] for told in json.loads((tmp_path / "joined" / "told.json").read_text())] == list(parts)
