"""Which nodes have a message waiting for them, so that calls which ask for one can be held until there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

ANYBODY = ""
"""The name under which one waits for news of whomever."""
NEWS = "/steelyard/news"
"""The proxy's call to its SuperLink: for which nodes have messages come? It names those whose calls it holds."""
WAIT_HEADER = "steelyard-wait"
"""The header in which a node says for how many seconds its call for a message may be held."""
CLOCK_HEADER, VERSION_HEADER = "steelyard-clock", "steelyard-version"
"""What a node says of itself beside Flower's own headers: by how much its clock is ahead, and its version."""
LONGEST_HOLD = 25.0
"""Most seconds that a call is held; a node's own HTTP client gives up after thirty."""
LOOK_SECONDS = 5.0
"""How often a call that is held is looked after: is its caller still there? If so, it is a sign of life."""
SIGN_OF_LIFE_SECONDS = 10.0
"""The interval in which a node promises signs of life; Flower takes it for gone after two of them."""


def seconds_to_hold(text: str) -> float:
    """Return for how many seconds a call may be held, by its header; 0: not at all."""
    try:
        return min(max(0.0, float(text)), LONGEST_HOLD)
    except ValueError:
        return 0.0


class News:
    """For whom something has come, in the order of its coming; use it within one event loop."""

    def __init__(self) -> None:
        self.serial = 0
        """The number of the last news; whoever waits says after which."""
        self._last: dict[str, int] = {}
        self._events: dict[str, asyncio.Event] = {}

    def note(self, names: Iterable[str]) -> None:
        """Note that something has come for these, and wake whoever waits for it."""
        for name in (*names, ANYBODY):
            self.serial += 1
            self._last[name] = self.serial
            if (event := self._events.pop(name, None)) is not None:
                event.set()

    def last(self, name: str) -> int:
        """Return the number of the last news for this name; 0: there was none."""
        return self._last.get(name, 0)

    def since(self, serial: int) -> list[str]:
        """Return for whom something has come after the news of this number."""
        return [name for name, last in self._last.items() if name and last > serial]

    async def wait(self, name: str, serial: int, seconds: float) -> None:
        """Wait for news of this name after the one of this number, at most so many seconds."""
        if self.last(name) <= serial:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._events.setdefault(name, asyncio.Event()).wait()
