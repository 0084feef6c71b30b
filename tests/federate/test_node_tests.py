"""A node whose clients are never tested: nothing of its test rows leaves it, and the run goes on without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from tests.clients.flower.flower_fakes import FakeGrid
from tests.conftest import CommandLine
from tests.federate.test_node_ledger import node, private

from steelyard.clients.flower import questions, wire
from steelyard.clients.flower.forms import EVALUATE
from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.federate import node as node_file
from steelyard.federate.node_ledger import NodeLedger
from steelyard.federate.run_config import experiment_text
from steelyard.federate.server_app import federate
from steelyard.messages import Question
from steelyard.runs.reader import History

REFUSED = "tests: this node's clients are never tested; allowed: training"
HERE = ("client-000", "client-002", "client-004")


def question(candidates: int = 2, *, detailed: bool = False) -> Question:
    return Question("DS", 5, 1, torch.zeros(candidates, 650), detailed)


def ask(asked: Callable[[Message], RecordDict | Error], asking: Question) -> RecordDict:
    """Ask a node how good models are, as a server can whenever it likes."""
    content = questions.write_question(asking, 60.0, "run", experiment=experiment_text(build(private(rounds=1))))
    message = Message(content, 40, EVALUATE, ttl=60.0, group_id="1")
    message.metadata.__dict__["_message_id"] = "asked"
    found = asked(message)
    assert isinstance(found, RecordDict), found.reason
    return found


def federated(tmp_path: Path, tests: tuple[bool, bool], **sections: Any) -> Path:
    """Run with two nodes, of which each is tested or not; returns the run's folder."""
    nodes = {40 + i: node(i, tmp_path / f"state-{i}", tests=tested) for i, tested in enumerate(tests)}
    document = private(rounds=2)
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    config = {"experiment": experiment_text(build(document)), "set": "", "out": str(tmp_path / "run")}
    return federate(FakeGrid(dict(nodes)), config, "1")  # type: ignore[arg-type, dict-item]


def _nobody_tests(*_: object) -> Any:
    raise AssertionError("tested all the same")


@pytest.mark.parametrize("detailed", [False, True])
def test_a_question_is_answered_with_names_and_the_reason_alone(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch, detailed: bool
):
    monkeypatch.setattr("steelyard.clients.private.PrivateClients.evaluate", _nobody_tests)
    asking = question(detailed=detailed)
    content = ask(node(0, tmp_path, tests=False), asking)
    form = json.loads(str(wire.split(content)[0]))
    assert form.pop("failures") == [{"client": name, "reason": f"NotAllowed: {REFUSED}"} for name in HERE]
    assert [form[name] for name in ("clients", "samples", "metrics")] == [[], [], {}]
    assert [form[name] for name in ("scores", "losses")] == [[[], []]] * 2
    read = questions.read_evaluations(content, asking, HERE, (0.0, 1.0))  # A server can use it as it is.
    assert (read.clients, read.scores.shape) == ((), (2, 0))
    assert (None if read.right is None else read.right.size) == (0 if detailed else None)
    assert messages == [f"not answered: {REFUSED}"]


@pytest.mark.parametrize("own", [{}, {"tests": True}])
def test_other_nodes_answer_as_ever(tmp_path: Path, own: dict[str, Any]):
    asking = question()
    read = questions.read_evaluations(ask(node(0, tmp_path, **own), asking), asking, HERE, (0.0, 1.0))
    assert (read.clients, read.failures) == (HERE, ())
    assert read.samples.min() > 0


def test_a_run_goes_on_where_some_are_not_tested(tmp_path: Path):
    stops = {"samples": True, "stop_at_target": True}  # Those who are tested may reach it; with such noise they do not.
    history = History(federated(tmp_path, (False, True), rounds=stops))
    assert set(history.untested["client"]) == set(HERE)
    assert set(history.untested["failure"]) == {f"NotAllowed: {REFUSED}"}
    assert set(history.evaluations["client"]) == {"client-001", "client-003", "client-005"}
    assert history.clients["failure"].isna().all()  # They train as all others do.
    assert history.rounds["accuracy"].notna().tolist() == [True] * 3


def test_a_run_goes_on_where_nobody_is_tested_and_can_be_looked_at(tmp_path: Path, steelyard: CommandLine):
    folder = federated(tmp_path, (False, False), rounds={"samples": True})
    history = History(folder)
    assert history.info["status"] == "finished"
    assert history.rounds["accuracy"].isna().all()
    assert history.evaluations.empty
    assert history.untested["round"].tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert history.clients["weight"].notna().all()
    assert [entry.round for entry in NodeLedger(tmp_path / "state-0").entries()] == [1, 2]
    listed = steelyard("ls", tmp_path)
    assert listed.returncode == 0
    assert ["run", "finished", "2/2", "–"] in [line.split()[:4] for line in listed.stdout.splitlines()]
    table = steelyard("table", folder)
    assert (table.returncode, table.stderr.count("\n")) == (2, 1)
    assert "or nodes with tests = false" in table.stderr
    assert steelyard("report", folder).returncode == 0
    assert "no accuracy is known" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"rounds": {"stop_at_target": True}}, "rounds.stop_at_target: got true, and no client tests the model"),
        (
            {"weighing": {"criteria": ["DS", "LD"], "priority": "DS>LD", "adjust": {"strategy": "online"}}},
            "weighing.adjust: 'online(DS>LD)' compares accuracies, and no client tests the model",
        ),
    ],
)
def test_what_needs_tests_is_refused_in_one_line_before_anybody_trains(
    tmp_path: Path, sections: dict[str, Any], line: str
):
    with pytest.raises(UserError) as caught:
        federated(tmp_path, (False, False), **sections)
    assert str(caught.value).startswith(f"{line} (client-000: NotAllowed: {REFUSED}); allowed: ")
    assert NodeLedger(tmp_path / "state-0").entries() == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("own", "warned"),
    [
        ('require = "local"\nstate = "s"\nepsilon = 8\n', True),
        ('require = "local"\nstate = "s"\nepsilon = 8\ntests = false\n', False),
        ('require = "local"\nstate = "s"\n', False),  # A ledger that only records promises nothing.
        ('data = "mine.npz"\nmin-rows = 25\n', False),
        ("", False),
    ],
)
def test_the_start_says_that_tests_carry_no_noise(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch, own: str, warned: bool
):
    (tmp_path / "mine.npz").touch()
    (tmp_path / "node.toml").write_text(f'server = "h:1"\ninsecure = true\nclient = "a"\n{own}')
    monkeypatch.setattr(node_file, "run_nodes", lambda *_: None)
    monkeypatch.setattr(node_file.os, "umask", lambda _: 0)
    node_file.run_node(tmp_path / "node.toml")
    lines = messages
    assert sum("tests of models are answered without noise" in line for line in lines) == warned
    assert all("tests = false" in line for line in lines if "without noise" in line)
    assert sum("no answer rests on fewer than 25 rows of" in line for line in lines) == ("min-rows" in own)
    assert len(lines) == 1 + ("state" in own) + ("min-rows" in own) + warned
