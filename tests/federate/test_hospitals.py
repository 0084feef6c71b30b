"""Two hospitals behind a server, as real processes: what an operator sees and does, and every fault of a long run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.federate.real_federation import (
    LONG,
    Federation,
    failures,
    hospitals,
    last_round,
    server_apps,
)
from tests.kit import wait_until

from steelyard.result import Result
from steelyard.runs.history import History

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_runs_go_one_after_another_and_are_seen(federation: Federation):
    root = federation.root
    first = federation.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", "runs/first")
    wait_until(lambda: last_round(root / "runs/first") >= 1, 240, "no round")
    second = federation.start_and_listen(
        "submit", "server", "hospitals.toml", "--set", "rounds.count=2", "--out", "runs/second"
    )
    wait_until(lambda: (root / "server" / "runs" / "2" / "submitted.json").exists(), 60, "not submitted")
    listed = json.loads(federation.steelyard("list", "server", "--format", "json").stdout)
    assert [(run["run"], run["status"]) for run in listed["runs"]] == [(1, "running"), (2, "queued")]
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("steelyard: run 1 continues without you; ")
    # A killed server app is noticed at once, with its cause, by whoever follows; the next run begins.
    follow = federation.start_and_listen("follow", "server", "1")
    (app,) = server_apps(root)
    os.kill(app, signal.SIGKILL)
    _, errors = follow.communicate(timeout=60)
    assert (follow.returncode, "steelyard: the ServerApp was killed; " in errors) == (2, True)
    lines, errors = second.communicate(timeout=240)
    assert second.returncode == 0, lines + errors
    # The operator gets the model, and so does a node whose owner keeps it.
    assert "next: steelyard model " in lines
    taken = federation.steelyard("model", "hospital-a.toml", "--out", "model-a", "--format", "json")
    origin = Result(root / "runs/second").model().document.origin
    assert json.loads(taken.stdout)["origin"]["digest"] == origin.digest, taken.stderr
    assert "round 2/2" in federation.steelyard("log", "server", "2").stdout
    # A run that an operator stops says so, in its own record too.
    third = federation.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", "runs/third")
    wait_until(lambda: last_round(root / "runs/third") >= 1, 240, "no round")
    assert federation.steelyard("stop", "server", "3").returncode == 0
    _, errors = third.communicate(timeout=60)
    words = "stopped by an operator (`steelyard federate stop`)"
    assert (third.returncode, words in errors, History(root / "runs/third").facts.stopped) == (2, True, words)


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

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.federation, self.folder = federation, folder
        self.fault = federation.root / "fault"

    def start_b(self) -> int:
        return self.federation.node("hospital-b", FAULT=str(self.fault)).pid

    def came_back(self) -> None:
        """Wait until the hospital takes part again; the other one took part in every round, this fault's too."""
        self.fault.unlink(missing_ok=True)
        at = last_round(self.folder)

        def back() -> bool:
            return any(why is None for round, why in failures(self.folder, "hospital-b").items() if round > at)

        wait_until(back, 120, "it never came back")
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
    with hospitals(tmp_path_factory.mktemp("faults")) as federation:
        root = federation.root
        (root / "net.py").write_text(NETWORK)
        for hospital in ("hospital-a", "hospital-b"):
            federation.stop(hospital)
            file = root / f"{hospital}.toml"
            file.write_text(f'{file.read_text()}allow = ["net.py:network"]\n')
        federation.node("hospital-a")
        made = Going(federation, root / "run")
        made.start_b()
        long = ("rounds.count=9000", f"federate.timeout={SECONDS}", f"model.name={root / 'net.py'}:network")
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


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    with hospitals(tmp_path_factory.mktemp("federation")) as made:
        yield made
