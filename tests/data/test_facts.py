"""Facts about simulated clients' devices and users: inline, from a CSV, drawn by seed; they reach criteria."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit import SMALL, assert_refused

from steelyard import Experiment, LocalData, UserError, client_criterion
from steelyard.clients.node import NodeConfig
from steelyard.data.facts import FactSettings
from steelyard.experiment.loading import build, load, read_experiment
from steelyard.runs.history import History

NAMES = [f"client-{number:03}" for number in range(4)]


@client_criterion("BATTERY", about="device", maximum=1.0)
def battery(local: LocalData) -> float:
    return local.device.get("battery", 1.0)


@client_criterion("TRUSTED", about="user")
def trusted(local: LocalData) -> float:
    return local.user["trust"]


def described(**facts: Any) -> dict[str, Any]:
    usual = {"partition": {"clients": 4}, "rounds": {"count": 1}, "weighing": {"criteria": ["BATTERY", "TRUSTED"]}}
    return {**SMALL, **usual, "facts": facts}


def raw(folder: Path) -> Mapping[str, Mapping[str, float]]:
    frame = History(folder).clients.set_index("client")
    return {name: frame[f"raw_{name}"].to_dict() for name in ("BATTERY", "TRUSTED")}


def test_facts_reach_criteria_and_are_recorded(tmp_path: Path) -> None:
    by_client = {"client-000": 0.7, "client-002": 0.25}
    experiment = Experiment.model_validate(described(device={"battery": by_client}, user={"trust": 2}))
    folder = experiment.run(tmp_path / "run").folder
    assert raw(folder) == {
        "BATTERY": {"client-000": 0.7, "client-001": 1.0, "client-002": 0.25, "client-003": 1.0},
        "TRUSTED": dict.fromkeys(NAMES, 2.0),
    }
    assert read_experiment(folder).facts == experiment.facts  # type: ignore[attr-defined]


def test_a_csv_beside_the_experiment_is_put_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "devices.csv").write_text(
        "client,device-battery,user-trust\nclient-000,0.5,1\nclient-001,,0\n\nclient-002,1e-1,3\n"
    )
    file = tmp_path / "project" / "mine.toml"
    file.write_text('[facts]\npath = "devices.csv"\n[facts.user]\nage = 40\n')
    monkeypatch.chdir(tmp_path)
    facts = load(file).facts  # type: ignore[attr-defined]
    assert facts == FactSettings(
        device={"battery": {"client-000": 0.5, "client-002": 0.1}},
        user={"age": 40, "trust": {"client-000": 1, "client-001": 0, "client-002": 3}},
    )
    assert facts.path is None
    file.write_text('[facts]\npath = "devices.csv"\n[facts.user]\ntrust = 40\n')
    assert_refused(lambda: load(file), "facts.user.trust: given here and in", "devices.csv; allowed: one of the two")


def test_draws_depend_on_seed_client_and_fact_alone() -> None:
    facts = FactSettings(
        device={"battery": "uniform(0.2, 0.9)"},
        user={"consent": "bernoulli(0.8)", "trust": "beta(2, 5)", "speed": "normal(3, 0.5)"},
    )
    names = [f"c{number}" for number in range(2000)]
    first, again, other = facts.of(names, 1), facts.of(names[:3], 1), facts.of(names, 2)
    assert {name: first[name] for name in names[:3]} == again
    assert first["c0"]["device"]["battery"] != other["c0"]["device"]["battery"]
    levels = np.array([first[name]["device"]["battery"] for name in names])
    # Standard errors of the means: .2/√2000 = .0045 and .16/√2000 = .0036; five of them.
    assert 0.2 <= levels.min() < levels.max() <= 0.9
    assert levels.mean() == pytest.approx(0.55, abs=0.0225)
    assert np.mean([first[name]["user"]["trust"] for name in names]) == pytest.approx(2 / 7, abs=0.018)
    assert np.mean([first[name]["user"]["consent"] for name in names]) == pytest.approx(0.8, abs=0.045)
    speeds = np.array([first[name]["user"]["speed"] for name in names])
    assert (speeds.mean(), speeds.std()) == (pytest.approx(3.0, abs=0.056), pytest.approx(0.5, abs=0.04))
    assert facts.of([], 1) == {}
    assert FactSettings().of(names, 1) == {}


@pytest.mark.parametrize(
    ("facts", "field", "value"),
    [
        ({"device": {"battery": "uniform(1)"}}, "device.battery", "'uniform(1)'"),
        ({"device": {"battery": "uniform(2, 1)"}}, "device.battery", "'uniform(2, 1)'"),
        ({"user": {"trust": "beta(0, 1)"}}, "user.trust", "'beta(0, 1)'"),
        ({"user": {"trust": "normal(1, -1)"}}, "user.trust", "'normal(1, -1)'"),
        ({"user": {"trust": "bernoulli(1.5)"}}, "user.trust", "'bernoulli(1.5)'"),
        ({"user": {"trust": "uniform(1, inf)"}}, "user.trust", "'uniform(1, inf)'"),
        ({"user": {"trust": "cauchy(1, 2)"}}, "user.trust", "'cauchy(1, 2)'; allowed: a number, numbers by client, or"),
        ({"user": {"trust": float("nan")}}, "user.trust", "nan"),
        ({"device": {"trust": "high"}}, "device.trust", "got 'high'"),
        ({"user": {"country": {"client-000": "I=T"}}}, "user.country.client-000", "'I=T'"),
        ({"path": "none.csv"}, "path", "none.csv cannot be read"),
    ],
)
def test_facts_that_cannot_be_are_one_line(facts: dict[str, Any], field: str, value: str) -> None:
    assert_refused(lambda: build(described(**facts)), f"facts.{field}: ", value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"name,device-battery\na,1\n", "the columns name, device-battery"),
        (b"client,device-battery\na,full\n", "line 2, device-battery: got 'full'"),
        (b"client,device-battery\na,1\na,2\n", "line 3 has the client 'a'"),
        (b"client,device-battery\na,1,2\n", "line 2: 3 cells"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_files_of_facts_that_cannot_be_are_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.csv"
    file.write_bytes(text)
    assert_refused(lambda: build(described(path=str(file))), file, message)


def test_a_client_that_does_not_exist_is_named_before_a_folder_is_made(tmp_path: Path) -> None:
    wrong = Experiment.model_validate(described(device={"battery": {"client-00": 1.0}}))
    with pytest.raises(
        UserError, match=r"facts\.device\.battery: no client 'client-00' \(did you mean 'client-00.*, \.\.\.$"
    ):
        wrong.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_node_says_more_of_itself_than_the_experiment() -> None:
    experiment = Experiment.model_validate(described(device={"battery": 0.3, "cores": 2}, user={"trust": 1}))
    node = experiment.on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 2, "device-battery": 0.9}))
    local = node.clients.context.population(0).local("client-000")  # type: ignore[attr-defined]
    assert (dict(local.device), dict(local.user)) == ({"battery": 0.9, "cores": 2.0}, {"trust": 1.0})
    with pytest.raises(TypeError):
        local.device["battery"] = 1.0
