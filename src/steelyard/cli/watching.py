"""`steelyard watch`, `top`, `ls`, `report`, `weigh` and `import`: runs to look at, rules to try, runs from files.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import functools
import math
import select
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from steelyard.base import files
from steelyard.base.errors import UserError, printable, without_controls
from steelyard.base.files import in_bytes
from steelyard.base.measures import measure_of
from steelyard.cli.options import Format, FormatOption
from steelyard.cli.printing import emit, warn_of_changes
from steelyard.page import require_page
from steelyard.report.rendering import Block, Table, as_text, spark
from steelyard.runs.glance import Glance, Glances, accuracies, why_unreadable
from steelyard.runs.history import History
from steelyard.weighing.table import read_words
from steelyard.weighing.table import weigh as weigh_table

if TYPE_CHECKING:
    from steelyard.report.view import Reweighed
    from steelyard.weighing.table import WeighedDocument


MOST = 40
"""Clients in one table."""
LONGEST = 80
"""Names up to this many characters are shown whole."""

FolderArgument = Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder with runs in it, or a run's own folder.")]


def ls(folder: FolderArgument = Path("runs"), format: FormatOption = "text") -> None:
    """List the runs in a folder: state, progress, accuracy, age and size."""
    found = Glances(folder).look()
    if format == "text":
        show_runs(folder, found)
    else:
        emit([glance.document() for glance in found], format, [runs_table(found)])


def top(
    folder: FolderArgument = Path("runs"),
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch runs in the terminal: progress, accuracy, who counts most; q or Ctrl-C leaves."""
    if not math.isfinite(every):
        raise UserError(f"--every: got {every}; allowed: a number of seconds, at least 0.2")
    watch_runs(folder, every=every, once=once)


def watch(
    folder: FolderArgument = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8765,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other machines reach any but loopback.")
    ] = ("127.0.0.1"),
    token: Annotated[
        str | None,
        typer.Option("--token", help="Access token, 16+ characters (default: generated)."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also start and resume experiments that name Python code of their own.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show runs only: nothing is started, stopped or resumed.")
    ] = False,
    server: Annotated[
        Path | None,
        typer.Option("--server", help="Folder of a federation's server: its runs, its queue and its nodes, too."),
    ] = None,
) -> None:
    """Open a page over the runs in a folder, live while they run; Ctrl-C ends it."""
    require_page()
    if not folder.exists() and folder != Path("runs"):
        raise UserError(f"{folder}: no such folder; allowed: a folder of runs, which may be empty")
    from steelyard.page.app import serve

    announce = functools.partial(print, flush=True)
    serve(folder, host=host, port=port, token=token, announce=announce, trust=trust, read_only=read_only, server=server)


# `steelyard report`, `weigh` and `import`.


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folder of a run, several to compare, or of an arena.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "--output", "-o", help="The HTML file (default: report.html in the first run)."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write each figure as SVG, PNG and PDF into this folder.")
    ] = None,
) -> None:
    """Write one HTML file that shows what happened, with no network needed: who counted how much, when and why."""
    from steelyard.report.figures import draw_all, write_figures
    from steelyard.report.html import check_report, write_report
    from steelyard.report.view import RunView
    from steelyard.studies.arena import Arena
    from steelyard.studies.arena_page import write_page

    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError(f"RUNS: got {', '.join(map(str, runs))}; allowed: each run once")
    path = out or runs[0] / files.REPORT
    check_report(path)
    files.is_file(path)  # a link is refused before anything is drawn
    if len(runs) == 1 and Arena.is_in(runs[0]):
        if figures is not None:
            raise UserError(f"--figures: got '{figures}' with an arena; allowed: for a run, as {runs[0]}/scenes/NAME")
        write_page(Arena.read(runs[0]).answer(runs[0]), path)
        print(f"report to open: {printable(str(path))}")
        return
    if figures is not None:
        files.is_folder(figures)
    view = RunView(runs)
    for run in runs:
        warn_of_changes(run)
    write_report(view, path)
    print(f"report to open: {printable(str(path))}")
    if figures is not None:
        made = write_figures(draw_all(view), figures)
        print(f"{len(made)} files of figures in {printable(str(figures))}")


def weigh(
    source: Annotated[
        Path, typer.Argument(help="CSV with a client column and a column per criterion, or the folder of a run.")
    ],
    by: Annotated[
        str,
        typer.Option(
            help='The rule in words, as in `compare --rules`: "VP>LD>DS/max", "owa(DS,LD;most)". Default: all columns.'
        ),
    ] = "",
    normalise: Annotated[
        Literal["share", "max", "rank", "none"] | None,
        typer.Option(
            help="How criteria are brought to 0..1; none: values as they are (CSV). Default: share, or as the run did."
        ),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="For a run: whose updates (default: the main rule's).")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="For a run: which seed (default: the first).")] = None,
    format: FormatOption = "text",
) -> None:
    """Score and weigh clients from a table, or the updates of a run by another rule: no training needed."""
    if source.is_dir():
        if normalise == "none":
            raise UserError("--normalise: got 'none' for a run; allowed: share, max, rank")
        _weigh_run(source, by, normalise, rule, seed, format)
        return
    for name, value in {"rule": rule, "seed": seed}.items():
        if value is not None:
            raise UserError(f"--{name}: given for a table; allowed: only for the folder of a run")
    document = weigh_table(source, by, None if normalise == "none" else normalise or "share").document()
    emit(document, format, weighed_parts(document))


def _weigh_run(
    folder: Path,
    by: str,
    normalise: Literal["share", "max", "rank"] | None,
    rule: str | None,
    seed: int | None,
    format: Format,
) -> None:
    from steelyard.report.view import RunView, federation_with, reweigh

    view = RunView([folder])
    part = federation_with(view, read_words(by, None).criteria if by else (), rule, seed)
    settings = read_words(by, part.criteria)
    if settings.normalise == "share":
        settings = settings.model_copy(update={"normalise": normalise or part.settings.normalise})
    document = reweigh(view, part, settings)
    emit(document, format, reweighed_parts(document))


def import_run(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="CSV with a header, or JSON lines: a row per client and round."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The run's own folder; it must not hold a run yet.")],
    by: Annotated[str | None, typer.Option("--by", help='Rule where the file has no weights: "VP>DS".')] = None,
) -> None:
    """Make a run folder from what another federation wrote down: criteria, weights, reasons and tests by round.

    Give the journals of all sites of a swarm together.
    """
    from steelyard.adapters.importing import import_files

    rounds = import_files(files, out, by)
    print(f"{rounds} rounds stored in {printable(str(out))}")
    print(f"look at them: steelyard report {printable(str(out))}")


def reweighed_parts(document: Reweighed) -> list[Block]:
    """Return who would have counted under another rule, beside what was recorded."""
    rows = tuple(
        (f"{_short(row.client)}{'*' if row.flaws else ''}", f"{row.weight:.2%}", f"{row.recorded:.2%}", str(row.rounds))
        for row in document.clients
    )
    title = f"Weighed again by {_short(document.rule)}: updates of {_short(document.updates_of)}"
    parts: list[Block] = [Table(title, ("client", "share of all weight", "as recorded", "rounds"), rows[:MOST])]
    if len(rows) > MOST:
        parts.append(f"and {len(rows) - MOST} more clients; --format json lists all")
    if found := document.flawed:
        parts.append(f"faulty clients (*): {found.weight:.1%} of all weight, {found.recorded:.1%} as recorded")
    return [*parts, document.note]


def weighed_parts(document: WeighedDocument) -> list[Block]:
    """Return scores and weights as a table."""
    rows = tuple((_short(row["client"]), f"{row['score']:.6f}", f"{row['weight']:.6f}") for row in document["clients"])
    zero = [
        f"{_short(name)} is 0 for every client: everyone got 1/n for it" for name in document["flags"]["zero_criteria"]
    ]
    uniform = ["all scores are 0: the weights are uniform"] if document["flags"]["uniform"] else []
    return [Table("", ("client", "score", "weight"), rows), *zero, *uniform]


def _short(name: str) -> str:
    """A name as a cell; very long ones are cut."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


# Runs in a folder, listed once or followed.


STYLES = {"running": "bold cyan", "finished": "green", "stopped": "yellow", "killed": "red", "unreadable": "red"}
"""How states look; each is also a word, so that nothing hangs on colour."""


def show_runs(folder: Path, found: Sequence[Glance]) -> None:
    """Print the runs of a folder, newest first, as a table that fits the terminal."""
    console = Console()
    if not found:
        console.print(nothing(folder), highlight=False, markup=False, soft_wrap=True)
        return
    text = Text(as_text(runs_table(found), console.width))
    for state, style in STYLES.items():
        text.highlight_regex(rf"(?<= ){state}(?= )", style)
    console.print(text)
    for run in found:
        if run.problem:
            console.print(plain(run.problem), style="red", soft_wrap=True)
        if run.ended:
            console.print(plain(f"{run.name}: {run.ended}"), style="yellow", soft_wrap=True)


def runs_table(found: Sequence[Glance]) -> Table:
    """Return runs as a table, a line each."""
    rows = tuple(
        (
            *(without_controls(run.name, "�"), run.state, f"{run.round}/{'?' if run.rounds is None else run.rounds}"),
            *(score_of(run), age(run.changed), in_bytes(run.bytes)),
        )
        for run in found
    )
    return Table("", ("run", "state", "rounds", "accuracy", "age", "size"), rows, names=2)


def nothing(folder: Path) -> str:
    """Return what to say where there is no run yet, or one whose database is gone."""
    if files.is_file(folder / files.RUN_FILE):
        return f"{folder}: not a run folder: it has {files.RUN_FILE} but no database"
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
        self._glances = Glances(folder)
        self._drawn: dict[str, tuple[Glance, int, list[RenderableType]]] = {}

    def frame(self, width: int, height: int | None = None) -> RenderableType:
        """Return all runs as they are now, running ones first, then the newest."""
        found = sorted(self._glances.look(RUNS), key=lambda run: run.state != "running")
        if not found:
            return Text(nothing(self.folder))
        running = sum(run.state == "running" for run in found)
        count = self._glances.count
        head = Text(f"runs in {self.folder}: {count}, running: {running}", style="bold", overflow="ellipsis")
        blocks: list[RenderableType] = [head]
        lines = 1
        for place, run in enumerate(found):
            lines += 2 + min(len(run.rules), RULES + 1) + 1 + bool(run.ended)
            if height is not None and lines > height - 1 and place:
                blocks.append(Text(f"and {count - place} more: steelyard ls {self.folder}", style="dim"))
                break
            blocks += [Text(""), _head(run), *self._block(run, width)]
        return Group(*blocks)

    def _block(self, run: Glance, width: int) -> list[RenderableType]:
        known = self._drawn.get(run.name)
        if known is None or known[0] is not run or known[1] != width:
            block: list[RenderableType] = []
            try:
                block += _body(run, width)
            except UserError as error:
                block.append(plain(why_unreadable(run.name, error)))
            self._drawn[run.name] = known = (run, width, block)
        return known[2]


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
        drawn = spark(curve, min(curve), max(curve), max(8, width // 4)) if curve else ""
        seed = f", seed {line.seed}" if len({inner.seed for inner in run.rules}) > 1 else ""
        name = plain(line.rule)
        name.truncate(max(12, width // 3 - len(seed)), overflow="ellipsis")
        name.append(seed)
        score = Text("–") if line.accuracy is None else Text(measure_of(run.measure).show(line.accuracy))
        body.add_row(
            Text(" "),
            name,
            score,
            Text(drawn, style="cyan"),
        )
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
