"""Running and resuming an experiment with a whole federation on this machine; what `steelyard federate local` does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from steelyard.base.errors import Stopped, UserError
from steelyard.base.logs import logger
from steelyard.base.measures import measure_of
from steelyard.clients.node import NodeConfig
from steelyard.experiment.code import Ask
from steelyard.experiment.description import Description
from steelyard.experiment.folders import new_folder
from steelyard.experiment.loading import load, read_experiment
from steelyard.federate.local_federation import LocalFederation, started
from steelyard.federate.local_launch import FOLDER, Launch, read_launch
from steelyard.federate.outcomes import is_server_app, rounds_of
from steelyard.rounds.progress import show_progress, weighed_one
from steelyard.runs.database import reading
from steelyard.runs.history import History
from steelyard.runs.store import exists

MOST_NODES = 256


def run_local(
    experiment: Description, *, nodes: int, tls: bool = False, out: Path | None = None, progress: bool = False
) -> Path:
    """Run an experiment on a federation of this machine into a new run folder; what `steelyard federate local` does."""
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(f"--nodes: got {nodes}; allowed: 1 to {MOST_NODES}, each a process on this machine")
    experiment = experiment.changed({"federate.nodes": nodes})
    # Data that is missing or too few clients show here, before anything runs.
    experiment.on_node(NodeConfig(part=(0, nodes)))
    folder = new_folder(experiment, out)
    return _run(folder, experiment, Launch(nodes, tls), progress=progress)


def resume_local(folder: Path, *, progress: bool = False, ask: Ask | None = None) -> Path:
    """Go on with a run of a federation on this machine, from its last whole round, with the nodes started anew."""
    launch = read_launch(folder)
    if launch is None:
        raise UserError(f"{folder}: not a run of `steelyard federate local`")
    begun = exists(folder)
    if begun and History(folder).info.get("status") == "finished":
        return folder
    # Where it was killed before the first model was tested, there is nothing to go on from: it starts.
    experiment = read_experiment(folder) if begun else load(folder / FOLDER / "app" / "experiment.toml")
    if ask is not None and (code := experiment.named_code()):
        ask(str(folder), code)
    return _run(folder, experiment, launch, progress=progress, resume=begun)


def _run(
    folder: Path, experiment: Description, launch: Launch, *, progress: bool = False, resume: bool = False
) -> Path:
    try:
        with started(folder, experiment, launch, resume=resume) as federation:
            federation.submit()
            percent = measure_of(experiment.score_name).percent
            follow(federation, experiment.resolved().rounds.count, progress=progress, percent=percent)
    except KeyboardInterrupt as stop:
        raise Stopped(folder) from stop
    return folder


_log = logger(__name__)

_LOOK_SECONDS = 0.25
_BEGIN_SECONDS = 120.0


def follow(federation: LocalFederation, rounds: int, *, progress: bool = False, percent: bool = True) -> None:
    """Wait for the end of a run that was submitted; raises with one clear line unless the run finished.

    `progress` shows its scores, in per cent unless they are others than accuracies.
    """
    begun = time.monotonic()
    shown, warned = -1, False
    with show_progress(rounds, percent) if progress else nullcontext(None) as report:
        while True:
            time.sleep(_LOOK_SECONDS)
            federation.reap()
            outcome = federation.outcome()
            if report is not None:
                at, accuracies = rounds_of(federation.folder)
                if at > shown:
                    shown = at
                    report(at, accuracies)
                    warned = warned or _warn(federation.folder)
            if outcome.get("status") == "finished":
                return
            if outcome.get("status") == "stopped":
                line = str(outcome.get("line"))
                raise UserError(line if "`steelyard resume" in line else f"{line}{_advice(federation.folder)}")
            _refuse_dead(federation, outcome, time.monotonic() - begun)


def _refuse_dead(federation: LocalFederation, outcome: Mapping[str, Any], seconds: float) -> None:
    all_nodes = [] if any(node.code is None for node in federation.nodes) else federation.nodes[:1]
    for process in (federation.superlink, *all_nodes):
        if process is not None and process.code is not None:
            raise UserError(
                f"the {process.name} ended (code {process.code}, log {process.log}){_advice(federation.folder)}"
            )
    pid = outcome.get("pid")
    if isinstance(pid, int) and not is_server_app(pid) and federation.outcome().get("status") == "running":
        raise UserError(f"the ServerApp was killed{_advice(federation.folder)}")
    if pid is None and seconds > _BEGIN_SECONDS:
        raise UserError(f"the ServerApp did not start within {_BEGIN_SECONDS:g} s; logs: {federation.home / 'logs'}")


def _advice(folder: Path) -> str:
    at, _ = rounds_of(folder)
    return f"; {max(at, 0)} rounds are whole, `steelyard resume {folder}` goes on from there"


def _warn(folder: Path) -> bool:
    """Say where a round weighed one client: the server's own line on it stands in its log."""
    query = (
        "SELECT f.name, r.round FROM rounds r JOIN federations f ON f.id = r.federation "
        "WHERE r.round > 0 AND r.answered = 1 AND r.kept_old = 0 ORDER BY r.round LIMIT 1"
    )
    with reading(folder) as connection:
        found = connection.execute(query).fetchone()
    if found is not None:
        _log.warning(weighed_one(*found))
    return found is not None
