"""From kept updates `verify` computes every round's model again; a changed update is named by round and client."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.contributions.test_replaying import experiment
from tests.runs.contents import chain_again

from steelyard.experiment.running import run
from steelyard.report.verification import verify
from steelyard.runs.kept_updates import path_of_round
from steelyard.signing import model_digest

KEPT = {"keep": "updates"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    beside = {"VP": {"criteria": ["VP"]}, "adam": {"criteria": ["DS"], "algorithm": {"name": "fedadam"}}}
    beside |= {"dyn": {"criteria": ["DS"], "algorithm": {"name": "feddyn"}}}
    return run(experiment(store=KEPT, beside=beside), out=tmp_path_factory.mktemp("kept") / "run")


@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rewrite(folder: Path, round: int, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = path_of_round(folder, round)
    with safe_open(path, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, about)


def nudge(name: str, row: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name][row, 0].add_(1e-3)


def named(folder: Path) -> set[tuple[int | None, str | None]]:
    return {(finding.round, finding.client) for finding in verify(folder).found.changed}


def test_every_round_follows_from_its_updates_and_weights(whole: Path) -> None:
    found = verify(whole)
    assert (found.code, found.found.changed) == (0, [])
    said = found.found.checked
    assert said["kept updates"] == "each held against its digest"
    for rule in ("DS", "VP", "adam"):
        assert said[f"model of {rule}"].startswith("3 rounds computed again from kept updates and weights"), said
    assert said["model of dyn"] == (
        "not computed again: its step needs the cohort's share of all clients, which is not kept"
    )


def test_a_changed_update_is_named_by_round_and_client(kept: Path) -> None:
    rewrite(kept, 2, nudge("models/VP", 3))
    (finding,) = verify(kept).found.changed
    assert finding.line() == "round 2, client client-003: its kept update of VP is not the one of its digest"


def test_a_changed_or_missing_model_or_file_is_named_by_its_round(kept: Path) -> None:
    rewrite(kept, 1, lambda tensors: tensors["after/DS"][:1].add_(1.0))
    path_of_round(kept, 3).unlink()
    text = "\n".join(finding.line() for finding in verify(kept).found.changed)
    assert "round 1: the kept model of DS is not the one that the round ended with" in text
    assert "round 3: " in text
    assert "round 2" not in text


def test_a_server_that_took_another_model_than_its_weights_give_is_found(kept: Path) -> None:
    """It keeps that model, writes its digest and computes the chain again: only the sum tells."""

    def cheat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["after/DS"][:5] += 0.01
        digest = model_digest(tensors["after/DS"])
        db = sqlite3.connect(kept / "run.sqlite")
        with db:
            where = "round = 2 AND federation = (SELECT id FROM federations WHERE name = 'DS')"
            assert db.execute(f"UPDATE digests SET model = ? WHERE {where}", (digest,)).rowcount == 1
            chain_again(db)
        db.close()

    rewrite(kept, 2, cheat)
    text = "\n".join(finding.line() for finding in verify(kept).found.changed)
    assert "round 2: the model of DS is up to 0.01 from what its updates and weights give" in text


def test_rounded_updates_are_computed_with_to_what_rounding_leaves(tmp_path: Path) -> None:
    store: dict[str, Any] = {**KEPT, "keep_as": "bfloat16"}
    folder = run(experiment(store=store, beside={}), out=tmp_path / "run")
    found = verify(folder)
    assert (found.code, found.found.changed) == (0, [])
    assert found.found.checked["model of DS"].endswith("the same to 0.00390625")
    assert "cannot be checked" in found.found.checked["kept updates"]
    rewrite(folder, 2, lambda tensors: tensors["models/DS"][1].mul_(1.5))
    assert named(folder) == {(2, None)}
