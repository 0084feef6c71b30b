"""Real federations on loopback, as processes: TLS, a kill and what follows it; slow: hidden sums, what goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kit import wait_until
from tests.runs.contents import models

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from tests.clients.flower.test_internals import SOURCES
from tests.federate.accounts import as_nobody, post
from tests.federate.real_federation import (
    experiment,
    fill,
    last_round,
    left_running,
    written,
)
from tests.federate.small_experiment import assert_same_weights

from steelyard.base.errors import UserError
from steelyard.experiment.running import run
from steelyard.federate import book, node
from steelyard.federate.book import receipts_of
from steelyard.federate.certificates import make_key
from steelyard.federate.local import LocalFederation, resume_local, started
from steelyard.federate.queue import Launch
from steelyard.report.verification import Keys, verify
from steelyard.runs.history import History

ENV = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "FLWR_TELEMETRY_ENABLED": "0"}
HIDDEN = {"weighing": {"criteria": ["DS", "LD"], "priority": "LD>DS"}, "privacy": {"aggregation": {"kind": "secure"}}}


def public_keys(folder: Path, copies: Path) -> Path:
    """Copy the public keys of a federation on this machine, as its operator hands them out."""
    copies.mkdir()
    for file in (folder / "flower" / "tls").glob("*.pub"):
        shutil.copy(file, copies / ("server.pub" if file.stem == "server-head" else file.name))
    return copies


def states_of(folder: Path) -> list[Path]:
    return sorted((folder / "flower" / "private").iterdir())


def assert_closed_to_others(federation: LocalFederation) -> None:
    """Hold that another account of this machine reaches nothing; only root can try."""
    if os.geteuid() != 0:
        return
    authority, port = ssl.create_default_context(cafile=federation.link.authority), federation.link.port
    asked = ListRunsRequest().SerializeToString()
    assert " 200" in post(port, "/v1/control/list-runs", asked, authority)  # We ourselves are let in.
    for path, body in (
        ("/v1/control/list-runs", asked),
        ("/v1/control/start-run", StartRunRequest().SerializeToString()),
        ("/v1/fleet/register-node", b""),
    ):
        assert as_nobody(lambda path=path, body=body: post(port, path, body, authority)) == ""
    assert federation.home.folder.stat().st_mode & 0o077 == 0


def assert_strangers_stay_out(federation: LocalFederation, folder: Path) -> None:
    """Hold that neither a node whose key nobody registered nor another account of this machine comes in."""
    stranger = node.Server(federation.link.address, federation.link.authority, make_key(folder / "stranger")[0])
    with pytest.raises(UserError, match="the server refuses this node"):
        node.NodeLink(stranger, None, 0, threading.Event()).run()  # type: ignore[arg-type]
    assert_closed_to_others(federation)


@pytest.mark.slow
def test_two_nodes_with_tls_equal_the_simulation_and_sign_and_are_absent_at_times(tmp_path: Path) -> None:
    # One of four clients a round: in each round one of the nodes is absent, and only the last is evaluated.
    described = experiment(2, partition={"clients": 4}, rounds={"count": 3, "fraction": 0.01, "evaluate_every": 3})
    run(described, out=tmp_path / "simulated")
    folder = tmp_path / "federated"
    with started(folder, described, Launch(2, tls=True)) as federation:
        federation.follow(federation.submit())
    assert left_running(folder) == []
    assert_same_weights(tmp_path / "simulated", folder)
    here, there = History(tmp_path / "simulated"), History(folder)
    assert here.clients["client"].tolist() == there.clients["client"].tolist()
    assert there.clients["failure"].isna().all()
    np.testing.assert_allclose(here.evaluations["score"], there.evaluations["score"], atol=1e-9)
    assert (there.info["status"], there.info["nodes"]) == ("finished", "2")  # The stranger is not among them.
    # What nodes sign holds by their keys alone, and their own files show what they did, without the server.
    keys = public_keys(folder, tmp_path / "keys")
    assert verify(folder, keys).code == 0
    states = [shutil.copytree(state, tmp_path / state.name) for state in states_of(folder)]
    shutil.rmtree(folder)
    shown = [answer for state in states for answer in receipts_of(state, Keys.read(keys))]
    took = {(answer.place[2], *answer.clients) for answer in shown if answer.outcome == "took part"}
    assert took == set(there.clients[["round", "client"]].itertuples(index=False, name=None))
    assert [answer.outcome for answer in shown].count("absent") == 3


@pytest.mark.timeout(900)  # eight processes in turn: minutes on a machine with other work
def test_scaffold_and_feddyn_with_a_superlink_that_is_killed_and_resumed_equal_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stranger could be a node that was killed a moment ago, so it tries for a while; here once.
    monkeypatch.setattr(node, "_FORGOTTEN_SECONDS", 0.0)
    described = experiment(
        2,
        weighing={"criteria": ["DS"], "priority": "DS"},
        algorithm={"name": "scaffold"},
        beside={"feddyn": {"criteria": ["DS"], "algorithm": {"name": "feddyn"}}},
        training={"momentum": 0.5, "schedule": {"kind": "cosine"}},
        rounds={"count": 4, "fraction": 0.6, "evaluate_every": 4},
        store={"checkpoint_every": 2},
    )
    run(described, out=tmp_path / "simulated")
    folder = tmp_path / "run"
    with started(folder, described, Launch(2, tls=True)) as federation:
        assert_strangers_stay_out(federation, tmp_path)
        submitted = federation.submit()
        wait_until(lambda: last_round(folder) >= 3, 120, "no round")  # One more than the last checkpoint has.
        os.kill(federation.link.process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"the superlink ended \(code -9.*; 3 rounds are whole, `steelyard resume"):
            federation.follow(submitted)
    assert left_running(folder) == []
    resume_local(folder)
    assert left_running(folder) == []
    assert_same_weights(tmp_path / "simulated", folder)
    history = History(folder)
    assert history.clients["failure"].isna().all()
    assert history.info["federation_notes"] == ""  # Nodes that were started anew have what their clients kept.
    found = verify(folder, public_keys(folder, tmp_path / "keys"))
    assert (found.code, found.round) == (0, 4), found.lines()
    for state in states_of(folder):
        said = book.read_receipts(state)
        assert (state / book.RECEIPTS).read_bytes().count(b"\n") > len(said)  # A round is repeated, with one statement.
        for name in {one.federation for one in said}:
            mine = sorted((one for one in said if one.federation == name), key=lambda one: one.round)
            assert [one.before for one in mine[1:]] == [one.statement.digest() for one in mine[:-1]]


@pytest.mark.slow
def test_hidden_updates_of_two_nodes_give_the_model_of_a_simulation_in_the_open(tmp_path: Path) -> None:
    rounds = {"count": 2, "fraction": 1.0, "evaluate_every": 2}
    run(experiment(2, rounds=rounds, weighing=HIDDEN["weighing"]), out=tmp_path / "open")
    folder = tmp_path / "hidden"
    with started(folder, experiment(2, rounds=rounds, **HIDDEN), Launch(2)) as federation:
        submitted = federation.submit()
        federation.follow(submitted)
    assert "ERROR" not in submitted.log.read_text(encoding="utf-8")  # The server was there for its last report.
    assert_same_weights(tmp_path / "open", folder)
    history = History(folder)
    assert history.clients["failure"].isna().all()


def steelyard(
    *arguments: str, python: str = sys.executable, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "steelyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, cwd=cwd, timeout=600)


def begun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "steelyard", "federate", "local", *arguments, "--nodes", "2"]
    return subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_stops_it_nothing_is_left_running(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    process = begun(written(tmp_path), "--out", str(folder))
    wait_until(lambda: last_round(folder) >= 0, 120, "no round")
    process.send_signal(number)
    process.communicate(timeout=60)
    wait_until(lambda: not left_running(folder), 20, "something is left running")
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A disk of 24 MB of its own; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_run_goes_on_to_the_same_bits(tmp_path: Path, small_disk: Path) -> None:
    file, folder = written(tmp_path, rounds={"count": 12, "fraction": 1.0}), small_disk / "run"
    whole = steelyard("federate", "local", file, "--nodes", "2", "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    process = begun(file, "--out", str(folder))
    try:
        wait_until(lambda: last_round(folder) >= 3, 240, "no round")
        filler = fill(small_disk)
        _, errors = process.communicate(timeout=120)
    finally:
        process.terminate()  # On a machine too slow for the limits, nothing is left running.
    line = errors.strip().splitlines()[-1]
    assert (process.returncode, "Traceback" in errors) == (2, False), errors
    assert "No space left on device" in line
    assert line.count(f"`steelyard resume {folder}`") == 1
    assert 3 <= last_round(folder) < 12
    filler.unlink()
    resumed = steelyard("resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    one, other = models(tmp_path / "whole"), models(folder)
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
