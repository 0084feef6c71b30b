"""A federation on this machine: a server of its own for the time of one run, and its nodes; none is left afterwards."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from steelyard.base import files
from steelyard.base.errors import Stopped, UserError
from steelyard.base.logs import logger
from steelyard.base.measures import measure_of
from steelyard.clients.flower.calls import CallError
from steelyard.clients.flower.register import Entry, enter
from steelyard.clients.node import EVERYTHING, NodeConfig
from steelyard.experiment.description import Description
from steelyard.experiment.loading import Ask, load, new_folder, read_experiment
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.queue import (
    Launch,
    LocalServer,
    ServerRun,
    enqueue,
    is_server_app,
    read_launch,
    rounds_of,
    until_it_ends,
)
from steelyard.federate.server import Registrar, RunQueue, SuperLink, superlink
from steelyard.federate.workers import Process, environment
from steelyard.proof.signing import read_public_key
from steelyard.rounds.progress import show_progress, weighed_one
from steelyard.runs.database import exists, reading
from steelyard.runs.history import History

_log = logger(__name__)

_MOST_CLIENTS = 10_000
_LOOK_SECONDS = 0.1
_REPORT_SECONDS = 10.0
"""How long a server app that has ended its run may still report that to the SuperLink."""
REMADE = ("runs", ".flwr")
"""Folders of a federation's home that are made anew at every start."""


class LocalFederation:
    """A federation that runs: `submit` its run and `follow` it; `started` starts one, and ends every process of it."""

    def __init__(self, folder: Path, experiment: Description, launch: Launch, link: SuperLink, *, resume: bool) -> None:
        self.folder, self.experiment, self.launch, self.link = folder, experiment, launch, link
        self.home = LocalServer(folder)
        self._resume = resume
        self._queue = RunQueue(self.home, link.control, quiet=True)

    def start(self) -> None:
        """Start the nodes, and the SuperLink as far as it has not."""
        if not self.launch.tls:  # They load while the SuperLink starts, and wait for it.
            self._start_nodes()
        self.link.wait()
        if self.launch.tls:
            Registrar(self.link.control, self.home.register, quiet=True).look()
            self._start_nodes()

    def _start_nodes(self) -> None:
        authority, everyone = self.link.authority, range(self.launch.nodes)
        document = {
            "servers": [
                {
                    "address": self.link.address,
                    "authority": None if authority is None else str(authority),
                    "key": str(_key(self.home, number)) if self.launch.tls else None,
                }
                for number in everyone
            ],
            "configs": [self._node_config(number) for number in everyone],
            "experiment": experiment_text(self.experiment),
        }
        spec = self.home.folder / "nodes.json"
        files.write(spec, json.dumps(document).encode())
        command = [sys.executable, "-m", "steelyard.federate.node", str(spec)]
        env, log = environment(self.home.flower, OMP_NUM_THREADS="1"), self.home.folder / "nodes.log"
        self.link.beside.append(Process("nodes", command, env, log, Path.cwd()))

    def _node_config(self, number: int) -> dict[str, Any]:
        """Return the configuration of a node: its share of the clients, and a folder for what they keep."""
        state = self.home.folder / "private" / f"node-{number:03d}"
        # Everything here is one user's own: the nodes run and read what the experiment names.
        share: dict[str, Any] = {"partition-id": number, "num-partitions": self.launch.nodes}
        if self.launch.tls:
            share |= {"key": str(_key(self.home, number))}
        return {**share, "state": str(state), "allow": EVERYTHING}

    def submit(self) -> ServerRun:
        """Put the run into the queue, and let it begin."""
        run = enqueue(self.home, self.experiment, self.folder, resume=self._resume)
        self._queue.look()
        return run

    def follow(self, run: ServerRun, *, progress: bool = False) -> None:
        """Wait for the end of the run; raises with one clear line unless it finished. `progress` shows its scores."""
        percent = measure_of(self.experiment.score_name).percent
        rounds = self.experiment.resolved().rounds.count
        with show_progress(rounds, percent) if progress else nullcontext(None) as report:
            shown, warned = -1, False

            def show() -> None:
                nonlocal shown, warned
                at, accuracies = rounds_of(self.folder) if report else (-1, {})
                if report and at > shown:
                    shown = at
                    report(at, accuracies)
                    warned = warned or _warn(self.folder)

            def look() -> None:
                for process in (self.link.process, *self.link.beside):
                    if process.code is not None:
                        words = f"the {process.name} ended (code {process.code}, log {process.log})"
                        raise UserError(f"{words}; {run.advice()}")
                with suppress(CallError):  # A SuperLink that is gone is named above, the next time.
                    self._queue.look()

            try:
                until_it_ends(run, show, look)
            finally:
                if not run.is_open:
                    self._dismiss(run)

    def _dismiss(self, run: ServerRun) -> None:
        """Let the nodes leave, and meanwhile the server app report to the SuperLink how its run went."""
        for process in self.link.beside:
            process.terminate()
        deadline, pid = time.monotonic() + _REPORT_SECONDS, run.outcome.get("pid")
        while isinstance(pid, int) and is_server_app(pid) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def _key(home: LocalServer, number: int) -> Path:
    return home.tls / f"node-{number:03d}"


def _prepare(home: LocalServer, launch: Launch, folder: Path) -> None:
    """Make what a start needs; other accounts of the machine are kept out of it."""
    files.refuse_links(home.folder, (*REMADE, "tls"))
    for old in REMADE:
        shutil.rmtree(home.folder / old, ignore_errors=True)
    home.make()
    if launch.tls and not home.tls.exists():
        make_certificates(home.tls, ["127.0.0.1", "localhost"])
        for number in range(launch.nodes):
            _, public = make_key(_key(home, number))
            enter(home.register, Entry(public.stem, read_public_key(public), most=_MOST_CLIENTS))
    launch.write(folder)


@contextmanager
def started(
    folder: Path, experiment: Description, launch: Launch, *, resume: bool = False
) -> Generator[LocalFederation]:
    """Start a federation on loopback, whose server is a part of the run's folder; no process of it is left afterwards.

    With TLS, a certificate is made for 127.0.0.1 and every node's key is registered; a node without a registered key is
    refused by the SuperLink. Being asked to end (SIGTERM) ends it as orderly as an interrupt does.
    """
    folder = folder.resolve()
    home = LocalServer(folder)
    _prepare(home, launch, folder)
    with home.held(), superlink(home, home.tls if launch.tls else None, OMP_NUM_THREADS="1") as link:
        federation = LocalFederation(folder, experiment, launch, link, resume=resume)
        federation.start()
        yield federation


MOST_NODES = 256


def run_local(
    experiment: Description, *, nodes: int, tls: bool = False, out: Path | None = None, progress: bool = False
) -> Path:
    """Run an experiment on a federation of this machine into a new run folder; what `steelyard federate local` does."""
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(f"--nodes: got {nodes}; allowed: 1 to {MOST_NODES}, each a process on this machine")
    experiment = experiment.changed({"federate.nodes": nodes})
    # Data that is missing or too few clients show here, before anything runs.
    experiment.on_node(NodeConfig.read({"partition-id": 0, "num-partitions": nodes}))
    folder = new_folder(experiment, out)
    return _run(folder, experiment, Launch(nodes, tls), progress=progress)


def resume_local(folder: Path, *, progress: bool = False, ask: Ask | None = None) -> Path:
    """Go on with a run of a federation on this machine, from its last whole round, with the nodes started anew."""
    launch = read_launch(folder)
    if launch is None:
        raise UserError(f"{folder}: not a run of `steelyard federate local`")
    begun = exists(folder)
    if begun and History(folder).facts.status == "finished":
        return folder
    # Where it was killed before the first model was tested, there is nothing to go on from: it starts.
    experiment = read_experiment(folder) if begun else load(LocalServer(folder).app / "experiment.toml")
    if ask is not None and (code := experiment.named_code()):
        ask(str(folder), code)
    return _run(folder, experiment, launch, progress=progress, resume=begun)


def _run(
    folder: Path, experiment: Description, launch: Launch, *, progress: bool = False, resume: bool = False
) -> Path:
    try:
        with started(folder, experiment, launch, resume=resume) as federation:
            federation.follow(federation.submit(), progress=progress)
    except KeyboardInterrupt as stop:
        raise Stopped(folder) from stop
    return folder


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
