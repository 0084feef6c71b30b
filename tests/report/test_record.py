"""The record to hand over says what a run knows of itself; `verify` computes rounds again and names what changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.contributions.test_replaying import experiment
from tests.kit import assert_refused
from tests.report.made_run import make_run
from tests.runs.contents import chain_again, change
from tests.runs.signed_runs import signed_run

from steelyard.experiment.running import run
from steelyard.proof.signing import model_digest
from steelyard.report.record import page_differs, record, write_record
from steelyard.report.verification import verify
from steelyard.runs.kept_updates import path_of_round


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed")
    signed_run(folder / "run", folder / "keys")
    return folder


def test_a_record_names_sites_weights_hashes_and_what_is_not_known(signed: Path, tmp_path: Path) -> None:
    run = signed / "run"
    found = record(run, signed / "keys")
    assert [(site["client"], site["rows"], site["rounds"], site["weight"]) for site in found["sites"]] == [
        ("a", 3, 3, 0.75),
        ("b", 1, 3, 0.25),
    ]
    assert found["verified"]["verdict"] == "intact"
    for name in ("record.json", "record.html"):
        write_record(found, tmp_path / name)
        assert not page_differs(tmp_path / name, found)
    page = (tmp_path / "record.html").read_text()
    assert found["hashes"]["final hash, round 3"] in page
    assert page.index("intact") < page.index("Purpose")
    assert "<script" not in page
    assert_refused(lambda: write_record(found, tmp_path / "record.pdf"), ".pdf")
    assert_refused(lambda: write_record(found, tmp_path / "record.html"), "record.html", "--force")
    (tmp_path / "record.html").write_text(page.replace("0.75", "0.85"))
    assert page_differs(tmp_path / "record.html", found)
    write_record(found, tmp_path / "record.html", replace=True)
    assert (tmp_path / "record.html").read_text() == page
    assert_refused(lambda: page_differs(tmp_path / "missing.html", found), "missing.html")
    assert "not measured" in record(make_run(tmp_path / "run", rounds=1, clients=3, seeds=(1,)))["contributions"]


KEPT = {"keep": "updates"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    beside = {"VP": {"criteria": ["VP"]}, "adam": {"criteria": ["DS"], "algorithm": {"name": "fedadam"}}}
    beside |= {"dyn": {"criteria": ["DS"], "algorithm": {"name": "feddyn"}}}
    return run(experiment(store=KEPT, beside=beside), out=tmp_path_factory.mktemp("kept") / "run")


@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rewrite(
    folder: Path, round: int, change: Callable[[dict[str, torch.Tensor]], object], said: dict[str, Any] | None = None
) -> None:
    """Change the tensors that were kept of a round, and what is said of each rule's updates."""
    path = path_of_round(folder, round)
    with safe_open(path, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["updates"]  # noqa: SIM118
    change(tensors)
    told = {rule: each | (said or {}) for rule, each in json.loads(about).items()}
    save_file(tensors, path, {"updates": json.dumps(told)})


def test_rounded_updates_are_computed_with_to_what_rounding_leaves(tmp_path: Path) -> None:
    store: dict[str, Any] = {**KEPT, "keep_as": "bfloat16"}
    folder = run(experiment(store=store, beside={}), out=tmp_path / "run")
    found = verify(folder)
    assert (found.code, found.found.changed) == (0, [])
    assert found.found.checked["model of DS"].endswith("the same to 0.00390625")
    assert "by its SHA-256" in found.found.checked["kept updates"]
    rewrite(folder, 2, lambda tensors: tensors["models/DS"][1].mul_(1.5))
    assert set(changed(folder)) == {(2, None)}


def changed(folder: Path) -> list[tuple[int | None, str | None]]:
    return [(finding.round, finding.client) for finding in verify(folder).found.changed]


def test_every_round_follows_from_its_updates_and_weights(whole: Path) -> None:
    found = verify(whole)
    assert (found.code, found.found.changed) == (0, [])
    said = found.found.checked
    for rule in ("DS", "VP", "adam"):
        assert said[f"model of {rule}"].startswith("3 rounds computed again"), said
    assert said["model of dyn"].startswith("not computed again: its step needs")


def test_what_was_changed_is_named_by_round_and_client(kept: Path) -> None:
    rewrite(kept, 1, lambda tensors: tensors["after/DS"][:1].add_(1.0))
    rewrite(kept, 2, lambda tensors: tensors["models/VP"][3, 0].add_(1e-3))
    path_of_round(kept, 3).unlink()
    found = changed(kept)
    assert (2, "client-003") in found
    assert {round for round, _ in found} == {1, 2, 3}


def test_a_server_that_took_another_model_than_its_weights_give_is_found(kept: Path) -> None:
    """It keeps that model, writes its digest and computes the chain again: only the sum tells."""

    def cheat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["after/DS"][:5] += 0.01
        change(
            kept,
            "UPDATE digests SET model = ? WHERE round = 2 "
            "AND federation = (SELECT id FROM federations WHERE name = 'DS')",
            model_digest(tensors["after/DS"]),
        )
        chain_again(kept)

    rewrite(kept, 2, cheat)
    text = "\n".join(finding.line() for finding in verify(kept).found.changed)
    assert "round 2: the model of DS is up to 0.01 from what its updates and weights give" in text
