"""What an operator of a server sees and does, with real processes: runs one after another, and true causes, soon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federate.test_node_process import Federation, hospitals
from tests.federate.test_process_faults import failures, last_round, wait_until

from steelyard import __version__
from steelyard.federate.certificates import make_key


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    with hospitals(tmp_path_factory.mktemp("operator")) as made:
        yield made


def server_apps(root: Path, command: bytes = b"flwr-serverapp") -> list[int]:
    """Return the server apps of a federation's server: those whose register lies in this folder."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            app = command in (process / "cmdline").read_bytes()
            if app and f"STEELYARD_REGISTER={root}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


LONG = ("--set", "rounds.count=2000", "--set", "rounds.evaluate_every=2000")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_takes_its_server_app_along(tmp_path: Path):
    with hospitals(tmp_path) as made:
        folder = tmp_path / "run"
        submit = made.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", str(folder))
        wait_until(lambda: last_round(folder) >= 1, 240, "no round")
        assert len(server_apps(tmp_path)) == 1
        os.kill(made.server_process.pid, signal.SIGKILL)
        begun = time.monotonic()
        wait_until(lambda: not server_apps(tmp_path), 10, "the server app lives on")
        _, errors = submit.communicate(timeout=15)
        assert time.monotonic() - begun < 10
        assert submit.returncode == 2
        assert "server" in errors.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_go_one_after_another_and_are_seen_and_stopped(federation: Federation):
    root = federation.root
    first = federation.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", "runs/first")
    wait_until(lambda: last_round(root / "runs/first") >= 1, 240, "no round")
    second = federation.start_and_listen(
        "submit", "server", "hospitals.toml", "--set", "rounds.count=2", "--out", "runs/second"
    )
    wait_until(lambda: (root / "server" / "runs" / "2" / "submitted.json").exists(), 60, "not submitted")
    listed = json.loads(federation.steelyard("list", "server", "--format", "json").stdout)
    assert [(run["run"], run["status"]) for run in listed["runs"]] == [(1, "running"), (2, "queued")]
    assert listed["served"]
    nodes = json.loads(federation.steelyard("nodes", "server", "--format", "json").stdout)["nodes"]
    assert [(node["name"], node["status"], node["clock"]) for node in nodes] == [
        ("hospital-a", "connected", 0.0),
        ("hospital-b", "connected", 0.0),
    ]
    assert {node["steelyard"] for node in nodes} == {__version__}
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 130
    assert errors.strip().splitlines()[-1] == (
        "steelyard: run 1 goes on without you; `steelyard federate follow server 1` shows it again, "
        "`steelyard federate stop server 1` stops it"
    )
    assert len(server_apps(root)) == 1
    # A killed server app is noticed at once, with its cause, by whoever follows; the next run begins.
    follow = federation.start_and_listen("follow", "server", "1")
    assert follow.stderr is not None
    assert follow.stderr.readline() == "steelyard: waiting for 2 nodes\n"  # It has started.
    begun = time.monotonic()
    os.kill(server_apps(root)[0], signal.SIGKILL)
    _, errors = follow.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert follow.returncode == 2
    assert "steelyard: the ServerApp was killed; " in errors
    assert "rounds are whole, `steelyard federate submit " in errors
    lines, errors = second.communicate(timeout=240)
    assert second.returncode == 0, lines + errors
    assert "steelyard: run 2 waits for run 1" in lines + errors
    assert last_round(root / "runs/second") == 2
    logged = federation.steelyard("log", "server", "2").stdout
    assert "round 2/2" in logged
    third = federation.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", "runs/third")
    wait_until(lambda: last_round(root / "runs/third") >= 1, 240, "no round")
    stopped = federation.steelyard("stop", "server")
    assert (stopped.returncode, stopped.stdout[:17]) == (0, "run 3 is stopped;")
    _, errors = third.communicate(timeout=60)
    assert third.returncode == 2
    assert "stopped" in errors
    assert federation.steelyard("stop", "server", "3").returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_stood_still_waits_for_its_nodes(tmp_path: Path):
    """SIGSTOP to all of it, as a laptop that is closed for longer than nodes count as connected."""
    with hospitals(tmp_path) as made:
        folder = tmp_path / "run"
        submit = made.start_and_listen(
            "submit", "server", "hospitals.toml", *LONG, "--set", "federate.timeout=15", "--out", str(folder)
        )
        wait_until(lambda: last_round(folder) >= 2, 240, "no round")
        stopped = [made.server_process.pid, *server_apps(tmp_path, b"")]  # And the SuperLink, and its helpers.
        assert len(stopped) >= 4
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(25)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        at = last_round(folder)
        wait_until(lambda: last_round(folder) >= at + 3 or submit.poll() is not None, 120, "it hangs")
        assert submit.poll() is None, submit.communicate()
        assert (made.steelyard("stop", "server").returncode, submit.wait(60)) == (0, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_by_itself_when_its_server_serves_again_and_a_new_key_joins_it(tmp_path: Path):
    with hospitals(tmp_path) as made:
        folder = tmp_path / "run"
        few = ("--set", "rounds.count=400", "--set", "rounds.evaluate_every=400", "--out", str(folder))
        submit = made.start_and_listen("submit", "server", "hospitals.toml", *few)
        wait_until(lambda: last_round(folder) >= 1, 240, "no round")
        shutil.copy(tmp_path / "hospital-a.npz", tmp_path / "hospital-c.npz")
        make_key(tmp_path / "hospital-c")
        text = (tmp_path / "hospital-a.toml").read_text()
        (tmp_path / "hospital-c.toml").write_text(text.replace("hospital-a", "hospital-c"))
        assert made.steelyard("register", "server", "hospital-c.pub", "--client", "hospital-c").returncode == 0
        made.node("hospital-c")
        wait_until(lambda: None in failures(folder, "hospital-c").values(), 120, "the newcomer is shut out")
        os.kill(made.server_process.pid, signal.SIGKILL)
        wait_until(lambda: not server_apps(tmp_path), 15, "the server app lives on")
        _, errors = submit.communicate(timeout=30)
        assert "steelyard: the server is gone; the run goes on when it serves again, `" in errors
        at = last_round(folder)
        made.start("again", "serve", "server", "--tls", "tls", "--listen", f"127.0.0.1:{made.port}")
        wait_until(lambda: last_round(folder) > at, 200, "it did not go on")
        assert made.steelyard("stop", "server").returncode == 0
