"""What clients keep to themselves between rounds, on the node: in Flower's node state, and in a file where asked for.

A state is what the clients' `snapshot` returns, stamped with the round after which it was taken. The last few are kept,
because a resumed run may repeat a round: it must start from the state before that round, not from the one after it.
What did not change from one to the next is written once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from steelyard.base.errors import UserError, told_as
from steelyard.base.files import owners_only
from steelyard.clients.flower import arrays as packing
from steelyard.runs.checkpoint import read_tensors, write_tensors

State = Mapping[str, torch.Tensor]
_PREFIX, _ABOUT, _TENSORS = "steelyard/", "/about", "/tensors"


class NodeStates:
    """The states of one federation on one node; use `before` to go on from one and `keep` after training.

    `run` names the run: what another run left behind is never used. With `folder`, states outlive the process.
    """

    def __init__(self, node: RecordDict, run: str, federation: str, keep: int, folder: Path | None = None) -> None:
        self._node, self._name = node, f"{_PREFIX}{federation}"
        self._run, self._most = run, max(2, keep)
        stem = hashlib.sha256(federation.encode()).hexdigest()[:16]
        self._file = None if folder is None else folder / f"{stem}.safetensors"
        self._forget_other_runs()
        self._states = self._from_node()
        if not self._states and self._file is not None:
            self._states = self._from_file(self._file)

    def before(self, round: int) -> State:
        """Return the newest state that was taken before this round; empty where there is none."""
        stamps = [stamp for stamp in self._states if stamp < round]
        return self._states[max(stamps)] if stamps else {}

    def keep(self, round: int, state: State) -> None:
        """Keep the state after this round; what a resumed run has overtaken is dropped."""
        states = {stamp: kept for stamp, kept in self._states.items() if stamp < round}
        states[round] = {name: tensor.detach().cpu() for name, tensor in state.items()}
        self._states = {stamp: states[stamp] for stamp in sorted(states)[-self._most :]}
        if not any(self._states.values()) and self._name + _ABOUT not in self._node:
            return  # Nothing private: leave no trace.
        about, tensors = self._table()
        arrays = {number: Array(tensor.contiguous().numpy()) for number, tensor in tensors.items()}
        self._node[self._name + _TENSORS] = ArrayRecord(arrays)
        self._node[self._name + _ABOUT] = ConfigRecord({"run": self._run, "states": about})
        if self._file is not None:
            self._to_file(self._file, about, tensors)

    def _table(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return which tensor of which state is which, as JSON, and every tensor once, by number."""
        numbers: dict[object, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        table: dict[int, dict[str, str]] = {}
        for stamp, state in self._states.items():
            table[stamp] = {}
            for key, tensor in state.items():
                # What is held is never written into: the same memory is the same content.
                number = numbers.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), str(len(numbers)))
                table[stamp][key], tensors[number] = number, tensor
        return json.dumps(table), tensors

    def _forget_other_runs(self) -> None:
        for name, record in list(self._node.items()):
            other = isinstance(record, ConfigRecord) and record.get("run") != self._run
            if name.startswith(_PREFIX) and name.endswith(_ABOUT) and other:
                del self._node[name], self._node[name.removesuffix(_ABOUT) + _TENSORS]

    def _from_node(self) -> dict[int, State]:
        about, arrays = self._node.get(self._name + _ABOUT), self._node.get(self._name + _TENSORS)
        if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
            return {}
        tensors = {number: packing.tensor(packing.read(array, number)) for number, array in arrays.items()}
        return _states(str(about["states"]), tensors)

    def _to_file(self, file: Path, about: str, tensors: Mapping[str, torch.Tensor]) -> None:
        text = json.dumps({"run": self._run, "states": about})
        written = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with told_as(f"node config state: {file} cannot be written"), owners_only(file.parent):
            write_tensors(file, {**tensors, "about": written})

    def _from_file(self, file: Path) -> dict[int, State]:
        if not file.is_file():
            return {}
        try:
            tensors = read_tensors(file)
            about = json.loads(tensors["about"].numpy().tobytes().decode())
            return _states(about["states"], tensors) if about["run"] == self._run else {}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"node config state: {file} is not a file of states of this version; allowed: without it"
            ) from error


def _states(about: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, State]:
    table: dict[str, dict[str, str]] = json.loads(about)
    return {int(stamp): {key: tensors[number] for key, number in state.items()} for stamp, state in table.items()}
