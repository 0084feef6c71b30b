"""A whole federation on this machine: its SuperLink and nodes, none left afterwards, and a run from start to end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from steelyard.base import files
from steelyard.base.errors import Stopped, UserError, ends_as_interrupted
from steelyard.base.logs import logger
from steelyard.base.measures import measure_of
from steelyard.clients.flower.adapter.superlink import SuperLinkControl
from steelyard.clients.flower.register import REGISTER, Entry, enter
from steelyard.clients.node import EVERYTHING, NodeConfig
from steelyard.experiment.description import Description
from steelyard.experiment.loading import load, new_folder, read_experiment
from steelyard.experiment.named_files import Ask
from steelyard.federate.app_folder import CONNECTION, experiment_text, number_of_run, write_app
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.queue import (
    LOCAL_FOLDER,
    Launch,
    forget_outcome,
    is_server_app,
    read_launch,
    read_outcome,
    rounds_of,
)
from steelyard.federate.workers import LAUNCHER, Process, end_all, environment, reserved_port, start_superlink
from steelyard.proof.signing import HEAD_KEY, read_public_key
from steelyard.rounds.progress import show_progress, weighed_one
from steelyard.runs.database import exists, reading
from steelyard.runs.history import History

_START_SECONDS = 90.0
_MOST_CLIENTS = 10_000
REMADE = ("app", "homes")
"""Folders of a federation's home that are made anew at every start."""


class LocalFederation:
    """The processes of one federation on loopback; use it as a context manager and `submit` the run inside.

    The run folder's part `flower` is its home. Other accounts of the machine are kept out of it and of the SuperLink.
    With TLS, a certificate is made for 127.0.0.1 and every node's key is registered; a node without a registered key is
    refused by the SuperLink.
    """

    def __init__(
        self, folder: Path, experiment: Description, launch: Launch, *, resume: bool = False, apart: bool = False
    ) -> None:
        self.folder = folder.resolve()
        self.home = self.folder / LOCAL_FOLDER
        self.experiment = experiment
        self.launch = launch
        self.resume = resume
        self.apart = apart
        self._listener = reserved_port()
        self.port: int = self._listener.getsockname()[1]
        self.superlink: Process | None = None
        self.nodes: list[Process] = []
        """The process of all nodes; where they are kept `apart`, one process each."""

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def authority(self) -> Path | None:
        """The certificate by which the SuperLink is known; None without TLS."""
        return self.home / "tls" / "ca.pem" if self.launch.tls else None

    def env(self, **more: str) -> dict[str, str]:
        """The environment of `flwr` commands that speak to this federation."""
        return environment(self.home / "app" / ".flwr", **more)

    def __enter__(self) -> LocalFederation:
        try:
            self._prepare()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _prepare(self) -> None:
        files.refuse_links(self.home, (*REMADE, "tls"))
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home.chmod(0o700)
        for old in REMADE:
            shutil.rmtree(self.home / old, ignore_errors=True)
        forget_outcome(self.home)
        # Keys outlive a resume: clients belong to the key that they began with.
        if self.launch.tls and not (self.home / "tls").exists():
            make_certificates(self.home / "tls", ["127.0.0.1", "localhost"])
            make_key(self._head_key)
            for number in range(self.launch.nodes):
                _, public = make_key(self._key(number))
                enter(self._register, Entry(public.stem, read_public_key(public), most=_MOST_CLIENTS))
        write_app(
            self.home / "app",
            self.experiment,
            address=self.address,
            authority=self.authority,
            out=self.folder,
            resume=self.resume,
            report=self.home,
            ship=False,
        )
        self.launch.write(self.folder)

    def _start(self) -> None:
        for_app = {LAUNCHER: str(os.getpid())}
        if self.launch.tls:
            for_app |= {REGISTER: str(self._register), HEAD_KEY: str(self._head_key)}
        # Relative paths of the experiment (its data) are meant from where the user stands.
        log = self.home / "logs" / "superlink.log"
        self.superlink = start_superlink(
            self._superlink_options(), self._listener, self._process_env(**for_app), log, Path.cwd()
        )
        everyone = list(range(self.launch.nodes))
        if not self.launch.tls:  # They load while the SuperLink starts, and wait for it.
            self.nodes = self._start_nodes(everyone)
        self.superlink.wait_for_port(self.port, _START_SECONDS)
        if self.launch.tls:
            self._register_keys(everyone)
            self.nodes = self._start_nodes(everyone)

    def _register_keys(self, numbers: list[int]) -> None:
        assert self.authority is not None
        registration = SuperLinkControl(self.address, self.authority.read_bytes())
        for number in numbers:
            public = self._key(number).with_suffix(".pub")
            try:
                registration.register(public.read_text(encoding="ascii"), public.stem)
            except httpx.HTTPError as error:
                raise UserError(f"{public}: the SuperLink does not register this key: {error}") from error

    def _start_nodes(self, numbers: list[int]) -> list[Process]:
        if self.apart:
            return [self.start_nodes([number], f"node-{number:03d}") for number in numbers]
        return [self.start_nodes(numbers, "nodes")]

    def _superlink_options(self) -> list[str]:
        if not self.launch.tls:
            return ["--insecure"]
        tls = self.home / "tls"
        files = [f"--ssl-ca-certfile={tls}/ca.pem", f"--ssl-certfile={tls}/server.pem"]
        return [*files, f"--ssl-keyfile={tls}/server.key", "--enable-supernode-auth"]

    def node_config(self, number: int) -> dict[str, Any]:
        """The configuration of a node: its share of the clients, and a folder for what they keep to themselves."""
        state = self.home / "private" / f"node-{number:03d}"
        # Everything here is one user's own: the nodes run and read what the experiment names.
        share: dict[str, Any] = {"partition-id": number, "num-partitions": self.launch.nodes}
        if self.launch.tls:
            share |= {"key": str(self._key(number))}
        return {**share, "state": str(state), "allow": EVERYTHING}

    def start_nodes(self, numbers: list[int], name: str, *, key: Path | None = None) -> Process:
        """Start a process with some nodes; another key than their own is for tests of what a stranger can do."""
        authority = None if self.authority is None else str(self.authority)
        keys = [str(key or self._key(number)) if self.launch.tls else None for number in numbers]
        document = {
            "servers": [{"address": self.address, "authority": authority, "key": one} for one in keys],
            "configs": [self.node_config(number) for number in numbers],
            "experiment": experiment_text(self.experiment),
        }
        spec = self.home / f"{name}.json"
        files.write(spec, json.dumps(document).encode())
        return self._process(name, [sys.executable, "-m", "steelyard.federate.node", str(spec)])

    @property
    def _register(self) -> Path:
        return self.home / "tls" / "register.json"

    @property
    def _head_key(self) -> Path:
        return self.home / "tls" / "server-head"

    def _key(self, number: int) -> Path:
        return self.home / "tls" / f"node-{number:03d}"

    def _process(self, name: str, command: list[str]) -> Process:
        return Process(name, command, self._process_env(), self.home / "logs" / f"{name}.log", Path.cwd())

    def _process_env(self, **more: str) -> dict[str, str]:
        return self.env(OMP_NUM_THREADS="1", **more)

    def flwr(self, *arguments: str) -> str:
        """Run a `flwr` command against this federation and return what it prints."""
        return self._run(["flwr", *arguments])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.env(), capture_output=True, text=True, timeout=120)
        if done.returncode:
            output = " ".join((done.stderr or done.stdout).split())
            raise UserError(f"{' '.join(command)[:200]}: failed with code {done.returncode}: {output[-400:]}")
        return done.stdout

    def submit(self) -> str:
        """Send the app to the SuperLink; returns Flower's id of the run."""
        output = self.flwr("run", str(self.home / "app"), CONNECTION, "--format", "json")
        return str(number_of_run(output))

    def outcome(self) -> dict[str, Any]:
        """What the ServerApp reports: status "running", "finished" or "stopped"; empty before it started."""
        return read_outcome(self.home)

    def reap(self) -> None:
        """Notice processes that ended; a dead child stays visible to the others until its parent looks."""
        for process in (self.superlink, *self.nodes):
            if process is not None:
                _ = process.code

    def close(self) -> None:
        """End every process of this federation; the nodes first, so that they say goodbye to the SuperLink."""
        self._listener.close()
        left = [*self.nodes, self.superlink]
        end_all([process for process in left if process is not None])


@contextmanager
def started(
    folder: Path, experiment: Description, launch: Launch, *, resume: bool = False, apart: bool = False
) -> Generator[LocalFederation]:
    """Start a federation; being asked to end (SIGTERM) ends it as orderly as an interrupt does."""
    with ends_as_interrupted(), LocalFederation(folder, experiment, launch, resume=resume, apart=apart) as federation:
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
    experiment = read_experiment(folder) if begun else load(folder / LOCAL_FOLDER / "app" / "experiment.toml")
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
