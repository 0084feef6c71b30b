"""Updates that a run keeps: every field comes back as it was, of its own type, and a damaged file is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.runs.records import record, state, updates

from steelyard.errors import UserError
from steelyard.messages import Updates
from steelyard.runs.kept_updates import keep_round, kept_rounds, path_of_round, read_round
from steelyard.runs.tensor_files import metadata_of, read_content, read_tensors
from steelyard.update_payloads import DenseModels

MODELS = torch.tensor([[1.0, 1 / 3], [-2.0, 1e-30]])
WHOLE: dict[str, Any] = {
    "payload": DenseModels(MODELS, ((0, 1),)),
    "bytes_sent": np.array([8, 16]),
    "steps": np.array([5, 7]),
    "first_losses": np.array([1.5, np.nan]),
    "label_counts": np.array([[2, 1], [0, 1]]),
    "vectors": {"control": torch.tensor([[0.1, 0.2], [0.3, 0.4]])},
    "listening": np.array([[0.25, 0.75], [1.0, 0.0]]),
    "late": {"d": 0.5},
    "simulated": 12.5,
}


def kept(folder: Path, *all_updates: Updates, keep_as: Any = "float32", round: int = 3) -> dict[str, Updates]:
    records = [record(each.federation, round, updates=each) for each in all_updates]
    states = {each.federation: state(round, 1 / 3, -float(place)) for place, each in enumerate(all_updates)}
    keep_round(folder, round, records, states, keep_as)
    found = read_round(folder, round)
    # The models that the round ended with are never rounded.
    assert {name: model.tolist() for name, model in found.models.items()} == {
        name: ended.parameters.tolist() for name, ended in states.items()
    }
    return dict(found.updates)


def assert_same(one: Updates, other: Updates) -> None:
    for field in dataclasses.fields(Updates):
        before, after = getattr(one, field.name), getattr(other, field.name)
        if isinstance(before, np.ndarray):
            assert isinstance(after, np.ndarray), field.name
            assert after.dtype == before.dtype, field.name
            np.testing.assert_array_equal(after, before)
        elif field.name == "criteria":
            assert list(after) == list(before)
            for name, values in before.items():
                np.testing.assert_array_equal(after[name], values)
        elif field.name == "vectors":
            assert list(after) == list(before)
            assert all(torch.equal(after[name], sent) for name, sent in before.items())
        elif field.name == "payload":
            assert torch.equal(after.models, before.models)
            assert after.models.dtype == torch.float32
            assert after.frozen == before.frozen
        else:
            assert after == before, field.name


def test_everything_that_the_server_was_given_comes_back(tmp_path: Path):
    plain = updates("DS>LD", 3)
    whole = updates("LD>DS", 3, **WHOLE)
    found = kept(tmp_path, plain, whole)
    assert list(found) == ["DS>LD", "LD>DS"]
    assert_same(plain, found["DS>LD"])
    assert_same(whole, found["LD>DS"])


def test_each_federation_has_its_own_vectors(tmp_path: Path):
    """Names of federations may hold the sign that parts the names of tensors."""
    one = updates("a/max", 3, vectors={"control": torch.ones(2, 2)})
    other = updates("b/a/max", 3, vectors={"control": torch.zeros(2, 2), "more": torch.ones(2, 1)})
    found = kept(tmp_path, one, other)
    assert_same(one, found["a/max"])
    assert_same(other, found["b/a/max"])


def test_rounded_models_are_float32_again_and_nothing_else_is_rounded(tmp_path: Path):
    whole = updates("DS>LD", 3, **WHOLE)
    found = kept(tmp_path, whole, keep_as="bfloat16")["DS>LD"]
    assert_same(dataclasses.replace(whole, payload=DenseModels(MODELS.to(torch.bfloat16).float(), ((0, 1),))), found)
    held = read_tensors(path_of_round(tmp_path, 3))
    assert held["models/DS>LD"].dtype == torch.bfloat16


def test_a_federation_without_updates_is_left_out(tmp_path: Path):
    records = [record("gone", 1, updates=None), record("DS>LD", 1)]
    keep_round(tmp_path, 1, records, {"gone": state(1, 5.0), "DS>LD": state(1)}, "float32")
    found = read_round(tmp_path, 1)
    assert list(found.updates) == ["DS>LD"]
    assert found.models["gone"].tolist() == [5.0]


def test_whether_a_folder_keeps_updates(tmp_path: Path):
    assert not kept_rounds(tmp_path)
    path_of_round(tmp_path, 1).parent.mkdir()
    (path_of_round(tmp_path, 1).parent / "notes.txt").touch()
    assert not kept_rounds(tmp_path)
    kept(tmp_path, updates(round=3))
    assert kept_rounds(tmp_path)
    assert path_of_round(tmp_path, 3) == tmp_path / "updates" / "round-000003.safetensors"


def damaged(folder: Path, tensors: dict[str, torch.Tensor] | None = None, about: str | None = None) -> str:
    """Write the file of a round anew with something changed; returns the error's line."""
    kept(folder, updates(round=3))
    path = path_of_round(folder, 3)
    metadata = metadata_of(read_content(path))
    held = {name: each.clone() for name, each in read_tensors(path).items()}
    metadata = metadata if about is None else {"other": about}
    save_file(held if tensors is None else tensors, path, metadata=metadata)
    with pytest.raises(UserError) as found:
        read_round(folder, 3)
    return str(found.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("shape", [(2,), (3, 2), (1, 2, 2), (2, 1, 1)])
def test_models_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]):
    line = damaged(tmp_path, {"models/DS>LD": torch.zeros(shape)})
    assert line == "no updates of DS>LD; allowed: the file as it was written"


def test_a_file_without_the_models_of_a_federation_is_refused(tmp_path: Path):
    line = damaged(tmp_path, {"models/other": torch.zeros(2, 2)})
    assert line == "no updates of DS>LD; allowed: the file as it was written"


def test_a_file_that_no_run_kept_is_refused(tmp_path: Path):
    line = damaged(tmp_path, about="{}")
    assert line == "not the updates that a run kept; allowed: the file as it was written"
