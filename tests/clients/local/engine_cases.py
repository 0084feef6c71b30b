"""Cases that every engine is held to: models, sizes, losses and SGD variants."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from steelyard.algorithms.algorithm import Algorithm, Vectors
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import LossState, Task, Updates

SIZES = (15, 9, 16, 1, 9)


def population(
    shape: tuple[int, ...],
    classes: int,
    sizes: tuple[int, ...] = SIZES,
    seed: int = 0,
    bytes_: bool = False,
    survival: bool = False,
    augment: Augmentation | None = None,
) -> Population:
    draw = np.random.default_rng(seed)
    count = sum(sizes) + 12
    labels = torch.from_numpy(draw.integers(0, max(classes, 2), count))
    if bytes_:
        features = torch.from_numpy(draw.integers(0, 256, (count, *shape)).astype(np.uint8))
    else:
        features = torch.from_numpy(draw.normal(size=(count, *shape)).astype(np.float32))
    if not classes:
        labels = torch.from_numpy(draw.normal(size=count).astype(np.float32))
    if survival:
        labels = torch.from_numpy((draw.integers(1, 9, count) * draw.choice([-1, 1], count)).astype(np.float32))
    clients, begin = [], 0
    rows = draw.permutation(count)
    for number, size in enumerate(sizes):
        clients.append(ClientRows(f"c{number}", np.sort(rows[begin : begin + size]), rows[-12 + number : -11 + number]))
        begin += size
    dataset = Dataset("toy", features, labels, classes, task="survival" if survival else None, augment=augment)
    return Population(dataset, tuple(clients), rows[-12:])


class Own(nn.Module):
    """A user's module that vmap takes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Drawing(nn.Module):
    """A module that draws at random, so clients cannot share a step."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(nn.functional.dropout(x.flatten(1), 0.3, self.training))


class Normed(nn.Module):
    """A module with running means, which change while it trains."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.dense = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.norm(x.flatten(1)))


class Encoded(nn.Module):
    """torch's encoder with its usual dropout, with padding, and a recurrent network of several layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.recurrent = nn.LSTM(8, 6, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(6, 5, 2, dropout=0.3)
        self.dense = nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :4]  # few places: each is a cell of its own in a stack
        padded = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padded[:, -1:] = True
        x = self.recurrent(self.encoder(x, src_key_padding_mask=padded))[0]
        return self.dense(self.gru(x.transpose(0, 1))[0][-1])


MODELS = {
    "cnn-digits": (ModelSettings(name="cnn-digits"), (8, 8), 10),
    "cnn-odd": (ModelSettings(name="cnn", kernel=5, channels=(3, 5), hidden=(7,)), (2, 11, 9), 4),
    "cnn-authors": (ModelSettings(name="cnn-mnist-authors", kernel=3, channels=(3, 5), hidden=(7,)), (9, 8), 4),
    "keras": (ModelSettings(name="cnn-keras", channels=(3, 5), hidden=(6,)), (2, 9, 8), 4),
    "cnn-celeba": (ModelSettings(name="cnn-celeba", hidden=(8,), channels=(4, 6)), (3, 8, 8), 2),
    "mlp": (ModelSettings(name="mlp", hidden=(16, 8)), (8, 8), 10),
    "logistic": (ModelSettings(name="logistic"), (5,), 3),
    "linear": (ModelSettings(name="linear"), (5,), 0),
    "own": (ModelSettings(name=Own), (8, 8), 10),
}
TRAINING = {
    "mini": TrainingSettings(learning_rate=0.1, batch_size=7, epochs=1),
    "full": TrainingSettings(learning_rate=0.1, batch_size="full", epochs=2),
    "heavy": TrainingSettings(learning_rate=0.05, batch_size=8, epochs=2, momentum=0.6, weight_decay=0.01),
    "updates": TrainingSettings(learning_rate=0.1, batch_size=7, updates=5),
    "corrected": TrainingSettings(learning_rate=0.05, batch_size=8, epochs=2, momentum=0.5),
}
OPTIMISERS = {
    "adam": TrainingSettings(optimiser="adam", learning_rate=0.01, batch_size=8, epochs=2),
    "adadelta": TrainingSettings(optimiser="adadelta", learning_rate=1.0, batch_size=8, epochs=2),
}


class Pushed(Algorithm):
    """Holds clients near their start and pushes the gradient of each client by another vector."""

    corrects: ClassVar = "gradient"
    keeps: ClassVar = ("nothing",)
    receives: ClassVar = ("push",)

    @property
    def pull(self) -> float:
        return 0.2

    def correction(self, received: Vectors, kept: Vectors) -> torch.Tensor:
        each = torch.linspace(0.5, 1.5, len(kept["nothing"]), device=received["push"].device)
        return each[:, None] * received["push"]


class Carried(Pushed):
    """Pushes the step that a client takes, after its momentum."""

    corrects: ClassVar = "step"


def algorithm_of(training: TrainingSettings) -> Algorithm:
    """What algorithms add to a step goes with some of the trainings above, so that every engine meets it."""
    if training == TRAINING["corrected"]:
        return Carried()
    return Pushed() if training.momentum or training.optimiser == "adam" else Algorithm()


def tasks_of(names: Sequence[str], start: torch.Tensor, classes: int, training: TrainingSettings) -> list[Task]:
    """Two federations, one with class weights and without the first client."""
    weights = tuple(1 + 0.5 * c for c in range(classes)) if classes else None
    push = torch.linspace(-0.05, 0.05, len(start), device=start.device)
    given = {"algorithm": algorithm_of(training), "vectors": {"push": push}}
    return [
        Task("plain", 0, 3, tuple(names), start, **given),
        Task("weighted", 1, 3, tuple(names)[1:], start * 1.1, LossState(class_weights=weights), **given),
    ]


def trained(
    engine: str,
    people: Population,
    model: ModelSettings,
    training: TrainingSettings,
    device: str = "cpu",
    precision: str = "float32",
) -> tuple[list[Updates], torch.Tensor, Simulation]:
    """Train two federations, one with class weights, in one call."""
    clients = Simulation(
        {0: people, 1: people}, model, training,
        ComputeSettings(engine=engine, device=device, precision=precision, threads=2),
    )  # fmt: skip
    start = SimulationServer(clients).initial(0)
    tasks = tasks_of(clients.names(0), start, people.dataset.classes, training)
    return clients.train(tasks), start, clients


def assert_alike(found: list[Updates], expected: list[Updates], start: torch.Tensor, tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.clients == theirs.clients
        apart = torch.linalg.vector_norm(mine.payload.models.cpu() - theirs.payload.models.cpu(), dim=1)
        moved = torch.linalg.vector_norm(theirs.payload.models.cpu() - start.cpu(), dim=1)
        assert float((apart / moved).max()) < tolerance
        # Losses are taken along the way, on models that are apart by up to the tolerance; never more than 5 %.
        assert np.allclose(mine.losses, theirs.losses, rtol=min(max(10 * tolerance, 1e-4), 0.05), atol=1e-5)
