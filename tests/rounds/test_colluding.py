"""Colluders that know the rule: what they choose, held against every single candidate, in whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.experiment.test_hostile_runs import SMALL as DEFENDED
from tests.kit import assert_refused
from tests.stopping import assert_a_stop_changes_nothing

from steelyard.base import randomness
from steelyard.clients.local import Simulation, SimulationServer
from steelyard.defence import robust
from steelyard.defence.robust import hostile_count, spectral_scores
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build
from steelyard.experiment.parts import Parts, assembled, federations_of
from steelyard.experiment.rules import with_rules
from steelyard.messages.payloads import DenseModels, ServerTest
from steelyard.rounds import colluding
from steelyard.rounds.colluding import with_colluders
from steelyard.rounds.loop import make_task, one_round
from steelyard.rounds.weigh import weigh_soundly
from steelyard.studies.attack import under_attack

SMALL = {**DEFENDED, "rounds": {"count": 4, "fraction": 1.0}}
RULES = ["VP", "guarded", "fltrust(EQ)", "median(EQ)"]


def simulated(described: Description) -> tuple[Simulation, SimulationServer]:
    clients, server = assembled(described, None, None)
    assert isinstance(clients, Simulation)
    assert isinstance(server, SimulationServer)
    return clients, server


@pytest.mark.parametrize("rule", RULES)
def test_no_candidate_harms_more_on_the_colluders_own_rows(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = with_rules(under_attack(build(SMALL), "adaptive", 0.2), [rule])
    clients, server = simulated(described)
    (federation,) = federations_of(described, None, described.criteria())
    plan = Parts.of(described.for_clients(10), clients, server, [federation]).plan
    state = federation.start(server)
    task = make_task(federation, state, clients, plan, 1)
    (updates,) = clients.train([task])
    hostile = [row for row, name in enumerate(updates.clients) if name in clients.colluders(task.seed, 1)]
    honest = [row for row in range(10) if row not in hostile]
    # One honest client has trained on nothing: it is left out, whatever colluders try. A part of the network is frozen.
    models = updates.payload.models.clone()
    models[:, :5] = task.parameters[:5]
    samples = updates.samples * (np.arange(10) != honest[3])
    updates = replace(updates, samples=samples, payload=DenseModels(models, ((0, 5),)))
    tried: list[np.ndarray] = []
    harm = colluding._Trial.harm

    def noted(trial: Any, candidates: Any) -> np.ndarray:
        tried.append(harm(trial, candidates))
        assert torch.equal(trial.directions().rows[:8], models[honest] - task.parameters)
        return tried[-1]

    monkeypatch.setattr(colluding._Trial, "harm", noted)
    sent = with_colluders(federation, state, task, updates, clients.colluders(task.seed, 1), server, plan)
    assert len(hostile) == 2
    assert isinstance(sent.payload, DenseModels)
    assert sent.payload.frozen == ((0, 5),)
    assert torch.equal(sent.payload.models[:, :5], models[:, :5])
    assert torch.equal(sent.payload.models[honest], models[honest])
    assert len(tried[0]) >= 50
    assert np.isfinite(tried[0]).all()
    assert len(tried[1]) == 12
    # What the rule makes of it, by the plain way through the rule, on the same rows.
    imagined = server.imagined(task.seed, clients.colluders(task.seed, 1))
    guess = replace(federation, seed=randomness.stream_key(task.seed, 1, purpose="attack/guess"))

    def harmed(given: Any) -> tuple[float, float]:
        draft = weigh_soundly(guess, state, task, given, imagined, plan)
        test: ServerTest = imagined.test(task.seed, draft.model[None])
        return 1 - float(test.accuracy[0]), float(test.losses[0])

    worst = max(tuple(each) for part in tried for each in part.tolist())
    assert harmed(sent) == pytest.approx(worst, rel=1e-3, abs=1e-6)
    assert harmed(sent) > harmed(updates)
    # Colluders of two families are two groups, each of which tries for itself; insiders on the server's rows.
    groups: list[tuple[str, list[int]]] = []
    families = dict(zip((updates.clients[row] for row in hostile), ("insider", "inflation"), strict=True))
    known: list[bool] = []
    monkeypatch.setattr(server, "imagined", lambda seed, families, insider: known.append(insider) or imagined)
    monkeypatch.setattr(
        colluding, "_worst", lambda trial, family: (trial.updates, groups.append((family, trial.rows)))[0]
    )
    with_colluders(federation, state, task, updates, families, server, plan)
    assert (groups, known) == ([("inflation", hostile[1:]), ("insider", hostile[:1])], [False, True])


def unclipped(weights: np.ndarray, gram: np.ndarray, share: float) -> np.ndarray:
    """The spectral check until 0.2, which clips nothing: a specimen for attackers with roles."""
    kept = np.argsort(spectral_scores(gram), kind="stable")[: len(gram) - hostile_count(len(gram), share)]
    return np.where(np.isin(np.arange(len(gram)), kept), weights, 0.0) / weights[kept].sum()


def test_colluders_find_the_decoy_by_themselves_and_clipping_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What broke `guarded` until 0.2 is found by trying the rule; the rule of today loses less."""
    chosen: list[str] = []
    sending = colluding._Trial.sending

    def noted(trial: Any, tried: Any, best: int) -> Any:
        chosen.append(tried.names[best])
        return sending(trial, tried, best)

    monkeypatch.setattr(colluding._Trial, "sending", noted)
    right: dict[tuple[str, str], float] = {}
    for kind in ("now", "until 0.2"):
        for attack in ("clean", "adaptive"):
            described = with_rules(under_attack(build(SMALL), attack, 0.2), ["guarded"])
            clients, server = simulated(described)
            federations = federations_of(described, None, described.criteria())
            plan = Parts.of(described.for_clients(10), clients, server, federations).plan
            (federation,) = federations
            states = {federation.name: federation.start(server)}
            for round in range(1, 5):
                one_round(federations, states, clients, server, plan, round)
            model = states[federation.name].parameters
            right[kind, attack] = float(server.report(described.seed, model[None]).accuracy[0])
        if kind == "now":
            chosen.clear()
            monkeypatch.setattr(robust, "spectral", unclipped)
    assert any("decoy" in name for name in chosen), chosen
    lost = {kind: right[kind, "clean"] - right[kind, "adaptive"] for kind in ("now", "until 0.2")}
    assert lost["until 0.2"] > lost["now"] + 0.1


@pytest.mark.slow
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = with_rules(build({**SMALL, "rounds": {"count": 3, "fraction": 0.6}}), ["guarded", "fltrust(EQ)"])
    attacked = under_attack(described, "adaptive+inflation", 0.3)
    assert_a_stop_changes_nothing(attacked, tmp_path, monkeypatch)


def test_colluders_do_not_know_the_servers_rows_or_its_chance() -> None:
    described = with_rules(under_attack(build(SMALL), "adaptive", 0.2), ["guarded"])
    clients, server = simulated(described)
    colluders = clients.colluders(described.seed, 1)
    source = clients.context.population(described.seed).source
    rows = server.imagined(described.seed, colluders)._held(0)
    assert server.imagined(described.seed, colluders, insider=True)._held(0).tolist() == source.server.tolist()
    assert not set(rows) & {*source.server.tolist(), *source.report.tolist()}
    assert len(rows) == int(np.median([len(client.train) for client in source.clients]))


def test_what_cannot_be_tried_out_is_refused() -> None:
    flaw = {"kind": "adaptive", "pick": "random", "share": 0.2}
    private = {"central": {"clip": 1.0, "noise": 1.0}, "budget": {"epsilon": 5}}
    weighing = {"criteria": ["EQ"], "max_shares": 2}
    noisy = {**SMALL, "flaws": [flaw], "privacy": private, "weighing": weighing}
    assert_refused(lambda: build(noisy), "flaws.0.kind: got 'adaptive' with [privacy]")
    paired = {**SMALL, "flaws": [{**flaw, "how": "pairs"}]}
    assert_refused(lambda: build(paired), "flaws.0.how: got 'pairs'", "'alie'")
