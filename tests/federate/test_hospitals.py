"""Two hospitals behind a server, as real processes: what an operator sees and does, and every fault of a long run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.federate.real_federation import (
    LONG,
    Federation,
    failures,
    fill,
    hospitals,
    last_round,
    server_apps,
    wait_until,
)

from steelyard import __version__
from steelyard.federate.certificates import make_key
from steelyard.runs.reader import History

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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


SERVE = """
import asyncio, sys
from pathlib import Path
from steelyard.federate.serving import serve
from steelyard.federate.superlink_calls import SuperLinkCalls
from steelyard.logs import show

cut, pass_on = Path("cut"), SuperLinkCalls.post

async def cut_off(self, *call):
    while cut.exists():
        if cut.read_text() == "refused":
            raise ConnectionRefusedError("the line is cut")
        await asyncio.sleep(0.1)
    return await pass_on(self, *call)

SuperLinkCalls.post = cut_off
show()
serve(Path(sys.argv[1]), Path("tls"), "127.0.0.1", int(sys.argv[2]))
"""


"""A server whose proxy does not reach its SuperLink while a file is there: it is refused, or hears nothing."""


def test_a_line_cut_between_proxy_and_superlink_costs_no_update(tmp_path: Path):
    """Refused: the proxy answers 503. Silent: calls hang, as where packets are lost."""
    with hospitals(tmp_path, script=SERVE) as made:
        folder, cut = tmp_path / "run", tmp_path / "cut"
        submit = made.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", str(folder))
        try:
            wait_until(lambda: last_round(folder) >= 2, 240, "no round")
            for how in ("refused", "silent"):
                cut.with_suffix(".new").write_text(how)
                cut.with_suffix(".new").rename(cut)
                time.sleep(8)  # Flower takes a node for gone after 20 s without a word of it.
                at = last_round(folder)
                cut.unlink()
                wait_until(lambda at=at: last_round(folder) >= at + 3, 90, f"{how}: it hangs")
            assert submit.poll() is None
        finally:
            submit.kill()
            submit.communicate()
        for hospital in ("hospital-a", "hospital-b"):
            assert set(failures(folder, hospital).values()) == {None}
            said = (tmp_path / f"{hospital}.log").read_text()
            assert "the server answers 503; trying again" in said, said
            assert "was not answered" not in said


NETWORK = """
import os, time
from pathlib import Path
from torch import nn

def misbehave(where):
    file = Path(os.environ.get("FAULT", "none"))
    said = file.read_text() if file.exists() else ""
    if said == f"hang in {where}":
        time.sleep(600)
    if said == f"die in {where}":
        os._exit(9)

class Net(nn.Linear):
    def forward(self, x):
        misbehave("training" if self.training else "evaluation")
        return super().forward(x)

def network(feature_shape, outputs):
    return Net(feature_shape[0], outputs)
"""


SECONDS = 10


"""That a node has for one task."""


class Going:
    """A long run of two hospitals, the second of which misbehaves as a file says."""

    def __init__(self, federation: Federation, folder: Path, disk: Path | None) -> None:
        self.federation, self.folder, self.disk = federation, folder, disk
        self.fault = federation.root / "fault"

    def start_b(self) -> int:
        return self.federation.node("hospital-b", FAULT=str(self.fault)).pid

    @property
    def lines(self) -> str:
        return (self.federation.root / "server" / "runs" / "1" / "log.txt").read_text()

    def came_back(self) -> None:
        """Wait until the hospital takes part again; the other one took part in every round, this fault's too."""
        self.fault.unlink(missing_ok=True)
        at = last_round(self.folder)

        def back() -> bool:
            return any(why is None for round, why in failures(self.folder, "hospital-b").items() if round > at)

        wait_until(back, 120, f"it never came back: {self.lines[-2000:]}")
        assert set(failures(self.folder, "hospital-a").values()) == {None}

    def reasons(self, after: int) -> set[str]:
        """Return why the hospital was left out, of training or of tests, after a round."""
        history = History(self.folder)
        untested = history.untested
        mine = untested[(untested["client"] == "hospital-b") & (untested["round"] > after)]
        left_out = [why for round, why in failures(self.folder, "hospital-b").items() if why and round > after]
        return {*left_out, *map(str, mine["failure"].tolist())}


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Generator[Going]:
    root = tmp_path_factory.mktemp("faults")
    disk = root / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True)
    try:
        with hospitals(root) as federation:
            federation.stop("hospital-b")
            (root / "net.py").write_text(NETWORK)
            name = f"{root / 'net.py'}:network"
            for hospital in ("hospital-a", "hospital-b"):
                file = root / f"{hospital}.toml"
                state = f'state = "{disk}"' if hospital == "hospital-b" else "state = 'state-a'"
                text = file.read_text().replace(f'state = "state-{hospital}"', state)
                file.write_text(f'{text}allow = ["net.py:network"]\n')
            federation.stop("hospital-a")
            federation.node("hospital-a")
            made = Going(federation, root / "run", disk if mount.returncode == 0 else None)
            made.start_b()
            long = ("rounds.count=9000", f"federate.timeout={SECONDS}", f"model.name={name}")
            changes = [word for change in long for word in ("--set", change)]
            submitted = federation.start_and_listen(
                "submit", "server", "hospitals.toml", *changes, "--trust", "--out", str(made.folder)
            )
            try:
                wait_until(lambda: last_round(made.folder) >= 2, 240, "no round")
                yield made
                assert submitted.poll() is None
            finally:
                submitted.kill()
                submitted.communicate()
    finally:
        if mount.returncode == 0:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
        shutil.rmtree(disk, ignore_errors=True)


TOO_LATE = {f"no answer within {SECONDS} s", f"raised an error: TimeoutError: took longer than the {SECONDS} s"}


SINCE = {"its node was silent and has not answered since", "no connected node holds this client"}


@pytest.mark.parametrize("where", ["training", "evaluation"])
@pytest.mark.parametrize(("what", "expected"), [("hang", TOO_LATE), ("die", {"its ClientApp died"})])
def test_a_node_that_hangs_or_dies_at_work_comes_back(going: Going, what: str, where: str, expected: set[str]):
    before = last_round(going.folder)
    going.fault.write_text(f"{what} in {where}")
    wait_until(lambda: bool(going.reasons(before) & expected), 120, f"not noticed: {going.reasons(before)}")
    going.came_back()
    assert going.reasons(before) <= expected | SINCE


def test_a_node_that_is_killed_and_started_again_three_times_comes_back(going: Going):
    for _ in range(3):
        victim = next(one for one in reversed(going.federation.processes) if one.name == "hospital-b")
        os.kill(victim.pid, signal.SIGKILL)
        going.start_b()
        going.came_back()


def test_a_full_disk_at_a_node_is_its_own_matter(going: Going):
    if going.disk is None:
        pytest.skip("no small disk can be mounted here")
    before = last_round(going.folder)
    filler = fill(going.disk)
    wait_until(lambda: bool(going.reasons(before)), 120, "not noticed")
    filler.unlink()
    going.came_back()
    (reason,) = going.reasons(before) - SINCE
    assert reason.startswith("raised an error: ")
    assert "No space left on device" in (going.federation.root / "hospital-b.log").read_text()


def test_what_nodes_send_does_not_pile_up_at_the_server(going: Going):
    """Parts of messages are removed once they are read: a round of two nodes brings about thirty of them."""

    def parts() -> int:
        return len(list((going.federation.root / "server" / "parts").iterdir()))

    before, at = parts(), last_round(going.folder)
    wait_until(lambda: last_round(going.folder) >= at + 12, 240, "no rounds")
    assert parts() < before + 100


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    with hospitals(tmp_path_factory.mktemp("federation")) as made:
        yield made
