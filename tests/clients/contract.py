"""What every implementation of `Clients` must do, whatever trains behind it.

Subclass `ClientsContract` in a test file as `class TestMine(ClientsContract)` and override the fixtures `make` (returns
a function that builds fresh clients over the same data each time it is called) and `start` (the first global model).
Clients may keep state between rounds, so every comparison here is between clients that were built afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from steelyard.clients.protocol import Clients
from steelyard.messages.updates import Evaluations, Question, Task, Updates

Make = Callable[[], Clients]
UNKNOWN = "zz-no-such-client"


class ClientsContract:
    """The tests; none of them knows the implementation."""

    seed = 0
    rounding = 0.0
    """How far an update may move, relative to its size, when others are trained beside it; 0 for the same bits."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    def start(self) -> torch.Tensor:
        raise NotImplementedError

    def task(self, clients: Clients, start: torch.Tensor, federation: str = "f", round: int = 1) -> Task:
        return Task(federation, self.seed, round, tuple(clients.names(self.seed)), start)

    def test_names_ascend_and_stay(self, make: Make) -> None:
        clients = make()
        names = list(clients.names(self.seed))
        assert len(names) > 1
        assert names == sorted(set(names))
        assert list(clients.names(self.seed)) == list(make().names(self.seed)) == names

    def test_training_answers_every_client_once_in_ascending_order(self, make: Make, start: torch.Tensor) -> None:
        clients = make()
        task = self.task(clients, start)
        (updates,) = clients.train([task])
        assert (updates.federation, updates.round) == ("f", 1)
        assert len(updates.clients) > 1
        assert list(updates.clients) == sorted(set(updates.clients))
        failed = [failure.client for failure in updates.failures]
        assert sorted([*updates.clients, *failed]) == sorted(task.clients)
        count = len(updates.clients)
        assert len(updates.samples) == count
        assert len(updates.losses) == count
        assert all(len(values) == count for values in updates.criteria.values())
        assert (updates.samples > 0).all()
        assert np.isfinite(updates.losses).all()
        assert updates.payload.finite().tolist() == [True] * count
        assert (updates.payload.divergence(start) > 0).any()

    def test_tasks_in_one_call_equal_tasks_one_by_one(self, make: Make, start: torch.Tensor) -> None:
        clients = make()
        first = self.task(clients, start)
        second = Task("e", self.seed, 3, first.clients[1:], start * 1.01)
        together = clients.train([first, second])
        assert [(answer.federation, answer.round) for answer in together] == [("f", 1), ("e", 3)]
        for task, answer in zip((first, second), together, strict=True):
            (alone,) = make().train([task])
            assert_same_updates(answer, alone, task.parameters, self.rounding)
        assert clients.train([]) == clients.evaluate([]) == []

    def test_a_client_does_not_depend_on_its_cohort(self, make: Make, start: torch.Tensor) -> None:
        whole = self.task(make(), start)
        (all_of_them,) = make().train([whole])
        name = all_of_them.clients[-1]
        (alone,) = make().train([Task("f", self.seed, 1, (name,), start)])
        last = all_of_them.select([len(all_of_them.clients) - 1], [])
        assert_same_updates(alone, last, start, self.rounding)

    def test_the_same_task_gives_the_same_bits(self, make: Make, start: torch.Tensor) -> None:
        task = self.task(make(), start)
        given = start.clone()
        (one,), (two,) = make().train([task]), make().train([task])
        assert_same_updates(one, two, start, 0.0)
        assert torch.equal(given, start)  # and the global model is left as it was

    def test_failures_are_named_not_raised(self, make: Make, start: torch.Tensor) -> None:
        clients = make()
        known = self.task(clients, start).clients
        (updates,) = clients.train([Task("f", self.seed, 1, tuple(sorted((*known, UNKNOWN))), start)])
        (expected,) = make().train([self.task(clients, start)])
        assert UNKNOWN in {failure.client for failure in updates.failures}
        assert all(failure.reason for failure in updates.failures)
        assert_same_updates(updates, expected, start, 0.0)
        (empty,) = make().train([Task("f", self.seed, 1, (UNKNOWN,), start)])
        assert empty.clients == ()
        assert [failure.client for failure in empty.failures] == [UNKNOWN]
        assert len(empty.samples) == len(empty.losses) == len(empty.payload.finite()) == 0

    def test_evaluation_of_several_candidates_equals_one_by_one(self, make: Make, start: torch.Tensor) -> None:
        models = torch.stack([start, start * 0.5, start * -1.3])
        (together,) = make().evaluate([Question("f", self.seed, 1, models)])
        assert list(together.clients) == sorted(set(together.clients))
        assert set(together.clients) <= set(make().names(self.seed))
        assert (together.samples > 0).all()
        assert together.scores.shape == together.losses.shape == (3, len(together.clients))
        for candidate, model in enumerate(models):
            (alone,) = make().evaluate([Question("f", self.seed, 1, model[None])])
            assert alone.clients == together.clients
            # One model or three in a stack: float32 sums of a few hundred numbers in another order.
            np.testing.assert_allclose(alone.scores[0], together.scores[candidate], rtol=1e-5)
            np.testing.assert_allclose(alone.losses[0], together.losses[candidate], rtol=1e-5)
        assert len(set(map(tuple, together.losses.tolist() + together.scores.tolist()))) > 1

    def test_questions_in_one_call_equal_questions_one_by_one(self, make: Make, start: torch.Tensor) -> None:
        questions = [
            Question("g", self.seed, 2, torch.stack([start * 0.5, start])),
            Question("f", self.seed, 1, start[None], detailed=True),
        ]
        together = make().evaluate(questions)
        for question, answer in zip(questions, together, strict=True):
            assert (answer.federation, answer.round) == (question.federation, question.round)
            (alone,) = make().evaluate([question])
            # All models of a seed may be one stack: float32 sums of a few hundred numbers in another order.
            assert_same_evaluations(answer, alone, 1e-5)

    def test_a_snapshot_restores_the_next_round_bit_for_bit(self, make: Make, start: torch.Tensor) -> None:
        clients = make()
        clients.train([self.task(clients, start), self.task(clients, start * 1.01, "g")])
        state = {name: value.clone() for name, value in clients.snapshot().items()}
        resumed = make()
        resumed.restore(state)
        assert_same_state(resumed.snapshot(), state)
        tasks = [self.task(clients, start * 0.99, name, round=2) for name in ("f", "g")]
        for mine, theirs in zip(resumed.train(tasks), clients.train(tasks), strict=True):
            assert_same_updates(mine, theirs, start, 0.0)
        assert_same_state(resumed.snapshot(), clients.snapshot())
        question = Question("f", self.seed, 2, start[None])
        assert_same_evaluations(resumed.evaluate([question])[0], clients.evaluate([question])[0])

    def test_the_description_is_words_and_closing_twice_is_closing_once(self, make: Make, start: torch.Tensor) -> None:
        clients = make()
        for facts in (clients.describe(), clients.train([self.task(clients, start)]) and clients.describe()):
            assert isinstance(facts, Mapping)
            assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items())
        clients.close()
        clients.close()


def models_of(updates: Updates, start: torch.Tensor) -> torch.Tensor:
    """What each client alone would make of the global model: [clients, parameters]."""
    one = np.ones(1)
    rows = [updates.payload.select([row]).combine(start, one).reshape(-1) for row in range(len(updates.clients))]
    return torch.stack(rows).cpu() if rows else torch.zeros(0, len(start))


def assert_same_updates(found: Updates, expected: Updates, start: torch.Tensor, rounding: float) -> None:
    assert found.clients == expected.clients, (found.failures, expected.failures)
    assert found.samples.tolist() == expected.samples.tolist()
    assert found.criteria.keys() == expected.criteria.keys()
    mine, theirs = models_of(found, start), models_of(expected, start)
    if not rounding:
        assert torch.equal(mine, theirs)
        np.testing.assert_array_equal(found.losses, expected.losses)
        for name, values in expected.criteria.items():
            np.testing.assert_array_equal(found.criteria[name], values)
        return
    moved = torch.linalg.vector_norm(theirs - start.cpu(), dim=1)
    assert bool((torch.linalg.vector_norm(mine - theirs, dim=1) <= rounding * moved).all())
    np.testing.assert_allclose(found.losses, expected.losses, rtol=rounding)


def assert_same_evaluations(found: Evaluations, expected: Evaluations, rounding: float = 0.0) -> None:
    assert found.clients == expected.clients
    assert found.metrics.keys() == expected.metrics.keys()
    for name in ("samples", "right"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("scores", "losses"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=rounding)
    for name, values in expected.metrics.items():
        np.testing.assert_allclose(found.metrics[name], values, rtol=rounding)


def assert_same_state(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), value.cpu()) for name, value in expected.items())
