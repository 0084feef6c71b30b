import numpy as np
import pytest
import torch
from torch import nn

from steelyard.errors import UserError
from steelyard.learning.descent import Descent
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ScheduleSettings
from steelyard.learning.training import TrainingSettings, orders, train_client
from steelyard.messages import LossState

X = torch.tensor([[1.0], [2.0], [4.0]])
Y = torch.tensor([2.0, 3.0, 5.0])


def train(
    settings: TrainingSettings, start: float, descent: Descent | None = None, correction: float | None = None
) -> tuple[float, float]:
    module = nn.Linear(1, 1, bias=False)
    order = np.broadcast_to(np.arange(3), (settings.epochs, 3))
    given = (module, Layout.of(module), torch.tensor([start]), X, Y, order, settings, LossState("squared-error"))
    vector = None if correction is None else torch.tensor([correction])
    flat, mean_loss = train_client(*given, descent=descent, correction=vector)
    return float(flat[0]), mean_loss


def test_one_full_step_by_hand() -> None:
    # gradient of mean (wx − y)²: 2/3 Σ x(wx − y) = 2/3 (−1 + −2 + −4) = −14/3 at w = 1
    weight, mean_loss = train(TrainingSettings(learning_rate=0.1, batch_size="full"), 1.0)
    assert weight == pytest.approx(1 + 0.1 * 14 / 3)
    assert mean_loss == pytest.approx(1.0)


def test_small_batches_divide_by_their_own_size() -> None:
    first = 1.0 - 0.1 * (1 * (1 - 2) + 2 * (2 - 3))  # mean over two: 2/2 Σ
    second = first - 0.1 * 2 * 4 * (4 * first - 5)  # the last batch holds one sample
    assert train(TrainingSettings(learning_rate=0.1, batch_size=2), 1.0)[0] == pytest.approx(second)


def test_momentum_decay_pull_and_corrections_by_hand() -> None:
    settings = TrainingSettings(learning_rate=0.1, momentum=0.5, weight_decay=0.2, epochs=2, batch_size="full")

    def gradient(w: float) -> float:
        return 2 / 3 * sum(x * (w * x - y) for x, y in ((1, 2), (2, 3), (4, 5))) + 0.2 * w + 0.3 * (w - 1.0)

    velocity = gradient(1.0)
    w = 1.0 - 0.1 * velocity
    velocity = 0.5 * velocity + gradient(w)
    assert train(settings, 1.0, Descent.of(settings, 0.3))[0] == pytest.approx(w - 0.1 * velocity)
    # A correction of the gradient goes through the momentum.
    velocity = gradient(1.0) + 0.7
    w = 1.0 - 0.1 * velocity
    velocity = 0.5 * velocity + gradient(w) + 0.7
    assert train(settings, 1.0, Descent.of(settings, 0.3, "gradient"), 0.7)[0] == pytest.approx(w - 0.1 * velocity)
    # A correction of the step does not.
    velocity = gradient(1.0)
    w = 1.0 - 0.1 * (velocity + 0.7)
    velocity = 0.5 * velocity + gradient(w)
    expected = w - 0.1 * (velocity + 0.7)
    assert train(settings, 1.0, Descent.of(settings, 0.3, "step"), 0.7)[0] == pytest.approx(expected)


def test_class_weights_scale_the_gradient() -> None:
    module = nn.Linear(1, 2, bias=False)
    layout = Layout.of(module)
    settings = TrainingSettings(learning_rate=1.0, batch_size="full")
    x, y = torch.ones(2, 1), torch.tensor([0, 1])
    order = np.zeros((1, 2), dtype=np.int64) + np.arange(2)
    flat, mean_loss = train_client(
        module, layout, torch.zeros(2), x, y, order, settings, LossState("cross-entropy", (1.0, 3.0))
    )
    # d/dlogit of κ_y·CE at equal logits: κ_y (½ − [c = y]); mean over two samples
    assert flat.tolist() == pytest.approx([-((-0.5) + 1.5) / 2, -((0.5) - 1.5) / 2])
    assert mean_loss == pytest.approx(2 * np.log(2))


def test_order_is_a_pure_function_of_seed_round_client() -> None:
    settings = TrainingSettings(epochs=3, batch_size=2)
    alone = orders(1, 2, ["b"], 7, settings)
    together = orders(1, 2, ["a", "b"], 7, settings)
    assert np.array_equal(alone[0], together[1])
    assert not np.array_equal(orders(1, 3, ["b"], 7, settings), alone)
    assert sorted(alone[0, 2]) == list(range(7))
    assert np.array_equal(orders(1, 2, ["b"], 2, settings)[0, 0], [0, 1])


def test_layers_that_draw_do_not_disturb_the_global_generator() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
    layout = Layout.of(module)
    order = np.broadcast_to(np.arange(3), (1, 3))
    state = torch.get_rng_state()

    def once(chance: int) -> torch.Tensor:
        return train_client(module, layout, torch.ones(2), X, Y, order, TrainingSettings(batch_size=1),
                            LossState("squared-error"), chance)[0]  # fmt: skip

    first = once(5)
    assert torch.equal(first, once(5))
    assert not torch.equal(first, once(6))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": 0}, {"momentum": 1.0}, {"epochs": 0}, {"batch_size": "all"}, {"batchsize": 3}]
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        TrainingSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("updates", [1, 2, 3, 4, 7])
def test_a_number_of_updates_is_the_first_so_many_steps(updates: int) -> None:
    """Three rows in batches of two: a step of two rows, one of one row, then the data begin anew."""

    def stepped(w: float, rows: list[int]) -> float:
        return w - 0.01 * 2 / len(rows) * sum(float(X[row] * (w * X[row] - Y[row])) for row in rows)

    settings = TrainingSettings(learning_rate=0.01, batch_size=2, updates=updates)
    order = orders(0, 1, ["a"], 3, settings)[0]
    batches = [batch for rows in order.tolist() for batch in (rows[:2], rows[2:])][:updates]
    expected, losses = 1.0, []
    for batch in batches:
        losses.append([(expected * float(X[row]) - float(Y[row])) ** 2 for row in batch])
        expected = stepped(expected, batch)
    module = nn.Linear(1, 1, bias=False)
    flat, loss = train_client(
        module, Layout.of(module), torch.tensor([1.0]), X, Y, order, settings, LossState("squared-error")
    )
    assert len(batches) == updates
    assert float(flat[0]) == pytest.approx(expected, rel=1e-5)
    last = [value for batch in losses[-2:] for value in batch]
    assert loss == pytest.approx(sum(last) / len(last), rel=1e-4)


def test_epochs_and_updates_exclude_each_other() -> None:
    with pytest.raises(UserError, match="updates: got 5 with epochs = 2; allowed: one of the two"):
        TrainingSettings(epochs=2, updates=5)


def test_schedules_by_hand() -> None:
    step = ScheduleSettings(kind="step", every=3, factor=0.5)
    assert [step.share(round, 10) for round in (1, 3, 4, 6, 7)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = ScheduleSettings(kind="cosine", lowest=0.2)
    assert [cosine.share(round, 4) for round in (1, 3, 5)] == pytest.approx([1, 0.6, 0.2])
