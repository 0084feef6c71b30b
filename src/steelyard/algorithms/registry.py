"""Which algorithms there are: the built-in ones, those of installed packages, and those of a user's own files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from steelyard.base.errors import UserError, brief
from steelyard.base.usercode import ALGORITHMS, Registry, origin
from steelyard.messages.algorithm import Algorithm

AlgorithmT = TypeVar("AlgorithmT", bound=type[Algorithm])
_ASKED_FOR = {"train": "by_hand", "listen": "listens", "sent": "replaces", "correction": "corrects"}
"""Methods that are asked for only where a class says so, and what says it."""
_registry: Registry[type[Algorithm]] = Registry("algorithm", ALGORITHMS, origin)


def algorithm(name: str) -> Callable[[AlgorithmT], AlgorithmT]:
    """Register a class under the name that experiments and `--rules` use; decorate each algorithm with it.

    >>> @steelyard.algorithm("half")
    ... class Half(steelyard.Algorithm): ...

    Raises:
        UserError: the name is taken, what is decorated is no class derived from `Algorithm`, or it has a method that
            would never be asked for.
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
        for method, says in _ASKED_FOR.items():
            defined = getattr(made, method) is not getattr(Algorithm, method)
            # Else training would be FedAvg's without a word, or end in a method that is not there.
            if defined != (getattr(made, says) not in (False, "nothing")):
                raise UserError(
                    f"@algorithm({name!r}): {f'{method} is' if defined else f'no {method} is'} defined, and {says} is "
                    f"{getattr(made, says)!r}; allowed: both {method} and {says}, or neither"
                )
        if made.after_training is not Algorithm.after_training and not (made.keeps or made.sends):
            raise UserError(
                f"@algorithm({name!r}): after_training is defined, and keeps and sends are empty; allowed: names of "
                "the vectors that it returns in one of them, or no after_training"
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
