"""What a run records beside its rounds, and what a resumed run is compared with: experiment, data, code, models."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard import __version__
from steelyard.base import files
from steelyard.base.errors import UserError, brief, first_names, in_words, listed
from steelyard.base.logs import logger
from steelyard.base.marks import DataFile, marked
from steelyard.base.processor import DECIDES, KERNELS, MACHINE, THREADS, TORCH, made_by
from steelyard.base.settings import parse
from steelyard.clients.ranks.group import rank_count
from steelyard.experiment.loading import FOLDER, RUN_FILE, digest, own_text, read_experiment
from steelyard.proof.signing import head_key
from steelyard.rounds.state import Federation, States
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History
from steelyard.runs.store import Store

if TYPE_CHECKING:
    from steelyard.clients.protocol import Server


_log = logger(__name__)

_LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors", "flwr")


def why(error: BaseException) -> str:
    """Return in one line why a run stopped, for its record."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    line = " ".join(str(error).split())[:1000]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def versions() -> dict[str, str]:
    """Return the versions and the processor that a result depends on, for the run's record."""
    found = {"python": sys.version.split()[0], "platform": platform.platform(), "steelyard": __version__}
    return {**{f"version_{name}": value for name, value in {**found, **_libraries()}.items()}, **made_by()}


@cache
def _libraries() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# What a resumed run is compared with.


_SHOWN = 3


def code_files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256, shortened, of each file of code that a run keeps."""
    kept = [name for name in files.names_in(folder / FOLDER) if name.endswith(".py")]
    return {f"{FOLDER}/{name}": digest(folder / FOLDER / name) for name in kept}


def changed_experiment(folder: Path, facts: RunFacts, *, accept: bool) -> list[str]:
    """Return which fields of a run's experiment file are not as the run wrote them; refused unless accepted."""
    path = folder / RUN_FILE
    before = flat_fields(parse(facts.experiment_text or "", "the run's own record of its experiment"))
    now = flat_fields(parse(own_text(path), str(path)))
    ledger = facts.salt is not None or files.is_file(folder / files.LEDGER)
    if ledger and not any(name.startswith(("privacy.central.", "privacy.local.", "privacy.records.")) for name in now):
        raise UserError(
            f"{path}: privacy: missing, but this run keeps a privacy ledger; allowed: the section with which it "
            "began, or a new run"
        )
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = [f"{name}: {_shown(before, name)} when the run began, {_shown(now, name)} now" for name in names]
    code, kept = facts.code_files, code_files_of(folder)
    changes += [
        f"{name}: not as it was when the run began" for name in {**code, **kept} if code.get(name) != kept.get(name)
    ]
    if changes and not accept:
        raise UserError(f"{path}: {first_names(changes, _SHOWN)}; {_allowed(folder)}")
    return changes


def changed_since(folder: Path, facts: RunFacts) -> str | None:
    """Say in one line that a run's experiment file is not the one that it wrote; None where it is, or none was kept."""
    if facts.experiment_text is None:
        return None
    try:
        changes = changed_experiment(folder, facts, accept=True)
    except UserError as error:
        return str(error)
    shown = first_names(changes, _SHOWN)
    return f"{folder / RUN_FILE}: is not as the run wrote it: {shown}" if changes else None


def changed_data(history: History, now: RunFacts, *, accept: bool) -> list[str]:
    """Return which parts of a run's data are not those that it began with; refused unless accepted."""
    changes = [
        f"{part} (seed {seed})"
        for seed, parts in now.data.items()
        for part, value in parts.items()
        if history.facts.data.get(seed, {}).get(part) != value
    ]
    if changes and not accept:
        source = _source(history.folder)
        raise UserError(
            f"{history.folder}: the data are not those that the run began with{source}: {first_names(changes, _SHOWN)} "
            f"differ; {_allowed(history.folder)}"
        )
    return [f"data: {change}" for change in changes]


def accept_experiment(folder: Path) -> None:
    """Take a run's experiment file as it stands for the one that it goes on with; for runs that others carry on."""
    changes = changed_experiment(folder, History(folder).facts, accept=True)
    if changes:
        with closing(Store(folder, signer=head_key())) as store:
            text = own_text(folder / RUN_FILE)
            store.accept(changes, RunFacts(experiment_text=text, code_files=code_files_of(folder)))
            if any(change.startswith("data.") for change in changes):
                store.note(RunFacts(preparations={}))  # Nobody asks the nodes again what their rows go through.


def check_rules(history: History, federations: Sequence[Federation]) -> None:
    """Refuse to go on with other rules or seeds: rounds that some of them lack cannot be made up for."""
    before = set(history.federations["federation"])
    now = {federation.name for federation in federations}
    if before != now:
        raise UserError(
            f"{history.folder}: began with the rules and seeds {listed(sorted(before))}, now {listed(sorted(now))}; "
            "allowed: the same, or a new run"
        )
    for name, settings in zip(history.federations["federation"], history.federations["settings"], strict=True):
        began = list(json.loads(settings).get("criteria", []))
        criteria = next(list(federation.rule.names) for federation in federations if federation.name == name)
        if began != criteria:
            # Columns of numbers stand in the order of the criteria: under other names they would say something else.
            raise UserError(
                f"{history.folder}: {name} began with the criteria {listed(began)}, now {listed(criteria)}; "
                "allowed: the same, or a new run"
            )


def changed_versions(history: History) -> list[str]:
    """Return a line for each thing that decides a run's last bits and is not as when it began."""
    now = {**versions(), "ranks": str(rank_count())}
    names = {
        "version_steelyard": "steelyard",
        TORCH: "torch",
        MACHINE: "the kind of processor",
        KERNELS: "the set of the processor's kernels",
        THREADS: "the number of threads",
        "ranks": "the number of ranks",
    }
    return [
        f"{words} was {before} when the run began, and is {now.get(name)} now: the rounds to come may differ in their "
        "last bits from those of a run left alone"
        for name, words in names.items()
        if (before := history.facts.others.get(name)) is not None and before != now.get(name)
    ]


def also_made_by(history: History) -> RunFacts:
    """Return what a run's record says of its processor, torch and threads once these here have added rounds to it."""
    now, before = versions(), history.facts.others
    changed = [name for name in DECIDES if name in before and now[name] not in before[name].split("; ")]
    return RunFacts(others={name: f"{before[name]}; {now[name]}" for name in changed})


def check_models(states: States, federations: Sequence[Federation], server: Server) -> None:
    """Refuse to go on with a model of another size, where changes were accepted."""
    for federation in federations:
        state = states.get(federation.name)
        size = None if state is None else server.initial(federation.seed).numel()
        if state is not None and state.parameters.numel() != size:
            raise UserError(
                f"{in_words(federation.name)}: the checkpoint holds a model of {state.parameters.numel()} numbers, the "
                f"experiment describes one of {size}; allowed: the same model, or a new run"
            )


def flat_fields(document: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= flat_fields(value, f"{before}{name}.") if isinstance(value, dict) and value else {before + name: value}
    return flat


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return brief(fields[name]) if name in fields else "nothing"


def _source(folder: Path) -> str:
    experiment = read_experiment(folder)
    return next((f" ({field} = {path})" for field, _, path, _ in marked(type(experiment), experiment, DataFile)), "")


def _allowed(folder: Path) -> str:
    return f"allowed: as it was, or `steelyard resume {folder} --accept-changes`"
