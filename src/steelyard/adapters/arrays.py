"""A model as named arrays and as one flat vector: what frameworks send, and what is weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of a model's arrays. Floating ones make up the vector, others are averaged apart."""

    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, np.dtype[Any]]

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        """Return the layout of a model."""
        return cls({n: a.shape for n, a in arrays.items()}, {n: a.dtype for n, a in arrays.items()})

    @property
    def floating(self) -> list[str]:
        """Names of the arrays that make up the vector, in order."""
        return [name for name, kind in self.types.items() if kind.kind == "f"]

    @property
    def counting(self) -> list[str]:
        """Names of arrays of whole numbers and truth values, such as batch norm's counter."""
        return [name for name, kind in self.types.items() if kind.kind in "iub"]

    @property
    def precision(self) -> torch.dtype:
        """What the vector is computed in: float64 where any array is, float32 otherwise (half precision too)."""
        return torch.float64 if any(self.types[name].itemsize > 4 for name in self.floating) else torch.float32

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(prod(self.shapes[name]) for name in self.floating)

    def refusal(self, arrays: Arrays) -> str:
        """Say why another model is not of this layout; empty where it is."""
        for name in self.types:
            if name not in arrays:
                return f"array {name} is missing"
            if arrays[name].shape != self.shapes[name]:
                return f"array {name} has shape {arrays[name].shape}, and {self.shapes[name]} was sent"
            if (arrays[name].dtype.kind == "f") != (self.types[name].kind == "f"):
                return f"array {name} is of type {arrays[name].dtype}, and {self.types[name]} was sent"
        extra = [name for name in arrays if name not in self.types]
        return f"array {extra[0]} was not sent" if extra else ""

    def vector(self, arrays: Arrays) -> torch.Tensor:
        """Return the floating arrays as one vector."""
        kind = np.float64 if self.precision is torch.float64 else np.float32
        flat = [np.asarray(arrays[name], dtype=kind).reshape(-1) for name in self.floating]
        return torch.from_numpy(np.concatenate(flat) if flat else np.zeros(0, dtype=kind))

    def arrays(self, vector: torch.Tensor, counted: Arrays) -> dict[str, NDArray[Any]]:
        """Return a vector, and the other arrays, as a model of this layout and its types."""
        found: dict[str, NDArray[Any]] = {}
        values, begin = vector.detach().cpu().numpy(), 0
        for name, kind in self.types.items():
            if name in counted:
                found[name] = counted[name]
                continue
            length = prod(self.shapes[name])
            found[name] = values[begin : begin + length].reshape(self.shapes[name]).astype(kind)
            begin += length
        return found

    def counted(self, models: list[Arrays], weights: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        """Return the weighted means of the other arrays, rounded to their types: Σ wᵢxᵢ in float64."""
        found: dict[str, NDArray[Any]] = {}
        for name in self.counting:
            parts = [w * np.asarray(model[name], dtype=np.float64) for w, model in zip(weights, models, strict=True)]
            found[name] = np.asarray(np.rint(sum(parts, np.zeros(self.shapes[name]))), dtype=self.types[name])
        return found
