"""States to tensors and JSON and back, and files that are there whole or not at all."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.records import federation, record, state

from steelyard.errors import UserError
from steelyard.messages import LossState
from steelyard.rounds.state import RoundState
from steelyard.runs import checkpoint, tensor_files
from steelyard.runs.opening import connect
from steelyard.runs.store import Store
from steelyard.weighing.priorities import OrderState

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
)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@given(st.dictionaries(NAMES, STATES, max_size=3), st.dictionaries(NAMES, TENSORS, max_size=3))
def test_unpack_is_the_inverse_of_pack(states: dict[str, RoundState], kept: dict[str, torch.Tensor]) -> None:
    tensors, text = checkpoint.pack(states, kept)
    found, back = checkpoint.unpack(tensors, text)
    assert list(found) == list(states)
    for name, expected in states.items():
        for field in fields(RoundState):
            ours, theirs = getattr(found[name], field.name), getattr(expected, field.name)
            assert ours is theirs if field.name == "parameters" else ours == theirs
        assert type(found[name].orders.order) is tuple
    assert back.keys() == kept.keys()
    assert all(back[name] is kept[name] for name in kept)


@given(st.dictionaries(NAMES, TENSORS, max_size=3))
def test_tensors_come_back_from_a_file_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "x.safetensors"
    tensor_files.write_tensors(path, tensors)
    found = tensor_files.read_tensors(path)
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_views_that_share_memory_and_gradients_are_written_as_they_stand(tmp_path: Path) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    given = {"row": table[1], "turned": table.t(), "again": table[1], "learnt": torch.ones(2, requires_grad=True)}
    tensor_files.write_tensors(tmp_path / "x.safetensors", given)
    found = tensor_files.read_tensors(tmp_path / "x.safetensors")
    assert found["row"].tolist() == found["again"].tolist() == [3.0, 4.0, 5.0]
    assert found["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["learnt"].tolist() == [1.0, 1.0]


def test_a_file_is_replaced_whole_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    tensor_files.write_tensors(path, {"a": torch.zeros(2)})

    def fail(_: int) -> None:
        # What is on its way to the disk must not stand under the name of the whole file yet.
        assert tensor_files.read_tensors(path)["a"].tolist() == [0.0, 0.0]
        assert tensor_files.read_tensors(path.with_name("x.safetensors.part"))["a"].tolist() == [1.0, 1.0]
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            tensor_files.write_tensors(path, {"a": torch.ones(2)})
    assert tensor_files.read_tensors(path)["a"].tolist() == [0.0, 0.0]
    tensor_files.write_tensors(path, {"a": torch.ones(2)})
    assert tensor_files.read_tensors(path)["a"].tolist() == [1.0, 1.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "missing", "text"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.safetensors"
    tensor_files.write_tensors(path, {"a": torch.zeros(100)})
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "text":
        path.write_text("no tensors here")
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"x\.safetensors: not a readable checkpoint: \S"):
        tensor_files.read_tensors(path)


def test_models_and_what_clients_keep_stand_apart(tmp_path: Path) -> None:
    """A federation may be called like something that a client keeps."""
    tensors, text = checkpoint.pack({"own": state(2, 5.0)}, {"own": torch.tensor([6.0])})
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"models/own": [5.0], "clients/own": [6.0]}
    assert json.loads(text)["own"]["round"] == 2
    states, kept = checkpoint.unpack(tensors, text)
    assert states["own"].parameters.tolist() == [5.0]
    assert kept["own"].tolist() == [6.0]


def test_the_last_checkpoint_of_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    connection = connect(tmp_path, write=False)
    nothing = checkpoint.last_checkpoint(connection, tmp_path)
    assert (nothing.round, nothing.states, nothing.kept) == (-1, {}, {})
    kept = {"own": torch.tensor([4.0])}
    store.commit(8, [record(round=8)], {"DS>LD": state(8, 3.0)}, lambda: kept, last=False)
    # A checkpoint of an earlier round that was not swept away does not count.
    with sqlite3.connect(tmp_path / "run.sqlite") as writer:
        writer.execute("INSERT INTO checkpoints VALUES (2, 'gone.safetensors', '{}', '', '')")
    writer.close()
    found = checkpoint.last_checkpoint(connection, tmp_path)
    assert (found.round, list(found.states), found.states["DS>LD"].parameters.tolist()) == (8, ["DS>LD"], [3.0])
    assert found.kept["own"].tolist() == [4.0]
    connection.close()
    store.close()


def test_states_without_their_models_keep_all_else() -> None:
    whole = state(3, 1.0, 2.0)
    (left,) = checkpoint.without_models({"f": whole}).values()
    assert left.parameters.shape == (0,)
    assert left.parameters.dtype == torch.float32
    assert (left.round, left.orders, left.loss) == (whole.round, whole.orders, whole.loss)
    assert whole.parameters.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"DS>LD": {"round": 1}}', "DS>LD.loss: Field required"),
        ("{}garbage", "Extra data: line 1 column 3 (char 2)"),
        ("[" * 100_000, "nested too deeply"),
        ('{"other": %s}', "no model of 'other'"),
    ],
)
def test_states_that_cannot_be_read_are_named_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.commit(1, [record(round=1)], {"DS>LD": state(1, 3.0)}, dict, last=False)
    store.close()
    with sqlite3.connect(tmp_path / "run.sqlite") as writer:
        ((file, states),) = writer.execute("SELECT file, states FROM checkpoints").fetchall()
        text = text.replace("%s", json.dumps(json.loads(states)["DS>LD"]))
        path = tmp_path / tensor_files.FOLDER / file
        wanted = checkpoint.checksum(path.read_bytes(), text)
        writer.execute("UPDATE checkpoints SET states = ?, checksum = ?", (text, wanted))
    writer.close()
    connection = connect(tmp_path, write=False)
    with pytest.raises(UserError) as found:
        checkpoint.last_checkpoint(connection, tmp_path)
    connection.close()
    assert str(found.value) == f"{path}: the states that belong to it cannot be read: {reason}"
