"""Arrays on the wire: written by NumPy, read with every claim of the header checked before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from steelyard.clients.flower.forms import Refused

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


def read(array: Array, name: str) -> NDArray[Any]:
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


def size(record: ArrayRecord) -> int:
    """Return the number of bytes of all arrays of a record as they were sent."""
    return sum(len(array.data) for array in record.values())


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor with a memory of its own; the bytes of a message cannot be written to."""
    return torch.from_numpy(array.copy())
