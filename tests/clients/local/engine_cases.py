"""Cases that every engine is held to: people, networks, losses and trainings, each against the engine `loop`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.models import ConvNet, DenseNet, ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages.algorithm import Algorithm, Vectors
from steelyard.messages.updates import LossState, Task, Updates

SIZES = (15, 9, 16, 1, 9)


def population(
    shape: tuple[int, ...],
    classes: int,
    sizes: tuple[int, ...] = SIZES,
    bytes_: bool = False,
    survival: bool = False,
    augment: Augmentation | None = None,
) -> Population:
    draw = np.random.default_rng(0)
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


class Tied(nn.Module):
    """One layer in two places, frozen parts, attention and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 8).requires_grad_(False)
        self.one = nn.Linear(8, 8)
        self.two = self.one
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.tokens = nn.Embedding(4, 8)
        self.dense = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(torch.arange(8, device=x.device)) + self.tokens((x.abs() * 2).long().clamp(max=3)[..., 0])
        x = self.norm(self.two(torch.relu(self.one(x))))
        return self.dense((x + self.attention(x, x, x, need_weights=False)[0]).mean(dim=1))


class Reused(nn.Module):
    """One layer of dropout in three places, two of them of one width; and a layer that has no part in the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)
        self.dense, self.idle = nn.Linear(3 * 64, 10), nn.Linear(40, 40)

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.drop(x), self.drop(x), self.other(x)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat(self.parts(x.flatten(1)), dim=1))


class Backbone(nn.Module):
    """A frozen body with batch norm, one head that is trained."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(12, affine=affine)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), norm, nn.ReLU()).requires_grad_(False)
        norm.running_mean.copy_(torch.linspace(-1, 1, 12))  # type: ignore[union-attr]
        self.head = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.4), nn.Linear(256, 12), nn.BatchNorm1d(12, momentum=0.3),
        nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def of(module: Callable[..., nn.Module], **arguments: Any) -> ModelSettings:
    return ModelSettings(name=module, **arguments)  # type: ignore[arg-type]


MODELS = {
    "cnn-digits": (ModelSettings(name="cnn-digits"), (8, 8), 10),
    "cnn-odd": (ModelSettings(name="cnn", kernel=5, channels=(3, 5), hidden=(7,)), (2, 11, 9), 4),
    "cnn-authors": (ModelSettings(name="cnn-mnist-authors", kernel=3, channels=(3, 5), hidden=(7,)), (9, 8), 4),
    "keras": (ModelSettings(name="cnn-keras", channels=(3, 5), hidden=(6,)), (2, 9, 8), 4),
    "cnn-celeba": (ModelSettings(name="cnn-celeba", hidden=(8,), channels=(4, 6)), (3, 8, 8), 2),
    "mlp": (ModelSettings(name="mlp", hidden=(16, 8)), (8, 8), 10),
    "logistic": (ModelSettings(name="logistic"), (2, 8, 8), 3),
    "linear": (ModelSettings(name="linear"), (5,), 0),
    "own": (of(Own), (8, 8), 10),
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10)),
    "normed": normed,
    "tied": Tied,
    "encoded": Encoded,
    "reused": Reused,
    "backbone": Backbone,
    "frozen dense": lambda: frozen(DenseNet(64, (12,), 10), "layers.0.weight", "layers.1.bias"),
    "frozen cnn": lambda: frozen(ConvNet((1, 8, 8), (4, 6), 3, 8, 10), "conv1.weight", "dense1.bias"),
    "frozen own": lambda: frozen(Own(10), "body.1.weight", "body.2.weight"),
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
WINDOWS = {
    "reflect": Augmentation(2, "reflect", flip=True),
    "zero": Augmentation(2, "zero", flip=True, black=(-0.5, 0.25)),
}


@dataclass(frozen=True)
class Case:
    """What is trained, on what, and how."""

    model: ModelSettings
    people: Population
    training: TrainingSettings = TRAINING["mini"]
    loss: LossState = field(default_factory=LossState)
    tolerance: float = 1e-4
    """How far an update may be from the loop's, relative to its size: float32 keeps 6e-8 of a number, sums of a few
    hundred of them in another order 1e-6, and some steps one after another ten to a hundred times that."""


def pinball(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A user's loss without a closed form."""
    apart = outputs.squeeze(-1) - labels
    return (0.7 * apart).where(apart > 0, -0.3 * apart)


def masked() -> Population:
    """Images of 8×8 in which a bright square is class 1 and a dark one class 2."""
    people = population((1, 8, 8), 0, (7, 4, 9, 1))
    image = people.dataset.features[:, 0]
    masks = ((image > 0.8).long() + 2 * (image < -0.8).long()).to(torch.uint8).flatten(1)
    return replace(people, dataset=replace(people.dataset, labels=masks, task="segmentation", targets=3))


def labelled() -> Population:
    people = population((5,), 0, (7, 4, 9, 1))
    found = (people.dataset.features[:, :3] > 0.4).float()
    return replace(people, dataset=replace(people.dataset, labels=found, task="multi-label", targets=3))


UNET = ModelSettings(name="auto", arguments={"wide": 4, "depth": 1})
# Steps of both optimisers and of norms are divided by what may be near 0, and rounding with it.
ROUGH = {"adam": 5e-3, "adadelta": 5e-3, "normed": 1e-3}


@functools.cache
def people_of(name: str, windows: str = "") -> Population:
    _, shape, classes = MODELS[name]
    return population(shape, classes, bytes_=name == "cnn-digits", augment=WINDOWS.get(windows))


def case(name: str) -> Case:
    """Return the case of a name: a network, how it is trained, and what is special about it."""
    network, how, *more = name.split(", ")
    training = (TRAINING | OPTIMISERS)[how]
    tolerance = ROUGH.get(how, ROUGH.get(network, 1e-4))
    if more == ["survival"]:
        return Case(MODELS["linear"][0], population((5,), 0, survival=True), training)
    if more == ["barron"]:
        people = population((8, 8), 0)
        model = ModelSettings(name="cnn", channels=(2, 3), hidden=(4,))
        return Case(model, people, training, LossState("barron", None, 0.5, 0.8))
    if more == ["pinball"]:
        model, own = ModelSettings(name="cnn", channels=(2, 3), hidden=(4,)), TrainingSettings(loss=pinball).loss  # type: ignore[arg-type]
        return Case(model, population((8, 8), 0), training.model_copy(update={"loss": own}))
    if more == ["labels"]:
        return Case(ModelSettings(name=network), labelled(), training)
    if more and more[0] in ("pixel-cross-entropy", "dice"):
        return Case(UNET, masked(), training.model_copy(update={"loss": more[0]}))
    if network in MODELS:
        return Case(MODELS[network][0], people_of(network, *more), training, tolerance=tolerance)
    # 8 rows in batches of 7 leave one over, which batch norm joins to the batch before.
    return Case(of(NETWORKS[network]), population((8, 8), 10, (8, 4, 9)), training, tolerance=tolerance)


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


def tasks_of(names: Sequence[str], start: torch.Tensor, what: Case, count: int = 2) -> list[Task]:
    """Two federations, one with class weights and without the first client."""
    classes = what.people.dataset.classes
    weights = tuple(1 + 0.5 * c for c in range(classes)) if classes else None
    push = torch.linspace(-0.05, 0.05, len(start), device=start.device)
    given: dict[str, Any] = {"algorithm": algorithm_of(what.training), "vectors": {"push": push}}
    return [
        Task("plain", 0, 3, tuple(names), start, what.loss, **given),
        Task("weighted", 1, 3, tuple(names)[1:], start * 1.1, replace(what.loss, class_weights=weights), **given),
    ][:count]


def simulated(what: Case, engine: str = "loop", device: str = "cpu", **compute: Any) -> Simulation:
    given = ComputeSettings(engine=engine, device=device, **{"threads": 2, **compute})
    return Simulation({0: what.people, 1: what.people}, what.model, what.training, given)


def trained(
    what: Case, engine: str = "loop", device: str = "cpu", **compute: Any
) -> tuple[list[Updates], torch.Tensor, Simulation]:
    """Train two federations, one with class weights, in one call."""
    clients = simulated(what, engine, device, **compute)
    start = SimulationServer(clients).initial(0)
    return clients.train(tasks_of(clients.names(0), start, what)), start, clients


@functools.cache
def by_the_loop(name: str) -> tuple[list[Updates], torch.Tensor, Simulation]:
    """What every engine is held to, the model that training starts from, and who trained."""
    return trained(case(name))


def task_of(clients: Simulation, round: int = 1, names: tuple[str, ...] = (), **given: Any) -> Task:
    return Task("f", 0, round, names or tuple(clients.names(0)), SimulationServer(clients).initial(0), **given)


def engine_of(clients: Simulation) -> str:
    """The engine that trained, without how many stood in a stack."""
    return clients.describe()["engine_choice"].partition(":")[0]


def assert_alike(found: list[Updates], expected: list[Updates], start: torch.Tensor, tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.clients == theirs.clients
        assert_near(mine.payload.models, mine.losses, theirs, start, tolerance)


def assert_near(models: torch.Tensor, losses: Any, expected: Updates, start: torch.Tensor, tolerance: float) -> None:
    wanted = expected.payload.models.cpu()
    apart = torch.linalg.vector_norm(models.cpu() - wanted, dim=1)
    moved = torch.linalg.vector_norm(wanted - start.cpu(), dim=1)
    assert (apart <= tolerance * moved.clamp_min(1e-3)).all(), (apart / moved).tolist()
    # Losses are taken along the way, on models that are apart by up to the tolerance; never more than 5 %.
    assert np.allclose(losses, expected.losses, rtol=min(max(10 * tolerance, 1e-4), 0.05), atol=1e-5)
