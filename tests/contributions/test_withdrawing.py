"""A run without a client: nobody asks or tests it, both folders name each other, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine
from tests.contributions.test_replaying import experiment
from tests.kit import small
from tests.runs.contents import query

from steelyard.base.errors import Stopped
from steelyard.contributions.finding import without
from steelyard.contributions.withdrawing import withdraw
from steelyard.experiment.running import run
from steelyard.report.verification import verify
from steelyard.runs.history import History


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(), out=tmp_path_factory.mktemp("withdrawn") / "run")


def test_a_run_without_a_client(folder: Path, tmp_path: Path, command: CommandLine) -> None:
    done = command("withdraw", folder, "client-002", "--out", tmp_path / "fewer")
    assert done.returncode == 0, done.stderr
    before, after = History(folder), History(tmp_path / "fewer")
    assert "client-002" in set(before.clients["client"])
    for frame in (after.clients, after.evaluations):
        assert set(frame["client"]) == set(before.evaluations["client"]) - {"client-002"}
    lineage = json.loads(after.info["withdrawn_from"])
    expected = {"run": str(folder), "head": before.chain.head, "client": "client-002", "round": 0}
    assert lineage == {**expected, "from": "the first model"}
    assert json.loads(before.info["withdrawals"]) == [{"client": "client-002", "run": str(tmp_path / "fewer")}]
    assert not after.chain.problem


def test_the_model_is_that_of_the_retrained_others(folder: Path, tmp_path: Path) -> None:
    fewer = withdraw(folder, "client-001", out=tmp_path / "fewer")
    truth = without(folder, "client-001", retrained=True)
    again = without(fewer, "client-000", retrained=True)
    assert again["after"] == pytest.approx(truth["without"], rel=1e-5)


def test_a_floor_of_a_client_that_has_withdrawn_stays(tmp_path: Path) -> None:
    rounds, weighing = {"count": 1, "withdrawn": ["client-002"]}, {"floors": {"client-002": 0.1}}
    assert (
        History(small(rounds=rounds, weighing=weighing).run(out=tmp_path / "run").folder).info["status"] == "finished"
    )


def test_what_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    assert "CLIENT: got 'client-999'" in refused("withdraw", folder, "client-999")
    assert "holds a run already" in refused("withdraw", folder, "client-001", "--out", folder)


# ---------------------------------------------------------------- from a checkpoint


def one_a_round(**sections: Any) -> Any:
    """One client a round, so that some take part late or never."""
    rounds = {"count": 4, "fraction": 0.01, "min_clients": 1, "evaluate_every": 4, **sections.pop("rounds", {})}
    return experiment(rounds=rounds, beside=None, **sections)


def last_of(folder: Path) -> tuple[str, int]:
    """The client that took part last, and in which round for the first time."""
    firsts = History(folder).clients.groupby("client")["round"].min()
    return str(firsts.idxmax()), int(firsts.max())


def test_who_took_part_late_is_left_out_from_the_checkpoint_before(tmp_path: Path) -> None:
    # As a run that was stopped before its end leaves it: two checkpoints.
    stopped = stopped_after(4, tmp_path, store={"checkpoint_every": 1, "keep": "updates"})
    client, first = last_of(stopped)
    assert first == 4, "the cohorts of this seed"
    fewer = withdraw(stopped, client, out=tmp_path / "fewer")
    after = History(fewer)
    lineage = json.loads(after.info["withdrawn_from"])
    assert (lineage["round"], lineage["from"]) == (first - 1, f"the checkpoint after round {first - 1}")
    assert client not in set(after.clients["client"])
    heads = "SELECT round, head FROM chain WHERE round < 4 ORDER BY round"
    assert query(fewer, heads) == query(stopped, heads), "the rounds before are the old run's own"
    assert verify(fewer).code == verify(stopped).code == 0
    assert {path.name for path in (fewer / "updates").iterdir()} == {f"round-{n:06d}.safetensors" for n in range(6)}


def stopped_after(round: int, folder: Path, **sections: Any) -> Path:
    def stop(done: int, _: object) -> None:
        if done == round:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        run(one_a_round(**{"rounds": {"count": 5}, **sections}), out=folder / "stopped", progress=stop)
    return folder / "stopped"


def test_who_took_part_from_the_begin_or_decided_by_tests_is_left_out_from_the_first_model(tmp_path: Path) -> None:
    deciding = {"rounds": {"count": 5, "stop_at_target": True, "target": 0.99}}
    for name, sections in (("early", {}), ("deciding", deciding)):
        stopped = stopped_after(4, tmp_path / name, store={"checkpoint_every": 1}, **sections)
        gone = last_of(stopped)[0] if sections else str(History(stopped).clients["client"].iloc[0])
        lineage = json.loads(History(withdraw(stopped, gone, out=tmp_path / name / "fewer")).info["withdrawn_from"])
        assert (lineage["round"], lineage["from"]) == (0, "the first model")
