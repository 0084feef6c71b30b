"""Losses of one's own: every wrong kind is one line, right ones work from a file and from Python, none can write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard import Experiment
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.errors import UserError
from steelyard.learning.losses import per_sample
from steelyard.learning.settings import TrainingSettings
from steelyard.messages import LossState, Question, Task, Updates
from steelyard.usercode import hand_over

GOOD = "torch.nn.functional.cross_entropy(o, y, reduction='none')"
WRONG = {
    "wrong signature": ("def loss(o):\n    return o", "cannot be called with outputs of shape"),
    "a float": ("def loss(o, y):\n    return 0.5", "returned float; allowed: a tensor with one loss per sample"),
    "nothing": ("def loss(o, y):\n    pass", "returned NoneType"),
    "the mean": (f"def loss(o, y):\n    return {GOOD}.mean()", r"returned shape \(\) for 2 samples; allowed: one loss"),
    "a column": (f"def loss(o, y):\n    return {GOOD}[:, None]", r"returned shape \(2, 1\) for 2 samples"),
    "one per output": ("def loss(o, y):\n    return o", r"returned shape \(2, 10\) for 2 samples"),
    "no gradient": (f"def loss(o, y):\n    return {GOOD}.detach()", "without a gradient"),
    "whole numbers": ("def loss(o, y):\n    return (o.argmax(1) != y).long()", "without a gradient"),
    "raises": ("def loss(o, y):\n    raise KeyError('x')", "KeyError: 'x'"),
    "writes what it needs": (
        f"def loss(o, y):\n    f = {GOOD}\n    y.zero_()\n    return f",
        "no gradient can be taken",
    ),
    "nan": (f"def loss(o, y):\n    return {GOOD} * float('nan')", r"gave \[nan, nan\] for the first model"),
    "infinite": (f"def loss(o, y):\n    return {GOOD} + float('inf')", r"gave \[inf, inf\] for the first model"),
    "not callable": ("loss = 3", "has no function or class 'loss'"),
    "not there": ("other = 3", "has no function or class 'loss'"),
    "a file that fails": ("1 / 0", "fails when loaded: ZeroDivisionError"),
}


def train(loss: object, engine: str = "loop") -> Updates:
    people = cases.population((8, 8), 10, sizes=(23, 9))
    model, _, _ = cases.MODELS["mlp"]
    settings = TrainingSettings(batch_size=5, loss=loss)  # type: ignore[arg-type]
    clients = Simulation({0: people}, model, settings, ComputeSettings(engine=engine, device="cpu"))
    start = SimulationServer(clients).initial(0)
    return clients.train([Task("f", 0, 1, ("c0", "c1"), start)])[0]


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
@pytest.mark.parametrize("kind", list(WRONG))
def test_every_wrong_kind_of_loss_is_one_line(kind: str, engine: str, tmp_path: Path) -> None:
    text, message = WRONG[kind]
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\n{text}\n")
    with pytest.raises(UserError, match=message) as caught:
        train(f"{file}:loss", engine)
    assert str(caught.value).startswith("training.loss: ")
    assert "\n" not in str(caught.value)


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


def test_a_loss_handed_over_from_python_is_the_one_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def smoothed(o, y):\n"
        "    return torch.nn.functional.cross_entropy(o, y, label_smoothing=0.1, reduction='none')\n"
    )
    expected = train(f"{file}:smoothed").payload.models  # type: ignore[attr-defined]
    same = lambda o, y: smoothed(o, y)  # noqa: E731
    other = lambda o, y: 2 * smoothed(o, y)  # noqa: E731
    for loss in (smoothed, same, torch.nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")):
        assert torch.equal(train(loss).payload.models, expected)  # type: ignore[attr-defined]
    # Two functions without a name of their own do not take each other's part.
    first = TrainingSettings(loss=same)  # type: ignore[arg-type]
    assert first.loss != TrainingSettings(loss=other).loss  # type: ignore[arg-type]
    assert first.loss == TrainingSettings(loss=same).loss  # type: ignore[arg-type]
    assert torch.equal(train(first.loss).payload.models, expected)  # type: ignore[attr-defined]


def test_an_experiment_takes_a_model_and_a_loss_from_python(tmp_path: Path) -> None:
    experiment = Experiment.model_validate(
        {
            "model": {"name": lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))},
            "training": {"loss": lambda o, y: smoothed(o, y), "batch_size": 32},
            "rounds": {"count": 1},
        }
    )
    result = experiment.run(tmp_path / "run")
    assert result.summary["status"] == "finished"


def test_handing_over_again_gives_the_same_name() -> None:
    def local(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return smoothed(o, y)

    assert hand_over(local) == hand_over(local)


def test_a_loss_that_writes_changes_nobody_s_data(tmp_path: Path) -> None:
    file = tmp_path / "rude.py"
    file.write_text(
        "import torch\n"
        "def loss(o, y):\n"
        "    found = torch.nn.functional.cross_entropy(o.clone(), y.clone(), reduction='none')\n"
        "    y.zero_()\n"
        "    with torch.no_grad():\n        o.zero_()\n"
        "    return found\n"
    )
    people = cases.population((8, 8), 10)
    labels, features = people.dataset.labels.clone(), people.dataset.features.clone()
    model, _, _ = cases.MODELS["mlp"]
    for engine in ("loop", "threads", "stacked"):
        settings = TrainingSettings(batch_size=5, loss=f"{file}:loss")
        clients = Simulation({0: people}, model, settings, ComputeSettings(engine=engine, device="cpu"))
        plain = Simulation(
            {0: people}, model, TrainingSettings(batch_size=5), ComputeSettings(engine=engine, device="cpu")
        )
        start = SimulationServer(clients).initial(0)
        task = Task("f", 0, 1, tuple(clients.names(0)), start)
        question = Question("f", 0, 1, torch.stack([start, start]))
        # Float32 sums in another order, where the built-in loss has a closed form.
        assert torch.allclose(clients.train([task])[0].payload.models, plain.train([task])[0].payload.models, atol=1e-5)  # type: ignore[attr-defined]
        (mine,), (theirs,) = clients.evaluate([question]), plain.evaluate([question])
        assert mine.scores.tolist() == theirs.scores.tolist()
        assert mine.losses == pytest.approx(theirs.losses)
    assert torch.equal(people.dataset.labels, labels)
    assert torch.equal(people.dataset.features, features)


def test_its_answer_is_checked_in_training_too() -> None:
    """A loss that is right for two samples and wrong for five is named when it happens."""
    name = hand_over(lambda o, y: smoothed(o, y)[:2])
    each = per_sample(LossState(name))
    with pytest.raises(UserError, match=r"returned shape \(2,\) for 5 samples"):
        each(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))
