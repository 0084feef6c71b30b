"""Run folders that are damaged and then read: `python -m tests.runs.damaged_folders [CASES] [FIRST]`.

Each case takes a run (at rest, or killed with its log beside it), changes bytes, rows or facts of it by a random number
of its own, and asks everything that looks at runs, and the store that would go on with it. Only a `UserError` of one
line may come out, within seconds. Tables are changed in test_damage.py, and links and pipes put in test_links.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tests.report.made_run import make_run

from steelyard.base.errors import UserError, one_line
from steelyard.cli.printing import show_result
from steelyard.cli.watching import Board, show_runs
from steelyard.experiment.loading import read_experiment
from steelyard.page.app import Listing
from steelyard.page.jobs import Jobs
from steelyard.page.overview import LiveHistory
from steelyard.report.html import contents, embedded
from steelyard.report.rendering import render
from steelyard.report.result import computed
from steelyard.report.tables import comparison_csv, comparison_parts
from steelyard.report.view import RunView
from steelyard.runs.export import export_run
from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import Glances
from steelyard.runs.history import History
from steelyard.runs.schema import SCHEMA
from steelyard.runs.store import Store

SECONDS = 60
"""What one look at a folder may take, on a busy machine too."""
GOOD, BAD = "good", "bad"
"""Folders of a case: a run that nobody touched, and the one that is damaged."""
ODD: tuple[Any, ...] = (
    *(None, "", "abc", "\x1b[31mred", "=1+1", "\t@x", "\x9b2J", "9" * 5000, "[" * 2000, "{", "[]", "{}", "[1]", "null"),
    *('{"a": 1}', '[["DS", 1e999]]', "NaN", '"x"', "é" * 300, "../../x", "/etc/passwd", "a\0b", "round-000001.x"),
    *(0, -1, 1, 2**31, 2**63 - 1, -(2**63), 0.0, -1.5, 1e308, -1e308, float("inf"), 1e-320),
    *(b"", b"\0", b"\0" * 8, b"\xff" * 32, b"\0\0\0\0\0\0\xf0\x7f" * 4, np.array([1e308] * 4).tobytes()),
)


@dataclass
class Problem:
    """What must not happen: which case, at which question, and how."""

    case: int
    question: str
    told: str


class TooLong(BaseException):
    """A question took longer than it may."""


def prepare(root: Path) -> list[Path]:
    """Make the runs that are damaged: one at rest, and one whose writer was killed."""
    rest = make_run(root / "rest", rounds=4, clients=5, seeds=(0, 1), rules=("VP>DS", "online(DS>LD)"))
    live = make_run(root / "live", rounds=3, clients=5, seeds=(0,), rules=("fedavg",), status="stopped")
    store = Store(live)
    store.note(RunFacts(status="running", flaws={"0": {"client-1": ["late"]}}, labels={"0": {"client-1": [3, 4]}}))
    shutil.copytree(live, root / "killed")
    store.close()
    for folder in (rest, root / "killed"):
        (folder / "privacy.jsonl").write_text('{"no": "charge"}\n', encoding="utf-8")
    return [rest, root / "killed"]


def tables() -> dict[str, list[str]]:
    """Return the columns of every table of ours."""
    model = sqlite3.connect(":memory:")
    model.executescript(SCHEMA)
    names = [name for (name,) in model.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {name: [row[1] for row in model.execute(f"PRAGMA table_info({name})")] for name in names}
    model.close()
    return found


TABLES = tables()


def _ask(folder: Path, statement: str, values: tuple[Any, ...]) -> None:
    try:
        with closing(sqlite3.connect(folder / "run.sqlite")) as connection, connection:
            connection.execute(statement, values)
    except (sqlite3.Error, OverflowError, UnicodeDecodeError):
        pass  # what cannot be written so is no case


def change_rows(folder: Path, chance: random.Random) -> None:
    """Put an odd value into a column, of all rows or of one."""
    table = chance.choice(list(TABLES))
    column, value = chance.choice(TABLES[table]), chance.choice(ODD)
    where = "" if chance.random() < 0.5 else f" WHERE rowid % 2 = {chance.randrange(2)}"
    _ask(folder, f"UPDATE OR IGNORE {table} SET {column} = ?{where}", (value,))


def change_facts(folder: Path, chance: random.Random) -> None:
    """Change what the run noted of itself."""
    keys = ["status", "rounds", "seeds", "flaws", "labels", "measured_by", "trust", "privacy", "writer", "schema"]
    keys += ["notes", "measure", "clients", "code_files", "data", "personal", "experiment_text", "salt"]
    key, value = chance.choice(keys), str(chance.choice(ODD))
    _ask(folder, "INSERT OR REPLACE INTO info VALUES (?, ?)", (key, value))


def change_bytes(folder: Path, chance: random.Random) -> None:
    """Change, cut, repeat or fill the bytes of a file, or point its pages at each other."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    path = chance.choice([*files, folder / "run.sqlite", folder / "run.sqlite"])
    content = bytearray(path.read_bytes()[:1_000_000])
    at = chance.randrange(len(content) + 1)
    kind = chance.randrange(5)
    if kind == 0:
        content[at : at + 1] = bytes([chance.randrange(256)])
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        page = at // 4096 * 4096
        content[page : page + 4096] = chance.choice([b"\0", b"\xff", b"\xa5"]) * len(content[page : page + 4096])
    elif kind == 3 and len(content) >= 8192:
        pages = len(content) // 4096
        one, other = chance.randrange(pages) * 4096, chance.randrange(pages) * 4096
        content[one : one + 4096] = content[other : other + 4096]
    elif kind == 4:
        at = at // 4 * 4
        content[at : at + 4] = chance.randrange(1, 40).to_bytes(4, "big")
    path.write_bytes(bytes(content))


CHANGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(change_rows, change_rows, change_rows, change_facts, change_bytes, change_bytes),
)


def questions(root: Path, scratch: Path) -> dict[str, Callable[[], object]]:
    """Return everything that is asked of a folder; the report's page is not put together, its figures are."""
    bad = root / BAD
    console = Console(file=(scratch / "shown").open("w", encoding="utf-8"), width=120)

    def tables_of() -> None:
        document = computed(bad, read_experiment(bad))
        for text in (
            render(comparison_parts(document), "text", 100),
            render(comparison_parts(document), "latex"),
            comparison_csv(document),
        ):
            assert text.replace("\n", "").isprintable(), "a control character"

    def frames() -> None:
        history = History(bad)
        for name in ("info", "flaws", "ended", "chain", "federations", "rounds", "clients", "evaluations", "untested"):
            getattr(history, name)
        for rule, seed in history._keys:
            history.hits(rule, seed)
            history.labels(seed)

    def summary() -> None:
        experiment = read_experiment(bad)
        show_result(computed(bad, experiment))

    def listed() -> None:
        found = {run.name: run for run in Glances(root).look()}
        assert found[GOOD].state != "unreadable", "the run beside it cannot be read"
        assert all("\n" not in run.problem for run in found.values()), "more than one line"
        show_runs(root, list(found.values()))

    def resumed() -> None:
        store = Store(bad)
        try:
            store.resume(accept=True)
            store.sweep()
        finally:
            store.close()

    return {
        "ls": listed,
        "top": lambda: console.print(Board(root).frame(100)),
        "page": lambda: Listing(root, Jobs(root)).runs(),
        "frames": frames,
        "live": lambda: LiveHistory(bad).snapshot(),
        "heaviest": lambda: History(bad).heaviest(),
        "checkpoint": lambda: History(bad).last_checkpoint(),
        "table": tables_of,
        "summary": summary,
        "report": lambda: embedded(contents(RunView([bad]))),
        "export": lambda: export_run(History(bad), "csv", force=True),
        "resume": resumed,
    }


def try_case(case: int, made: list[Path], root: Path, *, drawn: bool = True) -> list[Problem]:
    """Damage a copy of a run and ask everything; `drawn` also makes the figures of a report, which takes longest."""
    chance = random.Random(case)
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(made[0], root / GOOD)
    shutil.copytree(chance.choice(made), root / BAD)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        chance.choice(CHANGES)(root / BAD, chance)
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, ask in questions(root, Path(scratch)).items():
            if name == "report" and not drawn:
                continue
            told = _told(ask)
            if told:
                problems.append(Problem(case, name, told))
    return problems


def _told(ask: Callable[[], object]) -> str:
    """Ask, and return what must not have come out of it."""
    signal.alarm(SECONDS)
    try:
        ask()
    except UserError as error:
        return "" if one_line(str(error)).isprintable() else f"no line to show: {error!r}"
    except TooLong:
        return f"took longer than {SECONDS} s\n{traceback.format_exc(limit=-6)}"
    except Exception:
        return traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
    return ""


def run_cases(count: int, first: int = 0, every: int = 1) -> list[Problem]:
    """Try so many cases; the figures of a report are drawn in each `every`-th."""

    def ring(number: int, frame: object) -> None:
        raise TooLong

    before, output = signal.signal(signal.SIGALRM, ring), sys.stdout
    found: list[Problem] = []
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w", encoding="utf-8") as nothing:
        made = prepare(Path(folder) / "made")
        sys.stdout = nothing
        try:
            for case in range(first, first + count):
                found += try_case(case, made, Path(folder) / "case", drawn=case % every == 0)
        finally:
            sys.stdout = output
            signal.signal(signal.SIGALRM, before)
    return found


def main() -> None:
    """Try the cases that the command line names, and print what must not have happened."""
    count, first = (int(word) for word in (*sys.argv[1:], *("10000", "0")[len(sys.argv) - 1 :]))
    problems = run_cases(count, first, every=10)
    for problem in problems:
        print(f"case {problem.case}, {problem.question}:\n{problem.told}\n")
    print(f"{count} cases, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
