"""Seconds a round of algorithms with models of the clients' own: ours against one client after another in plain torch.

    python -m benchmarks.simulator --bench personal --device cuda --precision bfloat16,float32

Two scenes: 20 clients with PFLlib's network and batches of 10, 260 rows each, as on its board of Fashion-MNIST with a
tenth of the rows; 800 clients with the papers' network for MNIST, 75 rows each. `fedbn` has batch norm behind both
convolutions. A round is the training of all clients, the weighted sum, and the test of each client's own model. The
loop trains a few clients, which are alike, and its seconds are scaled up to all; it has torch's own defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.simulators.nets import settle
from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ConvNet, lenet
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.updates import Question, Task

IMAGE, CLASSES, BATCH, RATE = (1, 28, 28), 10, 10, 0.005
HEAD_EPOCHS, STRENGTH, SHARE, VALIDATION = 10, 1.0, 0.8, 0.2
"""The defaults of fedrep, ditto, fedala and fedfomo."""
ALGORITHMS = ("local-only", "fine-tuned", "fedbn", "ditto", "fedrep", "fedala", "apfl", "fedfomo")
WARM = 2
"""Rounds before those that are timed: FedALA first learns its weights in the second, in many passes."""
Tensors = Sequence[torch.Tensor]


def pfllib(*, norm: bool = False) -> nn.Module:
    """PFLlib's network, or the same with batch norm."""
    if not norm:
        return lenet(IMAGE, CLASSES, 32, 64, (512,))
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def mnist(*, norm: bool = False) -> nn.Module:
    """The papers' network for MNIST, or the same with batch norm."""
    if not norm:
        return ConvNet(IMAGE, (32, 64), 5, 512, CLASSES)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2),
        nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """Clients that are alike."""

    name: str
    network: Callable[..., nn.Module]
    model: ModelSettings
    clients: int
    rows: int


def scenes(counts: Sequence[int]) -> list[Scene]:
    """Return both scenes with so many clients."""
    own = ModelSettings(name="lenet", arguments={"first": 32, "second": 64, "hidden": [512]})
    both = [("pfllib", pfllib, own, 260), ("mnist", mnist, ModelSettings(name="cnn-mnist"), 75)]
    return [Scene(*of[:3], clients, of[3]) for of, clients in zip(both, counts, strict=True)]


def noise(scene: Scene) -> Population:
    """Return clients with as many rows each, of noise, and a third as many to test on."""
    draw, tested = torch.Generator().manual_seed(1), scene.rows // 3
    each = scene.rows + tested
    features = torch.randn((scene.clients * each, *IMAGE), generator=draw)
    labels = torch.randint(0, CLASSES, (len(features),), generator=draw)
    ends = [np.arange(n * each, (n + 1) * each) for n in range(scene.clients)]
    people = tuple(ClientRows(f"c{n:03d}", mine[: scene.rows], mine[scene.rows :]) for n, mine in enumerate(ends))
    return Population(Dataset("noise", features, labels, CLASSES), people, np.zeros(0, dtype=np.int64))


class Loop:
    """One client after another in plain torch: each method is one client's round of an algorithm, before its test."""

    def __init__(self, scene: Scene, people: Population, device: torch.device, *, norm: bool) -> None:
        self.net, self.other = (scene.network(norm=norm).to(device).train() for _ in range(2))
        self.all = list(self.net.parameters())
        self.head, self.body = self.all[-2:], self.all[:-2]
        self.received, self.own = ([each.detach().clone() for each in self.all] for _ in range(2))
        self.weights = [torch.ones_like(each) for each in self.head]
        mine = people.clients[0]
        x, y = (part.to(device) for part in (people.dataset.features, people.dataset.labels))
        self.x, self.y, self.tested, self.clients = x[mine.train], y[mine.train], x[mine.test], scene.clients

    def batches(self, epochs: int = 1, share: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the client's batches, drawn anew in each epoch."""
        count = int(share * len(self.x))
        orders = [torch.randperm(count, device=self.x.device).split(BATCH) for _ in range(epochs)]
        return [(self.x[rows], self.y[rows]) for order in orders for rows in order]

    def load(self, numbers: Tensors) -> None:
        """Let the client go on from these numbers."""
        with torch.no_grad():
            torch._foreach_copy_(self.all, list(numbers))

    def sgd(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], moving: Tensors, pull: Tensors = ()) -> None:
        """Steps of SGD of some parameters, held near others where these are given."""
        for x, y in batches:
            slopes = torch.autograd.grad(functional.cross_entropy(self.net(x), y), moving)
            with torch.no_grad():
                if pull:
                    torch._foreach_add_(slopes, torch._foreach_sub(moving, pull), alpha=STRENGTH)
                torch._foreach_add_(moving, slopes, alpha=-RATE)

    def plain(self) -> None:
        """FedAvg's round, and local-only's, fedbn's and fine-tuned's."""
        self.load(self.received)
        self.sgd(self.batches(), self.all)

    def ditto(self) -> None:
        """The global model, then the client's own."""
        self.plain()
        self.load(self.own)
        self.sgd(self.batches(), self.all, self.received)

    def fedrep(self) -> None:
        """The head for some epochs, then the body."""
        self.load(self.received)
        self.sgd(self.batches(HEAD_EPOCHS), self.head)
        self.sgd(self.batches(), self.body)

    def fedala(self) -> None:
        """The weights of the head's mixture in one pass over a share of the rows, then training."""
        self.load(self.received)
        own = [each + 0.01 for each in self.own[-2:]]
        change = torch._foreach_sub(self.received[-2:], own)
        for x, y in self.batches(1, SHARE):
            with torch.no_grad():
                torch._foreach_copy_(self.head, torch._foreach_add(own, torch._foreach_mul(change, self.weights)))
            slopes = torch.autograd.grad(functional.cross_entropy(self.net(x), y), self.head)
            with torch.no_grad():
                torch._foreach_sub_(self.weights, torch._foreach_mul(slopes, change))
                torch._foreach_clamp_min_(self.weights, 0.0)
                torch._foreach_clamp_max_(self.weights, 1.0)
        self.sgd(self.batches(), self.all)

    def apfl(self) -> None:
        """The global model and the client's own, step by step on the same batches."""
        self.load(self.received)
        mixed, alpha = list(self.other.parameters()), 0.5
        for number, (x, y) in enumerate(self.batches()):
            with torch.no_grad():
                torch._foreach_copy_(mixed, torch._foreach_lerp(self.all, self.own, alpha))
            slopes = torch.autograd.grad(functional.cross_entropy(self.other(x), y), mixed)
            if number == 0:
                with torch.no_grad():
                    along = torch._foreach_mul(torch._foreach_sub(self.own, self.all), slopes)
                    alpha = min(max(alpha - RATE * float(sum(each.sum() for each in along)), 0.0), 1.0)
            with torch.no_grad():
                torch._foreach_add_(self.own, slopes, alpha=-RATE * alpha)
            self.sgd([(x, y)], self.all)

    def fedfomo(self) -> None:
        """Training on a part of the rows, then the loss of every client's model on the others."""
        kept = len(self.x) - int(np.ceil(VALIDATION * len(self.x)))
        self.load(self.own)
        self.sgd([(x, y) for x, y in self.batches(1, kept / len(self.x))], self.all)
        mixed, gains = list(self.other.parameters()), list[torch.Tensor]()
        with torch.no_grad():
            for _ in range(self.clients):
                torch._foreach_copy_(mixed, self.received)
                loss = functional.cross_entropy(self.other(self.x[kept:]), self.y[kept:])
                apart = torch._foreach_norm(torch._foreach_sub(self.received, self.own))
                gains.append(loss / torch.stack(apart).norm().clamp_min(1e-12))
            total = torch._foreach_mul(self.own, 0.0)
            for gain in torch.stack(gains).softmax(0):
                torch._foreach_add_(total, torch._foreach_mul(self.received, gain))

    def test(self) -> None:
        """Test the model that the client has."""
        with torch.no_grad():
            self.net.eval()(self.tested).argmax(dim=1)
        self.net.train()

    def round(self, algorithm: str) -> None:
        """Do one client's round, and add what it sends up."""
        work: Mapping[str, Callable[[], None]] = {
            "ditto": self.ditto, "fedrep": self.fedrep, "fedala": self.fedala, "apfl": self.apfl,
            "fedfomo": self.fedfomo,
        }  # fmt: skip
        work.get(algorithm, self.plain)()
        with torch.no_grad():
            torch._foreach_add(self.received, self.all, alpha=1 / self.clients)
        if algorithm == "fine-tuned":
            self.plain()
        self.test()


def best(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the seconds of the fastest of some rounds."""
    found: list[float] = []
    for _ in range(rounds):
        settle(device)
        begun = time.perf_counter()
        work()
        settle(device)
        found.append(time.perf_counter() - begun)
    return min(found)


class Ours:
    """A simulation of a scene, round after round of one algorithm at a time."""

    def __init__(self, scene: Scene, people: Population, compute: ComputeSettings, *, norm: bool) -> None:
        model = ModelSettings(name=lambda: scene.network(norm=True)) if norm else scene.model  # type: ignore[arg-type]
        training = TrainingSettings(learning_rate=RATE, batch_size=BATCH, epochs=1)
        self.clients = Simulation({0: people}, model, training, compute, [], rounds=2000)
        self.names, self.algorithm, self.taken = tuple(self.clients.names(0)), Algorithm(), 0
        self.shared = SimulationServer(self.clients).initial(0)
        self.weights = np.full(scene.clients, 1 / scene.clients)

    def begin(self, algorithm: str) -> None:
        """Go on with another algorithm; no client keeps anything yet."""
        self.clients.restore({})
        self.algorithm, self.taken = AlgorithmSettings(name=algorithm).made(), 0

    def round(self) -> None:
        """Train all clients, add their models up, and test each client's own."""
        self.taken += 1
        (updates,) = self.clients.train([Task("f", 0, self.taken, self.names, self.shared, algorithm=self.algorithm)])
        self.shared = updates.payload.combine(self.shared, self.weights)
        asked = Question("f", 0, self.taken, self.shared[None], algorithm=self.algorithm)
        self.clients.evaluate([asked])


def seconds_of_loop(scene: Scene, people: Population, device: torch.device, algorithm: str) -> float:
    """Return the seconds of a round in plain torch, from a few clients."""
    plain, few = Loop(scene, people, device, norm=algorithm == "fedbn"), 2 if device.type == "cuda" else 1
    plain.round(algorithm)
    return scene.clients * best(lambda: [plain.round(algorithm) for _ in range(few)], device, 3) / few


def rows_of(
    scene: Scene, people: Population, loop: Mapping[str, float], precision: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield what is found of each algorithm in one scene and precision; `loop` has the seconds of the plain loop."""
    device = torch.device(options.device)
    compute = ComputeSettings(device=options.device, precision=precision, engine=options.engine)  # type: ignore[arg-type]
    for norm in (False, True):
        ours = Ours(scene, people, compute, norm=norm)
        for name in (name for name in loop if (name == "fedbn") == norm):
            begun = time.perf_counter()
            ours.begin(name)
            for _ in range(WARM):
                ours.round()
            settle(device)
            ready, seconds = time.perf_counter() - begun, best(ours.round, device, options.rounds)
            yield {
                "scene": scene.name, "clients": scene.clients, "precision": precision, "algorithm": name,
                "engine": ours.clients.describe()["engine_choice"], "ready": round(ready, 1),
                "loop": round(loop[name], 4), "ours": round(seconds, 5), "ratio": round(loop[name] / seconds, 2),
            }  # fmt: skip
        ours.clients.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all algorithms in both scenes and in each precision."""
    device, rows, ratio = torch.device(options.device), list[dict[str, Any]](), dict[str, dict[str, dict[str, float]]]()
    for scene in scenes(options.clients):
        people = noise(scene)
        loop = {name: seconds_of_loop(scene, people, device, name) for name in options.algorithms}
        for precision in options.precision:
            for row in rows_of(scene, people, loop, precision, options):
                rows.append(row)
                found = ratio.setdefault(f"{scene.name} {scene.clients}", {}).setdefault(precision, {})
                found[row["algorithm"]] = row["ratio"]
                if options.format == "text":
                    print(json.dumps(row), flush=True)
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"bench": "personal", "ratio": ratio, "rows": rows, "device": card, "torch": torch.__version__}
