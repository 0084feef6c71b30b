"""What the benchmarks share: options, clocks, memory, processes of their own, cells that are kept, tables."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

Out = Annotated[Path, typer.Option()]
"""An option that names a folder or a file and must be given."""
Format = Literal["text", "json"]
"""For people, or for programs."""


def start(main: Any) -> None:
    """Call a script's main function with the options that its parameters name; its first lines are the help."""
    told = str(main.__globals__["__doc__"]).strip()
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help="\n\n".join(f"\b\n{part}" for part in told.split("\n\n")))(main)
    app()


def whole_numbers(text: str) -> list[int]:
    """Return the numbers of an option that takes several, with commas."""
    return [int(word) for word in text.split(",") if word]


def words(text: str, separator: str = ",") -> list[str]:
    """Return the words of an option that takes several."""
    return [word.strip() for word in text.split(separator) if word.strip()]


def share(everything: Sequence[Any], part: str) -> Sequence[Any]:
    """Return what falls to a part, such as 0/4, of work that several processes share."""
    number, parts = map(int, part.split("/"))
    return everything[number::parts]


class Took(NamedTuple):
    """Seconds on the clock, and of the processor: on a machine shared with others these say more."""

    clock: float
    processor: float


def timed(work: Callable[[], object], *, children: bool = False) -> Took:
    """Return what some work takes; `children` counts the processor time of processes that it starts and waits for."""

    def used() -> float:
        found = resource.getrusage(resource.RUSAGE_CHILDREN)
        return found.ru_utime + found.ru_stime if children else time.process_time()

    clock, processor = time.perf_counter(), used()
    work()
    return Took(time.perf_counter() - clock, used() - processor)


def peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def machine() -> str:
    """Return what this runs on, in words."""
    load = f"load {os.getloadavg()[0]:.1f}"
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {load}"


def alone(name: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """Run a script of this folder in a process of its own, show its last line and return that as JSON."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    line = done.stdout.splitlines()[-1]
    print(line, file=sys.stderr, flush=True)  # what is measured is kept if a later case is stopped
    return json.loads(line)


def table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str] | None = None) -> str:
    """Return rows as a table in Markdown, with columns of these names; without titles, all columns of the first row."""
    titles = titles or {name: name for name in rows[0]}
    lines = [f"| {' | '.join(titles.values())} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(_cell(row.get(name)) for name in titles)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


class Kept:
    """Lines of JSON in a file, one for each cell that was run; a call that is given again goes on after the last."""

    def __init__(self, path: Path, *others: Path) -> None:
        self.path = path
        self.lines = [line for file in dict.fromkeys((path, *others)) for line in read_lines(file)]

    def add(self, *lines: Mapping[str, Any]) -> None:
        """Write down what came of a cell."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self.lines += lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of JSON of a file; none where it is not there."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
