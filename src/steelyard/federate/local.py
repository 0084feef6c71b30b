"""Running and resuming an experiment with a whole federation on this machine; what `steelyard federate local` does."""

from __future__ import annotations

from pathlib import Path

from steelyard.clients.node import NodeConfig
from steelyard.errors import Stopped, UserError
from steelyard.experiment.code import Ask
from steelyard.experiment.description import Description
from steelyard.experiment.folders import new_folder
from steelyard.experiment.loading import load, read_experiment
from steelyard.federate.local_federation import started
from steelyard.federate.local_follow import follow
from steelyard.federate.local_launch import FOLDER, Launch, read_launch
from steelyard.measures import measure_of
from steelyard.runs.reader import History
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
