"""How ranks write messages: words as JSON beside arrays in safetensors; nothing that is read is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from safetensors.numpy import load, save

Content = Any
"""Tables, lists, words, numbers, tensors and numpy arrays, in each other."""
_TENSOR, _ARRAY, _TREE = "$tensor", "$array", "tree"


def written(content: Content) -> torch.Tensor:
    """Return a message as bytes; `read` is the inverse."""
    arrays: dict[str, np.ndarray] = {}

    def plain(part: Content) -> Any:
        if isinstance(part, Mapping):
            return {name: plain(each) for name, each in cast("Mapping[str, Content]", part).items()}
        if isinstance(part, list | tuple):
            return [plain(each) for each in cast("Sequence[Content]", part)]
        if isinstance(part, np.generic):
            return part.item()
        if not isinstance(part, torch.Tensor | np.ndarray):
            return part
        kind, name = (_TENSOR if isinstance(part, torch.Tensor) else _ARRAY), str(len(arrays))
        arrays[name] = np.asarray(part.detach().cpu() if isinstance(part, torch.Tensor) else part, order="C")
        return {kind: name}

    tree = json.dumps(plain(content), separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(save({_TREE: np.frombuffer(tree, np.uint8), **arrays})), dtype=torch.uint8)


def read(message: torch.Tensor) -> Content:
    """Return what was sent."""
    arrays = load(message.numpy().tobytes())

    def filled(part: Any) -> Content:
        if isinstance(part, list):
            return [filled(each) for each in cast("list[Any]", part)]
        if not isinstance(part, dict):
            return part
        table = cast("dict[str, Any]", part)
        if _TENSOR in table:
            return torch.from_numpy(arrays[table[_TENSOR]])
        return arrays[table[_ARRAY]] if _ARRAY in table else {name: filled(each) for name, each in table.items()}

    return filled(json.loads(arrays[_TREE].tobytes()))
