"""Which code does FPL's draws and steps: NumPy, or loops that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from steelyard.base.errors import UserError
from steelyard.recommend import fpl, histories, parallel, sequential
from steelyard.recommend.fpl import LocalPass
from steelyard.recommend.histories import Triples
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.sparse import Floats32

COMPILED_FROM = 100_000
"""Triples of an epoch from which "auto" compiles: below, loading numba takes longer than it saves."""


@dataclass(frozen=True)
class Engine:
    """The parts of a round that take the time; the functions of both engines have the same names and arguments."""

    name: str
    draw_triples: Callable[..., Triples]
    sent_positives: Callable[..., Flags]
    distinct_rows: Callable[..., Codes]
    local_pass: Callable[..., LocalPass]
    sequential_rounds: Callable[..., Floats32]


NUMPY = Engine(
    "numpy",
    histories.draw_triples,
    fpl.sent_positives,
    parallel.distinct_rows,
    parallel.local_pass_in_blocks,
    sequential.sequential_rounds,
)


def choose_engine(name: str, triples: int) -> Engine:
    """Return the engine of that name; "auto" is compiled for epochs of many triples where numba is installed."""
    installed = find_spec("numba") is not None
    if name == "numpy" or (name == "auto" and not (installed and triples >= COMPILED_FROM)):
        return NUMPY
    if not installed:
        raise UserError(
            "fpl.engine: got 'compiled', and numba is not installed; allowed: 'auto', 'numpy', or after "
            "pip install 'steelyard[recommend]'"
        )
    # For speed of start: numba takes a second to import.
    from steelyard.recommend import compiled

    return Engine(
        "compiled",
        compiled.draw_triples,
        compiled.sent_positives,
        compiled.distinct_rows,
        compiled.local_pass_in_blocks,
        compiled.sequential_rounds,
    )
