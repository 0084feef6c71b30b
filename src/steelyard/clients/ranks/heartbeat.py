"""Signs of life: every rank counts up while it lives, so that one that hangs is named long before it would answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from steelyard.base.errors import UserError, brief

SILENCE = "STEELYARD_RANK_SILENCE"
"""In the environment of rank 0: seconds without a sign of life after which a rank counts as lost."""
USUAL, LEAST, MOST = 60.0, 2.0, 86_400.0


class Counters(Protocol):
    """What torch's store does that signs of life need; it answers at once."""

    def add(self, key: str, amount: int, /) -> int: ...


def silence(environment: Mapping[str, str]) -> float:
    """Return how many seconds a rank may give no sign of life."""
    text = environment.get(SILENCE) or str(USUAL)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST <= seconds <= MOST:
        raise UserError(f"{SILENCE}: got {brief(text)} in the environment; allowed: {LEAST:g} to {MOST:g} seconds")
    return seconds


class Heartbeat:
    """Counters of all ranks in the store by which they have met; a rank that is stopped does not count on."""

    def __init__(self, counters: Counters, seconds: float) -> None:
        self._counters, self.seconds = counters, seconds
        self.every = min(5.0, seconds / 4)

    def start(self, rank: int) -> None:
        """Count for a rank from now on, until its process ends."""
        threading.Thread(target=self._count, args=(rank,), name="heartbeat", daemon=True).start()

    def _count(self, rank: int) -> None:
        pause = threading.Event()
        while not pause.wait(self.every):
            try:
                self._counters.add(_key(rank), 1)
            except Exception:
                return  # the store went with rank 0: this rank hears of that where it waits for it

    def watch(self, waiting: Callable[[], Collection[int]], lost: Callable[[int], None], done: threading.Event) -> None:
        """Report a rank that is waited for and has given no sign, until `done`.

        Looks are counted, not time: where all processes were stopped together, as by a batch system, none is late.
        """
        silent: dict[int, tuple[int, int]] = {}
        while not done.wait(self.every):
            for rank in waiting():
                try:
                    count = int(self._counters.add(_key(rank), 0))
                except Exception:
                    return
                before, looks = silent.get(rank, (count, 0))
                silent[rank] = (count, looks + 1 if count == before else 0)
                if silent[rank][1] * self.every > self.seconds:
                    lost(rank)
                    return


def _key(rank: int) -> str:
    return f"steelyard/heartbeat/{rank}"
