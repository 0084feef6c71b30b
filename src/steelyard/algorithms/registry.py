"""Which algorithms there are: the built-in ones, those of installed packages, and those of a user's own files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from steelyard.algorithms.algorithm import Algorithm
from steelyard.errors import UserError, brief
from steelyard.registry import Registry
from steelyard.usercode import ALGORITHMS

AlgorithmT = TypeVar("AlgorithmT", bound=type[Algorithm])
_registry: Registry[type[Algorithm]] = Registry("algorithm", ALGORITHMS, lambda made: made.__qualname__)


def algorithm(name: str) -> Callable[[AlgorithmT], AlgorithmT]:
    """Register a class under the name that experiments and `--rules` use; decorate each algorithm with it.

    >>> @steelyard.algorithm("half")
    ... class Half(steelyard.Algorithm): ...

    Raises:
        UserError: the name is taken, or what is decorated is no class derived from `Algorithm`.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name):
        raise UserError(
            f'@algorithm: got {brief(name)}; allowed: @algorithm("name"), in lower-case letters, digits and "-"'
        )

    def register(made: AlgorithmT) -> AlgorithmT:
        if not isinstance(made, type) or not issubclass(made, Algorithm):
            raise UserError(
                f"@algorithm({name!r}): got {brief(made)}; allowed: a class derived from steelyard.Algorithm"
            )
        _registry.add(name, made)
        made.name = name
        return made

    return register


def load_plugins(sources: Sequence[str]) -> None:
    """Make the algorithms of these scripts or modules known, and no longer those of other plugins."""
    _registry.load(sources)


def known() -> Mapping[str, type[Algorithm]]:
    """Return every algorithm by name: built in, declared by installed packages, or loaded from a plugin."""
    return _registry.known()
