"""What clients keep to themselves between rounds, on the node: in Flower's node state, and in a file where asked for.

A state is what the clients' `snapshot` returns, stamped with the round after which it was taken. The last few are kept,
because a resumed run may repeat a round: it must start from the state before that round, not from the one after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from steelyard.errors import UserError
from steelyard.files import owners_only
from steelyard.runs.checkpoint import read_tensors, write_tensors

State = Mapping[str, torch.Tensor]
_INDEX = "steelyard"


class NodeStates:
    """The states of one federation on one node; use `before` to go on from one and `keep` after training.

    `run` names the run: what another run left behind is never used. With `folder`, states outlive the process.
    """

    def __init__(self, node: RecordDict, run: str, federation: str, keep: int, folder: Path | None = None) -> None:
        self._node = node
        self._run, self._federation, self._most = run, federation, max(2, keep)
        stem = hashlib.sha256(federation.encode()).hexdigest()[:16]
        self._file = None if folder is None else folder / f"{stem}.safetensors"
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
        if not any(self._states.values()) and not self._named():
            return  # Nothing private: leave no trace.
        for name in self._named():
            del self._node[name]
        for stamp, kept in self._states.items():
            arrays = {key: Array(tensor.contiguous().numpy()) for key, tensor in kept.items()}
            self._node[self._name(stamp)] = ArrayRecord(arrays)
        self._node[self._name(-1)] = ConfigRecord({"run": self._run})
        if self._file is not None:
            self._to_file(self._file)

    def _name(self, stamp: int) -> str:
        return f"{_INDEX}/{self._federation}/{'run' if stamp < 0 else stamp}"

    def _named(self) -> list[str]:
        prefix = f"{_INDEX}/{self._federation}/"
        return [name for name in self._node if name.startswith(prefix)]

    def _from_node(self) -> dict[int, State]:
        owner = self._node.get(self._name(-1))
        if not isinstance(owner, ConfigRecord) or owner.get("run") != self._run:
            return {}
        found: dict[int, State] = {}
        for name in self._named():
            record = self._node[name]
            if isinstance(record, ArrayRecord):
                stamp = int(name.rsplit("/", 1)[1])
                found[stamp] = {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items()}
        return found

    def _to_file(self, file: Path) -> None:
        index: list[list[object]] = []
        tensors: dict[str, torch.Tensor] = {}
        for stamp, state in self._states.items():
            for key, tensor in state.items():
                tensors[str(len(index))] = tensor
                index.append([stamp, key])
        text = json.dumps({"run": self._run, "stamps": sorted(self._states), "index": index})
        tensors["about"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        try:
            with owners_only(file.parent):
                write_tensors(file, tensors)
        except OSError as error:
            raise UserError(f"node config state: {file} cannot be written: {error.strerror}") from error

    def _from_file(self, file: Path) -> dict[int, State]:
        if not file.is_file():
            return {}
        tensors = read_tensors(file)
        about = json.loads(tensors["about"].numpy().tobytes().decode())
        if about["run"] != self._run:
            return {}
        found: dict[int, dict[str, torch.Tensor]] = {int(stamp): {} for stamp in about["stamps"]}
        for number, (stamp, key) in enumerate(about["index"]):
            found[int(stamp)][str(key)] = tensors[str(number)]
        return dict(found)
