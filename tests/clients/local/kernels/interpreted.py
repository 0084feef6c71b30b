"""Triton's interpreter for tests on the CPU; import it with TRITON_INTERPRET=1 before any kernel is used."""

from typing import Any

import triton.runtime.interpreter as interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """Numbers in loops over ranges come as arrays of one element, which newer versions of NumPy take for no index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
