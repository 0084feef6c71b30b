"""Checkpoints and kept updates: tensors and states come back whole, and few bytes are written for them."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from tests.kit import assert_refused
from tests.runs.records import record, state, updates

from steelyard.base.errors import UserError
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import LossState, Updates
from steelyard.rounds.state import Best, RoundState
from steelyard.runs import checkpoint
from steelyard.runs.checkpoint import FOLDER, TensorFiles, load_all, metadata_of, read_tensors
from steelyard.runs.facts import read_content
from steelyard.runs.kept_updates import join_kept, keep_round, kept_rounds, path_of_round, read_round
from steelyard.weighing.order import OrderState

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


NAMES = st.text(min_size=1, max_size=12)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


TENSORS = st.lists(st.floats(width=32), max_size=6).map(lambda values: torch.tensor(values, dtype=torch.float32))


LOSSES = st.builds(
    LossState,
    name=st.sampled_from(["auto", "barron", "cross-entropy"]),
    class_weights=st.none() | st.lists(NUMBERS, max_size=4).map(tuple),
    shape=st.none() | NUMBERS,
    scale=st.none() | NUMBERS,
)


ORDERS = st.builds(
    OrderState,
    order=st.permutations(range(4)).map(tuple),
    reference=NUMBERS,
    testing_rounds=st.integers(0, 10**6),
    memory=st.dictionaries(NAMES, PLAIN, max_size=3),
)


STATES = st.builds(
    RoundState,
    round=st.integers(0, 10**6),
    parameters=TENSORS,
    loss=LOSSES,
    orders=ORDERS,
    finished=st.booleans(),
    memory=st.dictionaries(NAMES, PLAIN, max_size=3),
    best=st.none() | st.builds(Best, st.integers(1, 10**6), NUMBERS, TENSORS),
)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@settings(max_examples=30)
@given(st.dictionaries(NAMES, STATES, max_size=3), st.dictionaries(NAMES, TENSORS, max_size=3))
def test_unpack_is_the_inverse_of_pack(states: dict[str, RoundState], kept: dict[str, torch.Tensor]) -> None:
    tensors, text = checkpoint.pack(states, kept)
    found, back = checkpoint.unpack(tensors, text)
    assert list(found) == list(states)
    for name, expected in states.items():
        for field in fields(RoundState):
            ours, theirs = getattr(found[name], field.name), getattr(expected, field.name)
            if isinstance(ours, Best):
                assert (ours.round, ours.score) == (theirs.round, theirs.score)
                assert ours.parameters is theirs.parameters
            else:
                assert ours is theirs if field.name == "parameters" else ours == theirs
        assert type(found[name].orders.order) is tuple
    assert back.keys() == kept.keys()
    assert all(back[name] is kept[name] for name in kept)


def test_terabytes_of_nothing_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 42)
    assert_refused(lambda: read_tensors(tmp_path / "sparse"), tmp_path / "sparse", "it begins with no length")


@settings(max_examples=30)
@given(st.dictionaries(NAMES, TENSORS, max_size=3))
def test_tensors_come_back_from_a_file_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "x.safetensors"
    checkpoint.write_tensors(path, tensors)
    found = checkpoint.read_tensors(path)
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_views_that_share_memory_and_gradients_are_written_as_they_stand(tmp_path: Path) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    given = {"row": table[1], "turned": table.t(), "learnt": torch.ones(2, requires_grad=True)}
    checkpoint.write_tensors(tmp_path / "x.safetensors", given)
    found = checkpoint.read_tensors(tmp_path / "x.safetensors")
    assert found["row"].tolist() == [3.0, 4.0, 5.0]
    assert found["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["learnt"].tolist() == [1.0, 1.0]


def test_a_file_is_replaced_whole_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    checkpoint.write_tensors(path, {"a": torch.zeros(2)})

    def fail(_: int) -> None:
        # What is on its way to the disk must not stand under the name of the whole file yet.
        assert checkpoint.read_tensors(path)["a"].tolist() == [0.0, 0.0]
        assert checkpoint.read_tensors(path.with_name("x.safetensors.part"))["a"].tolist() == [1.0, 1.0]
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.write_tensors(path, {"a": torch.ones(2)})
    assert checkpoint.read_tensors(path)["a"].tolist() == [0.0, 0.0]
    checkpoint.write_tensors(path, {"a": torch.ones(2)})
    assert checkpoint.read_tensors(path)["a"].tolist() == [1.0, 1.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


LONG = 1000
"""Numbers in a vector."""


def vectors(count: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"clients/{index:03d}": torch.full((LONG,), value + index) for index in range(count)}


def back(folder: Path, file: str) -> dict[str, torch.Tensor]:
    return dict(load_all(folder, file, (folder / FOLDER / file).read_bytes()).tensors)


def name(round: int) -> str:
    return f"round-{round:06d}.safetensors"


def test_only_what_was_replaced_is_written(tmp_path: Path) -> None:
    writer, held = TensorFiles(tmp_path), {"models/a": torch.zeros(LONG), **vectors(20)}
    whole = len(writer.write(name(1), held))
    held |= {"models/a": torch.ones(LONG), "clients/003": torch.full((LONG,), 0.5)}
    part = len(writer.write(name(2), held))
    assert whole > 21 * 4 * LONG
    assert 2 * 4 * LONG < part < 3 * 4 * LONG + 1000
    found = back(tmp_path, name(2))
    assert found.keys() == held.keys()
    assert all(torch.equal(found[key], held[key]) for key in held)
    assert writer.needed(name(2)) == {name(1)}


ELSEWHERE = json.dumps({"../x": {"sha256": "0" * 64, "size": 1, "keys": []}})
STEPS = st.lists(
    st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9), max_size=2), st.booleans()), max_size=12
)


@mock.patch.object(checkpoint, "MOST_FILES", 3)
@settings(max_examples=40)  # each writes and reads up to a dozen files
@given(STEPS)
def test_any_course_of_changes_and_resumes_comes_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[set[int], set[int], bool]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    writer, held = TensorFiles(folder), {f"clients/{index}": torch.rand(50) for index in range(10)}
    for round, (replaced, dropped, resumed) in enumerate(steps):
        held |= {f"clients/{index}": torch.rand(50) for index in replaced}
        held = {key: tensor for key, tensor in held.items() if int(key[8:]) not in dropped}
        given = {"models/a": torch.rand(5), **held}
        writer.write(name(round), given)
        loaded = load_all(folder, name(round), (folder / FOLDER / name(round)).read_bytes())
        assert loaded.tensors.keys() == given.keys()
        assert all(torch.equal(loaded.tensors[key], given[key]) for key in given)
        needed = writer.needed(name(round))
        assert needed == TensorFiles(folder).needed(name(round))
        if resumed:
            writer = TensorFiles(folder)
            writer.start_from(loaded)
            held = {key: tensor for key, tensor in loaded.tensors.items() if key.startswith("clients/")}
        for path in (folder / FOLDER).iterdir():
            if path.name not in needed | {name(round)}:
                path.unlink()


@pytest.mark.parametrize(
    "older", ['{"../x": {"sha256": "", "keys": []}}', '{"run.sqlite": 1}', "[", "7", '{"a": {}}', ELSEWHERE]
)
def test_a_table_that_leads_elsewhere_is_refused(tmp_path: Path, older: str) -> None:
    content = save({"models/a": torch.zeros(2)}, {"older": older})
    with pytest.raises(UserError, match=r"is no name of a checkpoint|table of older files is damaged") as found:
        load_all(tmp_path, name(1), content)
    assert older != ELSEWHERE or "'../x' is no name of a checkpoint" in str(found.value)


def test_an_older_file_that_was_changed_or_is_a_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").touch()  # marks a run's folder: below it no link is followed
    writer, held = TensorFiles(tmp_path), vectors(8)
    writer.write(name(1), held)
    content = writer.write(name(2), held | {"models/a": torch.zeros(2)})
    first = tmp_path / FOLDER / name(1)
    whole = first.read_bytes()
    first.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=r"round-000001\.safetensors: not the checkpoint that was written"):
        load_all(tmp_path, name(2), content)
    loaded = load_all(tmp_path, name(2), content, strict=False)
    assert (len(loaded.tensors), loaded.file) == (9, name(2))
    first.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        load_all(tmp_path, name(2), content)


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


def plain(sent: Updates) -> dict[str, Any]:
    held = {field.name: getattr(sent, field.name) for field in dataclasses.fields(Updates) if field.name != "payload"}
    return held | {"vectors": {name: tensor.numpy() for name, tensor in sent.vectors.items()}}


def assert_same(one: Updates, other: Updates) -> None:
    before, after = plain(one), plain(other)
    np.testing.assert_equal(after, before)
    for name in before:
        assert getattr(after[name], "dtype", None) == getattr(before[name], "dtype", None), name
    assert (list(after["criteria"]), list(after["vectors"])) == (list(before["criteria"]), list(before["vectors"]))
    assert torch.equal(other.payload.models, one.payload.models)
    assert (other.payload.models.dtype, other.payload.frozen) == (torch.float32, one.payload.frozen)


def test_rounded_models_are_float32_again_and_nothing_else_is_rounded(tmp_path: Path):
    whole = updates("DS>LD", 3, **WHOLE)
    found = kept(tmp_path, whole, keep_as="bfloat16")["DS>LD"]
    assert_same(dataclasses.replace(whole, payload=DenseModels(MODELS.to(torch.bfloat16).float(), ((0, 1),))), found)
    held = read_tensors(path_of_round(tmp_path, 3))
    assert held["models/DS>LD"].dtype == torch.bfloat16


def test_whether_a_folder_keeps_updates(tmp_path: Path):
    assert not kept_rounds(tmp_path)
    gone = [record("gone", 1, updates=None), record("DS>LD", 1)]
    keep_round(tmp_path, 1, gone, {"gone": state(1, 5.0), "DS>LD": state(1)}, "float32")
    found = read_round(tmp_path, 1)
    assert (list(found.updates), found.models["gone"].tolist()) == (["DS>LD"], [5.0])
    assert kept_rounds(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "about", "words"),
    [
        ({"models/DS>LD": torch.zeros(3, 2)}, None, "no updates of DS>LD"),
        ({"models/other": torch.zeros(2, 2)}, None, "no updates of DS>LD"),
        (None, {"other": "{}"}, "not the updates that a run kept"),
    ],
)
def test_a_file_of_updates_that_is_another_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, about: dict[str, str] | None, words: str
):
    kept(tmp_path, updates(round=3))
    path = path_of_round(tmp_path, 3)
    metadata = metadata_of(read_content(path))
    held = {name: each.clone() for name, each in read_tensors(path).items()}
    # A tensor that names no federation is passed over.
    save_file({**held, "sent/odd": torch.zeros(2)}, path, metadata=metadata)
    assert read_round(tmp_path, 3).updates["DS>LD"].vectors == {}
    save_file(held if tensors is None else tensors, path, metadata=about or metadata)
    assert_refused(partial(read_round, tmp_path, 3), path, words, "allowed: the file as it was written")


def test_what_parts_kept_is_put_together_round_by_round(tmp_path: Path):
    one, two, later = updates("DS>LD", 3), updates("LD>DS", 3, **WHOLE), updates("LD>DS", 4)
    kept(tmp_path / "a", one)
    kept(tmp_path / "b", two)
    kept(tmp_path / "b", later, round=4)
    for round in (3, 4):
        written = join_kept((tmp_path / "a", tmp_path / "b"), tmp_path / "both", round)
        assert read_round(tmp_path / "both", round).sha256 == written
    assert join_kept((tmp_path / "a", tmp_path / "b"), tmp_path / "both", 5) is None
    found = read_round(tmp_path / "both", 3).updates
    assert list(found) == ["DS>LD", "LD>DS"]
    assert_same(one, found["DS>LD"])
    assert_same(two, found["LD>DS"])
    assert_same(later, read_round(tmp_path / "both", 4).updates["LD>DS"])
