"""What an engine's choice depends on in a module and in a loss: kinds of layers, what is trained, modes, and source."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from steelyard.clients.local.engines.networks import has_hooks
from steelyard.learning import losses

_PLAIN = (bool, int, float, str, type(None))


def of_module(module: nn.Module) -> list[Any]:
    """Return what tells one module from another that has the same class and shapes; plain values, for a key.

    Two modules with equal fingerprints train alike: the same layers with the same settings, the same parameters
    frozen, and the same code.
    """
    layers = [
        (name, _kind(layer), layer.extra_repr(), layer.training, has_hooks(layer), _settings(layer))
        for name, layer in module.named_modules()
    ]
    parameters = [(name, list(value.shape), value.requires_grad) for name, value in module.named_parameters()]
    buffers = [(name, list(value.shape), str(value.dtype)) for name, value in module.named_buffers()]
    own = {type(layer) for layer in module.modules() if not type(layer).__module__.startswith("torch.")}
    return [layers, parameters, buffers, sorted(of_code(kind) for kind in own)]


def of_loss(name: str) -> str:
    """Return what tells one loss from another; for a loss of the user's its source counts, not only its name."""
    return name if name in losses.LOSSES else f"{name} {of_code(losses.own(name))}"


def of_code(code: type | Callable[..., Any]) -> str:
    """Return a digest of the file that defines a class or function, or of its compiled code where there is no file."""
    try:
        module = inspect.getmodule(code)
        text = inspect.getsource(code if module is None or module.__name__ == "__main__" else module)
    except (OSError, TypeError):
        functions = [value for value in vars(code).values() if hasattr(value, "__code__")] if _has_vars(code) else []
        text = repr([_compiled(value) for value in (code, *functions)])
    return hashlib.blake2b(f"{_kind(code)} {text}".encode(), digest_size=12).hexdigest()


def _has_vars(code: object) -> bool:
    return hasattr(code, "__dict__")


def _compiled(function: object) -> tuple[str, str]:
    body = getattr(function, "__code__", None)
    return ("", "") if body is None else (body.co_code.hex(), repr(body.co_names))


def _kind(value: object) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def _settings(layer: nn.Module) -> list[tuple[str, Any]]:
    """The plain numbers and words that a layer holds, such as a dropout rate that its forward uses."""
    held = ((name, value) for name, value in vars(layer).items() if not name.startswith("_"))
    return sorted((name, repr(value)) for name, value in held if isinstance(value, (*_PLAIN, tuple)))
