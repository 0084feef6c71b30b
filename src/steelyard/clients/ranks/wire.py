"""How ranks write messages: JSON for words and numbers, bytes for arrays; nothing that is read is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

Content = Any
"""Tables, lists, words, numbers, tensors and numpy arrays, in each other."""

SMALL = 1 << 20
"""Arrays of fewer bytes travel together, larger ones each for itself, so that they are not copied."""
_TENSOR, _ARRAY = "$tensor", "$array"


class Packed:
    """A message as bytes: `head` holds the words and all small arrays, `large` the other arrays as bytes."""

    def __init__(self, content: Content) -> None:
        self._kinds: list[list[Any]] = []
        self._parts: list[torch.Tensor] = []
        tree = json.dumps([self._plain(content), self._kinds], separators=(",", ":")).encode()
        small = [part for part in self._parts if part.numel() < SMALL]
        self.large = [part for part in self._parts if part.numel() >= SMALL]
        self.head = torch.cat([_bytes(np.frombuffer(tree, np.uint8)), *small])
        self.words = len(tree)

    def _plain(self, content: Content) -> Any:
        if isinstance(content, Mapping):
            return {name: self._plain(part) for name, part in cast("Mapping[str, Content]", content).items()}
        if isinstance(content, list | tuple):
            return [self._plain(part) for part in cast("Sequence[Content]", content)]
        if isinstance(content, np.generic):
            return content.item()
        if not isinstance(content, torch.Tensor | np.ndarray):
            return content
        kind = _TENSOR if isinstance(content, torch.Tensor) else _ARRAY
        array = content.detach().cpu().contiguous().numpy() if isinstance(content, torch.Tensor) else content
        self._kinds.append([array.dtype.str, list(array.shape)])
        self._parts.append(_bytes(array))
        return {kind: len(self._kinds) - 1}


class Arriving:
    """A message on its way in: made from its head, it says which large arrays follow."""

    def __init__(self, head: torch.Tensor, words: int) -> None:
        numbers = head.numpy()
        self._tree, kinds = json.loads(numbers[:words].tobytes())
        self._arrays: list[np.ndarray] = []
        self.large: list[torch.Tensor] = []
        """Memory for the arrays that follow, in order: to be filled before `content` is read."""
        begin = words
        for kind, shape in kinds:
            array = np.empty(shape, dtype=np.dtype(kind))
            if array.nbytes < SMALL:
                _bytes(array).numpy()[:] = numbers[begin : begin + array.nbytes]
                begin += array.nbytes
            else:
                self.large.append(_bytes(array))
            self._arrays.append(array)

    def content(self) -> Content:
        """Return what was sent."""
        return self._filled(self._tree)

    def _filled(self, tree: Any) -> Content:
        if isinstance(tree, list):
            return [self._filled(part) for part in cast("list[Any]", tree)]
        if not isinstance(tree, dict):
            return tree
        table = cast("dict[str, Any]", tree)
        if _TENSOR in table:
            return torch.from_numpy(self._arrays[table[_TENSOR]])
        if _ARRAY in table:
            return self._arrays[table[_ARRAY]]
        return {name: self._filled(part) for name, part in table.items()}


def _bytes(array: np.ndarray) -> torch.Tensor:
    """Return the bytes of an array, without a copy where it can be written to."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
