"""Where a federation starts."""

from __future__ import annotations

from tests.rounds.scripted import Server, federation

from steelyard.messages import LossState
from steelyard.rounds.state import RoundRecord
from steelyard.weighing.priorities import OrderState


def test_a_federation_starts_with_the_servers_model_and_its_own_order() -> None:
    begun = federation(seed=4, criteria=("DS", "LD"), priority="LD>DS").start(Server())
    assert begun.parameters.tolist() == [4.0] * 10
    assert begun.orders == OrderState((1, 0), 0.0, 0, {})
    assert begun.loss == LossState()
    assert (begun.round, begun.finished, begun.memory) == (0, False, {})


def test_a_record_says_nothing_that_did_not_happen() -> None:
    bare = RoundRecord("f", 1, 0.5)
    assert (bare.updates, bare.weighing, bare.evaluations, bare.accuracy, bare.loss) == (None,) * 5
    assert (bare.order, bare.kept_old, bare.tried, bare.tests, bare.server_metrics) == ((), False, (), 0, {})
