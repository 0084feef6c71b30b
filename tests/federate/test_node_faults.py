"""Nodes that hang, die, restart or run out of room at any moment of one long run: the others never wait twice for them.

One federation of real processes; each test makes one fault at the hospital `b`, and sees it take part again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federate.test_node_process import Federation, hospitals
from tests.federate.test_process_faults import failures, fill, last_round, wait_until

from steelyard.runs.reader import History

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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


def test_a_node_that_hangs_at_its_start_holds_up_nobody(going: Going):
    """Its data cannot be read and never say so, as on a network drive that is gone: a pipe to which nobody writes."""
    victim = next(one for one in reversed(going.federation.processes) if one.name == "hospital-b")
    data, kept = going.federation.root / "hospital-b.npz", going.federation.root / "kept.npz"
    data.rename(kept)
    os.mkfifo(data)
    os.kill(victim.pid, signal.SIGKILL)
    before = last_round(going.folder)
    going.start_b()
    noted = "node hospital-b was not admitted: no answer within "
    known = going.lines.count(noted)
    said = lambda: going.lines.count(noted) > known or bool(going.reasons(before) & TOO_LATE)  # noqa: E731
    wait_until(said, 150, f"it is not noticed: {going.reasons(before)}")
    at = last_round(going.folder)
    wait_until(lambda: last_round(going.folder) >= at + 3, 60, "the others wait for it")
    assert all(why for round, why in failures(going.folder, "hospital-b").items() if round > at)
    kept.replace(data)
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
