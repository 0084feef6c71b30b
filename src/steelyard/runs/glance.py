"""A quick look at runs: state, progress, accuracy, age and size, without pandas, torch or code of the experiment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypedDict, cast

from steelyard.base.errors import UserError
from steelyard.base.files import DATABASE
from steelyard.runs.database import NEWEST, Reader, Unreadable, reading
from steelyard.runs.facts import closing_problem

State = Literal["running", "finished", "stopped", "killed", "unknown", "unreadable"]
DEPTH = 4
"""Folders within folders that are searched for runs."""
_TESTED = "WHERE federation = ? AND accuracy IS NOT NULL ORDER BY round DESC LIMIT 1"
_ALL_TESTED = "WHERE accuracy IS NOT NULL ORDER BY federation, round"


class RuleDocument(TypedDict):
    """One rule with one seed, for programs."""

    rule: str
    seed: int
    round: int
    accuracy: float | None
    ended: str


class RunDocument(TypedDict):
    """A run as `steelyard ls --format json` and the page's list show it."""

    name: str
    state: str
    round: int
    rounds: int | None
    measure: str
    accuracy: float | None
    rules: list[RuleDocument]
    changed: float
    bytes: int
    problem: str
    ended: str
    flower: bool


@dataclass(frozen=True)
class RuleGlance:
    """One rule with one seed: how far it is and how well it does."""

    rule: str
    seed: int
    round: int
    accuracy: float | None
    """Of the last round that was tested."""
    ended: str = ""
    """In which round it ended because its model exploded, and why; empty where it did not."""


@dataclass(frozen=True)
class Glance:
    """What one look at a run folder shows."""

    name: str
    """The folder, relative to where the search began."""
    folder: Path
    state: State
    round: int
    rounds: int | None
    """Rounds that the run will have; None where it has not said so yet."""
    measure: str
    """What its accuracy is: accuracy, minus RMSE, or a ranking metric."""
    rules: tuple[RuleGlance, ...]
    changed: float
    """When it was last written, in seconds since 1970."""
    bytes: int
    writer: Writer | None
    problem: str = ""
    """Why it cannot be read or, of a finished run, how it differs from the record that closes it."""
    flower: bool = False
    """Whether its clients are across nodes, so that one process does not make up the run."""

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the main rule, with the first seed."""
        return self.rules[0].accuracy if self.rules else None

    @property
    def ended(self) -> str:
        """One line on the rules that ended because their model exploded: the first of them, and how many more."""
        found = [rule for rule in self.rules if rule.ended]
        if not found:
            return ""
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{found[0].rule}, seed {found[0].seed}, {found[0].ended}{more}"

    def document(self) -> RunDocument:
        """Return it for programs."""
        rules = [asdict(rule) for rule in self.rules]
        return cast(
            "RunDocument", {name: getattr(self, name) for name in RunDocument.__annotations__} | {"rules": rules}
        )


def find_runs(root: Path) -> list[str]:
    """Return the names of all runs under a folder ("." for the folder itself), newest first.

    Links are not followed, so nothing outside the folder is ever found.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; allowed: a folder with runs in it")
    found: list[tuple[float, str]] = []
    for path, inner, _ in os.walk(root):
        folder = Path(path)
        name, run = folder.relative_to(root), _is_run(folder)
        found += [(_changed(folder), name.as_posix())] if run else []
        inner[:] = [] if run or len(name.parts) == DEPTH else [each for each in inner if not each.startswith(".")]
    return [name for _, name in sorted(found, reverse=True)]


def _is_run(folder: Path) -> bool:
    path = folder / DATABASE
    return path.is_file() and not any(linked.is_symlink() for linked in _files(folder))


def _files(folder: Path) -> list[Path]:
    return [folder / (DATABASE + ending) for ending in ("", "-wal", "-shm", "-journal")]


def run_folder(root: Path, name: str) -> Path:
    """Return the folder of a run by its name under `root`; whatever would lead outside is no run.

    Use it for every name that comes from elsewhere: "..", absolute paths and links are refused alike.
    """
    parts = PurePosixPath(name).parts
    plain = name == "." or (parts and not any(part in ("..", "/", "") or "\\" in part for part in parts))
    folder = root
    if plain and "\0" not in name and len(name) < 1000:
        for part in parts:
            folder = folder / part
            if folder.is_symlink():
                break
        else:
            if folder.is_dir() and _is_run(folder) and folder.resolve().is_relative_to(root.resolve()):
                return folder
    raise UserError(f"{name[:200]}: no run of this name in {root}; allowed: one that `steelyard ls` lists")


def _changed(folder: Path) -> float:
    times = [path.stat().st_mtime for path in _files(folder)[:2] if path.is_file()]
    return max(times, default=0.0)


def signature(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return what differs after every commit of the writer; two equal ones mean that nothing needs to be read."""
    found: list[tuple[int, int]] = []
    for path in _files(folder)[:2]:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def size_of(folder: Path) -> int:
    """Return the bytes of a run's files; links count nothing."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(path, file)).st_size
            except OSError:
                continue
    return total


def glance(root: Path, name: str) -> Glance:
    """Look at one run; one that cannot be read is marked so, with the reason, so that a list is never stopped."""
    folder = run_folder(root, name)
    size, changed = size_of(folder), _changed(folder)
    try:
        with reading(folder) as connection:
            facts = connection.facts()
            rules = _rules(connection)
            changed_since = closing_problem(connection) if facts.status == "finished" else ""
    except UserError as error:
        said = why_unreadable(name, error)
        return Glance(name, folder, "unreadable", 0, None, "accuracy", (), changed, size, None, said)
    writer = read_writer(facts.writer)
    reached = max((rule.round for rule in rules), default=0)
    state = _state(facts.status, writer)
    return Glance(
        name=name,
        folder=folder,
        state=state,
        round=reached,
        rounds=facts.rounds,
        measure=facts.measure,
        rules=rules,
        changed=changed,
        bytes=size,
        writer=writer,
        problem=f"{name}: MODIFIED since it was written: {changed_since}" if changed_since else "",
        flower=facts.clients in ("flower", "recorded"),
    )


def why_unreadable(name: str, error: UserError) -> str:
    """Return the one line that stands for a bad run in every list."""
    return f"{name}: cannot be read: {error.why if isinstance(error, Unreadable) else error}"


def _rules(connection: Reader) -> tuple[RuleGlance, ...]:
    found: list[RuleGlance] = []
    federations = connection.federations()
    ended = {key: (round, why) for key, round, why in connection.rows("ended", ("federation", "round", "reason"))}
    for key, (rule, seed) in federations.items():
        last = connection.rows("rounds", ("round",), NEWEST, key)
        tested = connection.rows("rounds", ("accuracy",), _TESTED, key)
        said = f"ended in round {ended[key][0]}: {ended[key][1]}" if key in ended else ""
        found.append(RuleGlance(rule, seed, last[0][0] if last else 0, tested[0][0] if tested else None, said))
    return tuple(found)


def _state(status: str, writer: Writer | None) -> State:
    if status in ("finished", "stopped"):
        return "finished" if status == "finished" else "stopped"
    if writer is None or not writer.here:
        return "unknown"
    return "running" if writer.alive else "killed"


class Glances:
    """The runs under a folder at a glance; one is read again when its database was written or its process ended."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        self._known: dict[str, tuple[object, Glance]] = {}

    def look(self, most: int | None = None) -> list[Glance]:
        """Return the newest runs, at most so many; `count` is how many there are."""
        names = find_runs(self.root)
        self.count = len(names)
        found: list[Glance] = []
        for name in names[:most]:
            with suppress(UserError):  # removed while we looked
                found.append(self._one(name))
        self._known = {run.name: self._known[run.name] for run in found}
        return found

    def _one(self, name: str) -> Glance:
        known = self._known.get(name)
        if known is not None and known[0] == self._mark(known[1]):
            return known[1]
        run = glance(self.root, name)
        self._known[name] = (self._mark(run), run)
        return run

    def _mark(self, run: Glance) -> object:
        return signature(self.root / run.name), run.writer is not None and run.writer.alive


def accuracies(folder: Path) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Return (round, accuracy) of the tested rounds, per rule and seed; what small curves are drawn from."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    with reading(folder) as connection:
        for who, round, accuracy in connection.by_federation("rounds", ("round", "accuracy"), _ALL_TESTED):
            if accuracy is not None:  # one that is not finite
                found.setdefault(who, []).append((round, accuracy))
    return found


@dataclass(frozen=True)
class Writer:
    """A process by what no later one shares with it: ids are used again, so the time of its start belongs to it."""

    host: str
    pid: int
    started: str

    def text(self) -> str:
        """Return it as JSON, as the store keeps it."""
        return json.dumps(asdict(self))

    @property
    def here(self) -> bool:
        """Whether it ran on this machine, so that `alive` can tell."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether this very process still runs, on this machine."""
        return self.here and started(self.pid) == self.started


def this_process() -> Writer:
    """Return the process that asks; the store notes it when a run starts or goes on."""
    return Writer(socket.gethostname(), os.getpid(), started(os.getpid()))


def read_writer(text: str | None) -> Writer | None:
    """Read what the store kept; None where nothing usable was kept."""
    try:
        found = json.loads(text or "")
        return Writer(str(found["host"]), int(found["pid"]), str(found["started"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def started(pid: int) -> str:
    """Return when a process started, in words that differ between boots of the machine; "" when there is none."""
    if pid <= 0:
        return ""
    if Path("/proc/self/stat").exists():
        try:
            # The name of the command, in brackets, may hold anything; what follows it is numbers.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""
        # Field 3 is the state: a zombie has ended, only its parent has not looked yet. Field 22 is the start.
        return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()
