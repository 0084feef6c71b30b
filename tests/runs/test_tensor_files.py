"""Checkpoints that write what has changed: the same tensors come back, and few bytes are written for them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tests.runs.commands import steelyard
from tests.runs.contents import assert_same_bits

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.runs import tensor_files
from steelyard.runs.reader import History
from steelyard.runs.tensor_files import FOLDER, TensorFiles, load_all

LONG = 1000
"""Numbers in a vector."""


def vectors(count: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"clients/{index:03d}": torch.full((LONG,), value + index) for index in range(count)}


def back(folder: Path, file: str) -> dict[str, torch.Tensor]:
    return dict(load_all(folder, file, (folder / FOLDER / file).read_bytes()).tensors)


def name(round: int) -> str:
    return f"round-{round:06d}.safetensors"


def table(folder: Path, file: str) -> dict[str, Any]:
    content = (folder / FOLDER / file).read_bytes()
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(head.get("__metadata__", {}).get("older", "{}"))


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
    assert "clients/003" not in table(tmp_path, name(2))[name(1)]["keys"]


def test_models_and_tensors_that_were_written_into_are_written_again(tmp_path: Path) -> None:
    writer, held = TensorFiles(tmp_path), {"models/a": torch.zeros(2), **vectors(8)}
    writer.write(name(1), held)
    held["clients/001"][0] = 7.0  # against the promise, and seen all the same
    writer.write(name(2), held)
    own = tensor_files.read_tensors(tmp_path / FOLDER / name(2))
    assert own.keys() == {"models/a", "clients/001"}
    assert back(tmp_path, name(2))["clients/001"][0] == 7.0


def test_what_clients_keep_no_longer_does_not_come_back(tmp_path: Path) -> None:
    writer, held = TensorFiles(tmp_path), vectors(8)
    writer.write(name(1), held)
    held["clients/002"] = torch.zeros(LONG)
    writer.write(name(2), held)
    del held["clients/002"]
    writer.write(name(3), held)
    assert "clients/002" not in back(tmp_path, name(3))
    assert back(tmp_path, name(3)).keys() == held.keys()


def test_a_file_of_which_little_is_needed_is_given_up(tmp_path: Path) -> None:
    writer, held = TensorFiles(tmp_path), vectors(10)
    writer.write(name(1), held)
    for round in range(2, 10):
        held[f"clients/{round - 2:03d}"] = torch.full((LONG,), float(round))
        writer.write(name(round), held)
        assert (name(1) in writer.needed(name(round))) == (round < 9)
    found = back(tmp_path, name(9))
    assert all(torch.equal(found[key], held[key]) for key in held)


def test_a_checkpoint_never_needs_very_many_files(tmp_path: Path) -> None:
    writer, held = TensorFiles(tmp_path), vectors(100)
    writer.write(name(0), held)
    for round in range(1, 100):
        held[f"clients/{round:03d}"] = torch.full((LONG,), float(round))
        writer.write(name(round), held)
        assert len(writer.needed(name(round))) <= tensor_files.MOST_FILES
    found = back(tmp_path, name(99))
    assert all(torch.equal(found[key], held[key]) for key in held)


def test_a_quarter_of_the_clients_tensors_is_enough_for_a_file_to_stay(tmp_path: Path) -> None:
    """Models count nothing: they are written each time."""
    for count, stays in ((4, True), (5, False)):
        folder = tmp_path / str(count)
        writer, held = TensorFiles(folder), {"models/a": torch.zeros(9 * LONG), **vectors(count)}
        writer.write(name(1), held)
        held |= {key: torch.ones(LONG) for key in vectors(count - 1)}
        writer.write(name(2), held)
        assert writer.needed(name(2)) == ({name(1)} if stays else set())
        own = set(tensor_files.read_tensors(folder / FOLDER / name(2)))
        assert (f"clients/{count - 1:03d}" in own) is not stays


def test_of_too_many_files_the_fullest_half_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MOST_FILES", 4)
    writer, held = TensorFiles(tmp_path), dict[str, torch.Tensor]()
    for round, count in enumerate((3, 5, 2, 4, 1), 1):
        held |= {f"clients/{round}.{index}": torch.ones(LONG) for index in range(count)}
        writer.write(name(round), held)
        # Four at most; each file names all that came before it.
        assert writer.needed(name(round)) == {name(older) for older in range(1, round)}
    writer.write(name(6), held)
    assert writer.needed(name(6)) == {name(2), name(4)}
    found = back(tmp_path, name(6))
    assert all(torch.equal(found[key], held[key]) for key in held)


STEPS = st.lists(
    st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9), max_size=2), st.booleans()), max_size=12
)


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


@pytest.mark.parametrize("older", ['{"../x": {"sha256": "", "keys": []}}', '{"run.sqlite": 1}', "[", "7", '{"a": {}}'])
def test_a_table_that_leads_elsewhere_is_refused(tmp_path: Path, older: str) -> None:
    content = save({"models/a": torch.zeros(2)}, {"older": older})
    with pytest.raises(UserError, match=r"is no name of a checkpoint|table of older files is damaged"):
        load_all(tmp_path, name(1), content)
    outside = json.dumps({"../x": {"sha256": "0" * 64, "keys": []}})
    with pytest.raises(UserError, match="is no name of a checkpoint"):
        load_all(tmp_path, name(1), save({"models/a": torch.zeros(2)}, {"older": outside}))


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
    first.write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"round-000001\.safetensors"):
        load_all(tmp_path, name(2), content, strict=False)
    first.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        load_all(tmp_path, name(2), content)


def scaffold(rounds: int) -> dict[str, Any]:
    return {
        "name": "scaffold",
        "seed": 3,
        "data": {"source": "digits"},
        "partition": {"scheme": "iid", "clients": 100},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"epochs": 1, "batch_size": 50, "learning_rate": 0.1},
        "rounds": {"count": rounds, "fraction": 0.1},
        "weighing": {"criteria": ["DS"]},
        "algorithm": {"name": "scaffold"},
    }


def test_a_checkpoint_of_scaffold_writes_the_cohort_and_not_all_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = tensor_files.write_tensors

    def counted(path: Path, tensors: Any, *rest: Any) -> bytes:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        return write(path, tensors, *rest)

    monkeypatch.setattr(tensor_files, "write_tensors", counted)
    folder = run(build(scaffold(30)), out=tmp_path / "run")
    states, kept = History(folder).last_checkpoint()
    vector = next(iter(states.values())).parameters.nbytes
    assert len(kept) > 90  # nearly all clients were asked once
    later = [size / vector for size in sizes[20:-1]]
    # Ten clients, the model, the server's vector, and now and then what an emptied file gives up.
    assert min(later) == pytest.approx(12, abs=0.01)
    assert sum(later) / len(later) < 20
    assert max(later) < 40
    assert sizes[-1] / vector == pytest.approx(len(kept) + 2)  # the last one is whole
    assert [path.name for path in (folder / FOLDER).iterdir()] == [name(30)]


@pytest.mark.parametrize("during", ["commit", "checkpoint"])
def test_a_killed_run_of_scaffold_ends_with_the_same_bits(tmp_path: Path, during: str) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(tomli_w.dumps(scaffold(12)))
    assert steelyard("run", path, "--out", tmp_path / "whole", folder=tmp_path) == 0
    part = tmp_path / "part"
    assert steelyard("run", path, "--out", part, folder=tmp_path, killed_after=8, during=during) == -signal.SIGKILL
    assert len(list((part / FOLDER).glob("*.safetensors"))) > 3
    assert steelyard("resume", part, folder=tmp_path) == 0, (tmp_path / "output").read_text()
    assert_same_bits(part, tmp_path / "whole")
