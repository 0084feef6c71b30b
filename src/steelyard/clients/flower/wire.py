"""What every message is made of: one written form and the arrays beside it, read with every claim checked.

A codec packs what some clients of one node trained, reads it back on the server with every shape and type checked, and
joins what came from several nodes. `DENSE` carries whole models. An experiment names the one codec of its payload, and
both ends of the wire are given it: a node cannot choose another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from steelyard.clients.flower.checks import clean
from steelyard.clients.flower.forms import FailureForm, Form, Refused
from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import Failure, Task, Updates


def content(form: Form, arrays: Mapping[str, NDArray[Any]]) -> RecordDict:
    """Return the content of a message: one form and the arrays beside it."""
    return RecordDict({"form": written(form), "arrays": pack(arrays)})


def written(form: Form) -> ConfigRecord:
    """Return a form as a record of a message."""
    return ConfigRecord({"json": form.write()})


def split(records: RecordDict) -> tuple[object, ArrayRecord]:
    """Return the form's text and the arrays of a message, or refuse a message of another make."""
    if set(records) != {"form", "arrays"}:
        raise Refused(f"records: got {', '.join(sorted(records))[:200] or 'none'}; allowed: exactly arrays, form")
    form, arrays = records["form"], records["arrays"]
    if not isinstance(form, ConfigRecord) or not isinstance(arrays, ArrayRecord) or set(form) != {"json"}:
        raise Refused("records: 'form' must hold one JSON text and 'arrays' must hold arrays")
    return form["json"], arrays


def failure_forms(failures: Sequence[Failure]) -> list[FailureForm]:
    """Return failures as an answer writes them."""
    return [FailureForm(client=failure.client, reason=clean(failure.reason)) for failure in failures]


_NUMPY = "numpy.ndarray"
_LENGTH_BYTES = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}
"""By version of NumPy's file format: how many bytes say how long the header is."""
_LONGEST_HEADER = 10_000
_HEADER = re.compile(
    rb"\{'descr': '([<>|=][\w\[\]]{1,16})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:-?\d{1,20}(?:, |,?(?=\))))*)\), \} *\n"
)
"""The one form in which NumPy writes the header of an array of numbers."""


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return a record of these arrays, ready to be sent."""
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()})


def unpack(array: Array, name: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return an array that came over the wire, or refuse it; None in `shape` stands for any length.

    The header of the bytes themselves is believed, not what the message says about them, and the number of bytes must
    be exactly what the header declares: a header that claims terabytes costs nothing.
    """
    found, fortran, found_dtype, start = _header(array, name)
    if fortran and len(found) > 1:
        raise Refused(f"array {name}: Fortran order; allowed: C order")
    if found_dtype != np.dtype(dtype):
        raise Refused(f"array {name}: dtype {found_dtype}; allowed: {np.dtype(dtype)}")
    if len(found) != len(shape) or any(w is not None and f != w for f, w in zip(found, shape, strict=True)):
        wanted = str(tuple("any" if length is None else length for length in shape)).replace("'", "")
        raise Refused(f"array {name}: shape {found}; allowed: {wanted}")
    return _numbers(array, name, found_dtype, start, found).reshape(found)


def read_array(array: Array, name: str) -> NDArray[Any]:
    """Return an array of any type and shape, as other people's apps send them, or refuse it, checked as in `unpack`."""
    shape, fortran, dtype, start = _header(array, name)
    if dtype.itemsize == 0 or not all(0 <= length < 1 << 62 for length in shape):
        raise Refused(f"array {name}: shape {shape} of {dtype}; allowed: lengths from 0 on, and a type of numbers")
    return _numbers(array, name, dtype, start, shape).reshape(shape, order="F" if fortran else "C")


def _numbers(array: Array, name: str, dtype: np.dtype[Any], start: int, shape: tuple[int, ...]) -> NDArray[Any]:
    declared = prod(shape) * dtype.itemsize
    if len(array.data) - start != declared:
        raise Refused(f"array {name}: {len(array.data) - start} bytes of data; allowed: {declared}")
    return np.frombuffer(array.data, dtype=dtype, offset=start)


def _header(array: Array, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether columns come first, type, and where the numbers begin."""
    if array.stype != _NUMPY:
        raise Refused(f"array {name}: serialised as {array.stype!r}; allowed: {_NUMPY}")
    # NumPy's reader uses `ast`, which fails now and then in two threads at once (Python 3.11 before 3.11.8, gh-106905).
    data = memoryview(array.data)
    width = _LENGTH_BYTES.get(bytes(data[:8]), 0)
    start = 8 + width
    end = start + int.from_bytes(data[8:start], "little")
    found = _HEADER.fullmatch(data[start:end]) if width and end <= min(len(data), start + _LONGEST_HEADER) else None
    if found is None:
        raise Refused(f"array {name}: not an array file")
    try:
        dtype = np.dtype(found[1].decode())
    except TypeError:
        raise Refused(f"array {name}: not an array file (NumPy knows no type {found[1].decode()!r})") from None
    if dtype.hasobject:
        raise Refused(f"array {name}: holds Python objects; allowed: numbers")
    shape = tuple(int(length) for length in re.findall(rb"-?\d+", found[3]))
    return shape, found[2] == b"True", dtype, end


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor with a memory of its own; the bytes of a message cannot be written to."""
    return torch.from_numpy(array.copy())


@dataclass(frozen=True)
class Codec:
    """One kind of payload on the wire; make one for a payload class of your own."""

    kind: str
    payload: type | tuple[type, ...]
    """The payload classes that it carries."""
    pack: Callable[[Any], dict[str, NDArray[Any]]]
    """Payload of one node's clients -> named arrays."""
    unpack: Callable[[Mapping[str, Array], int, torch.Tensor], Payload]
    """Named arrays, number of clients, global parameters -> payload; raises Refused."""
    join: Callable[[Sequence[Any], Sequence[int]], Payload]
    """Payloads of several nodes, and the order of all their clients -> one payload with the clients in that order."""
    largest: Callable[[int, torch.Tensor], int]
    """Number of clients, global parameters -> most bytes that an honest answer can have."""

    def refuse_other(self, kind: str) -> None:
        """Refuse an answer whose node says that it used another codec."""
        if kind != self.kind:
            raise Refused(f"payload: got {kind!r}; allowed: {self.kind}")

    def packed(self, payload: Payload) -> dict[str, NDArray[Any]]:
        """Return what a node's clients trained as named arrays."""
        if not isinstance(payload, self.payload):
            raise TypeError(f"the codec '{self.kind}' does not carry {type(payload).__name__}")
        return self.pack(payload)


class CohortRows:
    """The matrices of a whole cohort, into which models and an algorithm's vectors are copied as they arrive.

    No second copy of them is ever needed. Use one for each task whose updates travel as whole models, `put` for each
    answer and `joined` at the end.
    """

    def __init__(self, task: Task) -> None:
        self._row = {client: row for row, client in enumerate(sorted(task.clients))}
        shape = (len(self._row), task.parameters.numel())
        self._models = torch.empty(shape)
        self._vectors = {name: torch.empty(shape) for name in task.algorithm.sends}
        self._lock, self._closed = Lock(), False

    def put(self, part: Updates) -> Updates:
        """Take over the models and vectors of an answer; what is returned holds them no longer."""
        models = cast(DenseModels, part.payload).models
        with self._lock:
            if self._closed:  # Rows have moved: an answer after the deadline must not be written over another.
                raise Refused("came after the deadline")
            rows = [self._row[client] for client in part.clients]
            for matrix, found in ((self._models, models), *((self._vectors[n], v) for n, v in part.vectors.items())):
                for row, numbers in zip(rows, found, strict=True):
                    matrix[row].copy_(numbers)
        return replace(part, payload=DenseModels(models[:0].clone()), vectors={})

    def joined(self, clients: Sequence[str]) -> tuple[DenseModels, dict[str, torch.Tensor]]:
        """Return models and vectors of these clients, ascending; rows move up over those of clients left out."""
        with self._lock:
            self._closed = True
        for matrix in (self._models, *self._vectors.values()):
            for row, client in enumerate(clients):
                if self._row[client] != row:
                    matrix[row].copy_(matrix[self._row[client]])
        count = len(clients)
        return DenseModels(self._models[:count]), {name: matrix[:count] for name, matrix in self._vectors.items()}


def only_keys(arrays: Mapping[str, Array], allowed: Sequence[str]) -> None:
    """Refuse missing and unexpected arrays by name."""
    if set(arrays) != set(allowed):
        got = ", ".join(sorted(arrays)) or "none"
        raise Refused(f"arrays: got {got[:200]}; allowed: exactly {', '.join(sorted(allowed))}")


def _pack_dense(payload: DenseModels) -> dict[str, NDArray[Any]]:
    return {"models": payload.models.detach().to("cpu", torch.float32).numpy()}


def _unpack_dense(arrays: Mapping[str, Array], clients: int, parameters: torch.Tensor) -> Payload:
    only_keys(arrays, ["models"])
    return DenseModels(tensor(unpack(arrays["models"], "models", "<f4", (clients, parameters.numel()))))


def _join_dense(payloads: Sequence[Any], order: Sequence[int]) -> Payload:
    return DenseModels(torch.cat([cast(DenseModels, payload).models for payload in payloads])).select(order)


DENSE = Codec(
    kind="dense",
    payload=DenseModels,
    pack=_pack_dense,
    unpack=_unpack_dense,
    join=_join_dense,
    largest=lambda clients, parameters: 4 * clients * parameters.numel() + 4096,
)
"""Whole models, one row of numbers per client."""
