"""`steelyard ls` and `top`: runs in a folder, once or as a live view that is read anew where something was written."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from steelyard.base.errors import UserError, without_controls
from steelyard.base.files import in_bytes
from steelyard.base.measures import measure_of
from steelyard.report.rendering import Table, as_text, bars
from steelyard.runs.glance import Glance, accuracies, find_runs, glance, signature, why_unreadable
from steelyard.runs.history import History

STYLES = {"running": "bold cyan", "finished": "green", "stopped": "yellow", "killed": "red", "unreadable": "red"}
"""How states look; each is also a word, so that nothing hangs on colour."""


def show_runs(folder: Path, found: Sequence[Glance]) -> None:
    """Print the runs of a folder, newest first, as a table that fits the terminal."""
    console = Console()
    if not found:
        console.print(nothing(folder), highlight=False, markup=False, soft_wrap=True)
        return
    rows = tuple(
        (
            *(without_controls(run.name, "�"), run.state, f"{run.round}/{'?' if run.rounds is None else run.rounds}"),
            *(score_of(run), age(run.changed), in_bytes(run.bytes)),
        )
        for run in found
    )
    table = Table("", ("run", "state", "rounds", "accuracy", "age", "size"), rows, names=2)
    text = Text(as_text(table, console.width))
    for state, style in STYLES.items():
        text.highlight_regex(rf"(?<= ){state}(?= )", style)
    console.print(text)
    for run in found:
        if run.problem:
            console.print(plain(run.problem), style="red", soft_wrap=True)
        if run.ended:
            console.print(plain(f"{run.name}: {run.ended}"), style="yellow", soft_wrap=True)


def nothing(folder: Path) -> str:
    """Return what to say where there is no run yet."""
    return f"no run in {folder} yet; start one: steelyard run quickstart --out {folder}/first"


def plain(text: str) -> Text:
    """Return text from a file as it is: no markup, no control characters."""
    return Text(without_controls(text, "�"))


def state_of(run: Glance) -> Text:
    """Return the state of a run as a coloured word."""
    return Text(run.state, style=STYLES.get(run.state, "dim"))


def score_of(run: Glance) -> str:
    """Return the main rule's accuracy, named where it is something else than accuracy."""
    if run.accuracy is None:
        return "–"
    measure = measure_of(run.measure)
    return measure.show(run.accuracy) if measure.percent else f"{measure.show(run.accuracy)} {measure.name}"


def age(seconds: float) -> str:
    """Write how long ago something was, short: "40 s", "5 min", "3 h", "2 d"."""
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{int(passed // length)} {unit}"
    return f"{int(passed)} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in one line of at most `width` letters: means of equal parts, from the lowest to the highest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * part // count for part in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return bars(means, min(means), max(means))


# `steelyard top`.


RULES = 4
"""Rules of one run that are shown; the rest are counted."""
HEAVIEST = 3
"""Clients of the newest round that are shown."""
RUNS = 30
"""Runs that are shown at most, before the height of the terminal is asked."""


class Board:
    """What is known of the runs in a folder; a look reads only those whose database was written since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[object, Glance, list[RenderableType]]] = {}

    def frame(self, width: int, height: int | None = None) -> RenderableType:
        """Return all runs as they are now, running ones first, then the newest."""
        names = find_runs(self.folder)
        if not names:
            return Text(nothing(self.folder))
        shown: list[tuple[Glance, list[RenderableType]]] = []
        for name in names[:RUNS]:
            with suppress(UserError):
                shown.append(self._look(name, width))
        self._known = {run.name: self._known[run.name] for run, _ in shown}
        shown.sort(key=lambda pair: pair[0].state != "running")
        running = sum(run.state == "running" for run, _ in shown)
        head = Text(f"runs in {self.folder}: {len(names)}, running: {running}", style="bold", overflow="ellipsis")
        blocks: list[RenderableType] = [head]
        lines = 1
        for count, (run, block) in enumerate(shown):
            lines += 2 + min(len(run.rules), RULES + 1) + 1 + bool(run.ended)
            if height is not None and lines > height - 1 and count:
                blocks.append(Text(f"and {len(names) - count} more: steelyard ls {self.folder}", style="dim"))
                break
            blocks += [Text(""), _head(run), *block]
        return Group(*blocks)

    def _look(self, name: str, width: int) -> tuple[Glance, list[RenderableType]]:
        known = self._known.get(name)
        folder = self.folder / name
        # A run that was killed writes nothing: the process is looked at too.
        mark = (signature(folder), width, known is not None and known[1].writer and known[1].writer.alive)
        if known is not None and known[0] == mark:
            return known[1], known[2]
        run = glance(self.folder, name)
        block: list[RenderableType]
        try:
            block = _body(run, width)
        except UserError as error:
            block = [plain(why_unreadable(name, error))]
        mark = (signature(folder), width, run.writer and run.writer.alive)
        self._known[name] = (mark, run, block)
        return run, block


def _head(run: Glance) -> RenderableType:
    """How far a run is, its name and state, and when it was last written."""
    head = Grid.grid(padding=(0, 1))
    name = run.folder.resolve().name if run.name == "." else run.name  # the folder itself is the run
    head.add_row(_bar(run, 12), plain(name), state_of(run), Text(f"{age(run.changed)} ago", style="dim"))
    return head


def _body(run: Glance, width: int) -> list[RenderableType]:
    """A line for each rule of a run, and who counts most."""
    if run.problem:
        return [plain(run.problem)]
    curves = accuracies(run.folder)
    body = Grid.grid(padding=(0, 1))
    for line in run.rules[:RULES]:
        curve = [value for _, value in curves.get((line.rule, line.seed), [])]
        seed = f", seed {line.seed}" if len({inner.seed for inner in run.rules}) > 1 else ""
        name = plain(line.rule)
        name.truncate(max(12, width // 3 - len(seed)), overflow="ellipsis")
        name.append(seed)
        score = Text("–") if line.accuracy is None else Text(measure_of(run.measure).show(line.accuracy))
        body.add_row(Text(" "), name, score, Text(sparkline(curve, max(8, width // 4)), style="cyan"))
    blocks: list[RenderableType] = [body]
    if len(run.rules) > RULES:
        blocks.append(Text(f"  and {len(run.rules) - RULES} more rules", style="dim"))
    if run.ended:
        blocks.append(plain(f"  {run.ended}"))
    if (heaviest := History(run.folder).heaviest()) is not None:
        round, weights = heaviest
        shares = ", ".join(f"{client} {share:.0%}" for client, share in weights[:HEAVIEST])
        text = plain(f"  heaviest of {len(weights)} in round {round}: {shares}")
        text.truncate(width, overflow="ellipsis")
        blocks.append(text)
    return blocks


def _bar(run: Glance, width: int) -> Text:
    if not run.rounds:
        return Text(f"{run.round}/?")
    done = min(width, round(width * run.round / run.rounds))
    return Text.assemble(("━" * done, "cyan"), ("─" * (width - done), "dim"), f" {run.round}/{run.rounds}")


def watch_runs(folder: Path, *, every: float, once: bool) -> None:
    """Show the runs of a folder until q or Ctrl-C, or one frame; what `steelyard top` does."""
    console = Console()
    board = Board(folder)
    if once or not console.is_terminal:
        console.print(board.frame(console.width))
        return
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(board.frame(console.width, console.height), refresh=True)
            if pressed(every) in ("q", "Q"):
                return


@contextmanager
def _keys() -> Generator[_Pressed]:
    """Read single keys without echo, and leave the terminal as it was."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _Pressed(sys.stdin.fileno())
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _Pressed:
    """Waits for a key, or for the time to pass."""

    def __init__(self, source: int | None) -> None:
        self._source = source

    def __call__(self, seconds: float) -> str:
        if self._source is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._source], [], [], seconds)
        return sys.stdin.read(1) if ready else ""
