"""Clients that do not keep the protocol, and hostile ones: what they send, by hand, also after a resume."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.local.test_simulation import SIZES, make, outputs_of, population, stepped, task

from steelyard.clients.local import Simulation
from steelyard.clients.local.outgoing import attack
from steelyard.data.dataset import Behaviour
from steelyard.learning.parameters import Layout
from steelyard.messages.updates import Task
from steelyard.weighing.criterion import get


def behaving(**how: object) -> Simulation:
    """The small simulation in which client c2 (8 samples, batches of 2, 2 epochs) behaves in this way."""
    people = population(behaviours={"c2": Behaviour(**how)})  # type: ignore[arg-type]
    return make(people, (get("DS"), get("LD")))


def sent(clients: Simulation, round: int, parameters: torch.Tensor) -> torch.Tensor:
    names = ("c0", "c1", "c2", "c3")
    return clients.train([Task("f", 0, round, names, parameters)])[0].payload.models.clone()  # type: ignore[attr-defined]


def test_a_free_rider_returns_what_it_received() -> None:
    clients, honest = behaving(free_rider=True), make()
    updates, plain = clients.train([task(clients)])[0], honest.train([task(honest)])[0]
    models, others = updates.payload.models, [0, 1, 3]
    assert torch.equal(models[2], task(clients).parameters)
    assert torch.equal(models[others], plain.payload.models[others])
    assert updates.losses[others].tolist() == plain.losses[others].tolist()
    # It says the loss of the model that it hands back, and pretends to have worked.
    rows = slice(8, 16)
    expected = torch.nn.functional.cross_entropy(outputs_of(models[2], rows), population().dataset.labels[rows])
    assert updates.losses[2] == pytest.approx(float(expected))
    assert updates.steps is not None
    assert updates.steps.tolist() == plain.steps.tolist()
    assert updates.samples.tolist() == list(SIZES)


def test_colluding_free_riders_repeat_the_last_step_and_go_on_after_a_stop() -> None:
    clients = behaving(free_rider=True, pretends=True)
    first = task(clients).parameters
    second = first + torch.linspace(-1, 1, len(first))
    assert torch.equal(sent(clients, 1, first)[2], first)  # no step is known yet
    stopped = clients.snapshot()
    step = sent(clients, 2, second)[2] - second
    size = (second - first).square().mean().sqrt()
    torch.testing.assert_close(step, second - first, atol=float(0.5 * size), rtol=0)
    assert 0 < float((step - (second - first)).square().mean().sqrt()) < 0.2 * size
    other = behaving(free_rider=True, pretends=True)
    other.restore(stopped)
    assert torch.equal(sent(other, 2, second)[2] - second, step)


def test_lies_begin_in_their_round_and_change_no_model() -> None:
    clients, honest = behaving(claims=10.0, inflates=10.0, lies_from=3), behaving()
    for round, factor in ((2, 1), (3, 10), (4, 10)):
        (updates,), (plain,) = (each.train([task(each, round)]) for each in (clients, honest))
        assert updates.samples.tolist() == [5, 3, factor * 8, 1]
        assert updates.criteria["DS"].tolist() == updates.samples.tolist()
        assert updates.criteria["LD"].tolist() == plain.criteria["LD"].tolist()
        assert torch.equal(updates.payload.models, plain.payload.models)


def test_a_client_of_few_steps_trains_on_a_part_and_reports_all() -> None:
    clients = behaving(work=0.25)
    work = task(clients)
    updates = clients.train([work])[0]
    assert updates.steps is not None
    assert updates.steps.tolist() == [6, 4, 2, 2]  # 2 of 8 samples: one batch in each of two epochs
    assert updates.samples.tolist() == updates.criteria["DS"].tolist() == list(SIZES)
    assert updates.criteria["LD"][2] == len(torch.unique(population().dataset.labels[8:16]))
    # By hand: full batches of two samples of c2, whichever two; a new pair in another round.
    parts = [clients.context.population(0).at_work(0, round).rows[8:10] for round in (1, 2, 3, 4)]
    assert all(8 <= int(row) < 16 for rows in parts for row in rows)
    assert len({tuple(rows.tolist()) for rows in parts}) > 1
    # Float32 sums in another order.
    assert torch.allclose(updates.payload.models[2], stepped(work.parameters, [parts[0]] * 2), atol=1e-6)


def test_a_stale_client_starts_from_the_model_of_some_rounds_ago_also_after_a_resume() -> None:
    whole, first, resumed = (behaving(stale=2) for _ in range(3))
    sent_out = [task(whole).parameters + 0.1 * number for number in range(6)]
    last = [sent(whole, round, model) for round, model in enumerate(sent_out, start=1)]
    for round, (parameters, models) in enumerate(zip(sent_out, last, strict=True), start=1):
        # Before two rounds have passed there is only the first model.
        assert torch.equal(models[2], sent(make(), round, sent_out[max(0, round - 3)])[2])
        assert torch.equal(models[[0, 1, 3]], sent(make(), round, parameters)[[0, 1, 3]])
    for round in (1, 2, 3):
        sent(first, round, sent_out[round - 1])
    state = first.snapshot()
    assert [json.loads(key) for key in state] == [["global", "f", 1], ["global", "f", 2], ["global", "f", 3]]
    resumed.restore(state)
    for round in (4, 5, 6):
        assert torch.equal(sent(resumed, round, sent_out[round - 1]), last[round - 1])
    # A round that is done again forgets what came after it.
    sent(resumed, 5, sent_out[4])
    assert [json.loads(key)[2] for key in resumed.snapshot()] == [4, 5]


NAMES = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(("outputs", "target", "place", "sign"), [(3, 1, 13, 1), (1, 0, 4, -1), (1, 1, 4, 1)])
def test_a_push_on_one_bias(outputs: int, target: int, place: int, sign: int) -> None:
    layout = Layout.of(torch.nn.Linear(4, outputs))  # weights first, then the biases
    origin = torch.zeros(layout.size)
    models = torch.full((2, layout.size), 0.5)
    how = Behaviour(attack="bias", strength=2.0, target=target)
    attack(Task("f", 7, 3, ("a", "b"), origin), ("a", "b"), models, {"a": how}, layout)
    expected = np.full(layout.size, 0.5)
    expected[place] += sign * 2 * 0.5 * np.sqrt(layout.size)
    np.testing.assert_allclose(models[0], expected, rtol=1e-6)
    np.testing.assert_allclose(models[1], 0.5)


def attacked(kind: str, strength: float = 1.0, by: tuple[str, ...] = ("a",), seed: int = 0) -> tuple[Any, Any]:
    """The updates before and after an attack, as [clients, parameters]."""
    chance = torch.Generator().manual_seed(seed)
    origin = torch.randn(400, generator=chance)
    models = origin + torch.randn(5, 400, generator=chance)
    before = (models - origin).double().numpy()
    how = Behaviour(attack=kind, strength=strength)  # type: ignore[arg-type]
    attack(Task("f", 7, 3, NAMES, origin), NAMES, models, dict.fromkeys(by, how))
    return before, (models - origin).double().numpy()


def most_apart(honest: np.ndarray) -> np.ndarray:
    """The update farthest along the first principal direction."""
    centred = honest - honest.mean(axis=0)
    return honest[np.abs(centred @ np.linalg.svd(centred)[2][0]).argmax()]


def quiet(mean: np.ndarray, loud: int) -> np.ndarray:
    """0 where the mean is among the so many largest, else 1."""
    return (np.abs(mean).argsort().argsort() < len(mean) - loud).astype(float)


@pytest.mark.parametrize("at_once", [None, 37])
@pytest.mark.parametrize(
    ("kind", "strength", "by", "expected"),
    [
        ("reversed", 10.0, "a", lambda before: -10 * before[0]),
        ("boosted", 5.0, "a", lambda before: 5 * before[0]),
        ("alie", 1.5, "ac", lambda before: before[[1, 3, 4]].mean(axis=0) - 1.5 * before[[1, 3, 4]].std(axis=0)),
        ("ipm", 2.0, "ac", lambda before: -2 * before[[1, 3, 4]].mean(axis=0)),
        ("ipm", 2.0, "abcde", lambda before: -2 * before.mean(axis=0)),
        ("mimic", 1.0, "ac", lambda before: most_apart(before[[1, 3, 4]])),
        ("neurotoxin", 0.05, "ac", lambda before: before[[0, 2]] * quiet(before[[1, 3, 4]].mean(axis=0), 20)),
    ],
)
def test_attacks_by_definition(
    kind: str, strength: float, by: str, expected: Any, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:  # blocks give the same as all at once
        monkeypatch.setattr("steelyard.messages.payloads.AT_ONCE", {"cpu": at_once, "cuda": at_once})
    before, after = attacked(kind, strength, tuple(by))
    hostile = [NAMES.index(name) for name in by]
    # Float32 numbers of up to ten times 4.
    wanted = np.broadcast_to(expected(before), after[hostile].shape)
    np.testing.assert_allclose(after[hostile], wanted, atol=1e-4 if strength == 10 else 1e-5)
    honest = [row for row in range(5) if row not in hostile]
    np.testing.assert_array_equal(after[honest], before[honest])


def test_noise_is_as_large_as_said_and_the_same_each_time() -> None:
    before, after = attacked("gaussian", 10.0, ("a", "b"))
    for row in (0, 1):
        size = np.sqrt(np.square(before[row]).mean())
        assert np.sqrt(np.square(after[row]).mean()) == pytest.approx(10 * size, rel=0.15)
    assert abs(np.corrcoef(after[0], after[1])[0, 1]) < 0.2
    assert (attacked("gaussian", 10.0, ("a", "b"))[1] == after).all()


def test_behind_a_decoy_the_others_stand_where_the_mean_stands() -> None:
    before, after = attacked("decoy", 30.0, ("a", "c"))
    along = after[0] / np.linalg.norm(after[0])
    assert np.linalg.norm(after[0]) > 300 * np.linalg.norm(before[0])
    assert after[2] @ along == pytest.approx((after @ along).mean(), rel=5e-3)
    payload = 30 * before[[0, 2]].mean(axis=0)
    np.testing.assert_allclose(after[2] - payload, (after[2] - payload) @ along * along, atol=1e-2)


def test_an_attack_begins_in_its_round_and_a_drift_is_as_long_as_the_update() -> None:
    origin = torch.linspace(-1, 1, 9)
    for round, turned in ((3, False), (4, True)):
        models = origin + torch.eye(9)[:2]
        how = Behaviour(attack="drift", strength=0.5, attacks_from=4)
        attack(Task("f", 7, round, ("a", "b"), origin), ("a", "b"), models, {"a": how})
        update = (models - origin).double().numpy()
        expected = np.eye(9)[0] - turned * 0.5 * origin.double().numpy() / origin.norm().item()
        np.testing.assert_allclose(update[0], expected / np.linalg.norm(expected), atol=1e-6)
        np.testing.assert_allclose(update[1], np.eye(9)[1], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_min_max_goes_exactly_as_far_as_honest_updates_lie_apart(seed: int) -> None:
    before, after = attacked("min-max", seed=seed)
    honest = before[1:]
    widest = max(float(np.linalg.norm(x - y)) for x in honest for y in honest)
    furthest = max(float(np.linalg.norm(after[0] - x)) for x in honest)
    assert furthest == pytest.approx(widest, rel=1e-4)
    far = [np.square(after - honest_one).sum(axis=1)[1:].sum() for honest_one in honest]
    summed = attacked("min-sum", seed=seed)[1][0]
    assert sum(np.square(summed - each).sum() for each in honest) == pytest.approx(max(far), rel=1e-4)
    direction = (after[0] - honest.mean(axis=0)) / honest.std(axis=0)
    assert direction.max() < 0
    np.testing.assert_allclose(direction, direction[0], rtol=1e-2)
