"""Attacks on clients of digits: what is read of samples, who was trained on, how well a model is copied."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from steelyard.base.randomness import generator
from steelyard.data import DataSettings, load
from steelyard.learning.inversion import gradient, likeness, read_off, search
from steelyard.learning.models import build
from steelyard.learning.settings import ModelSettings
from steelyard.messages.updates import Floats
from steelyard.privacy.accounting import gaussian_noise
from steelyard.privacy.clipping import noisy_sum
from steelyard.privacy.noise import Source, SystemSource

Way = Literal["analytic", "search"]
READ = 0.99
"""A sample whose correlation with what was found is above this counts as read; the mean image of a class, which nobody
need send, has 0.82 with its samples on average."""
DELTA = 1e-5


@dataclass(frozen=True)
class Protection:
    """What stands between a client's gradient and the server."""

    name: str
    epsilon: float | None = None
    """Noise on the device for this ε in one round; None: no noise."""
    clients: int = 1
    """The server sees the sum of so many clients only."""


@dataclass(frozen=True)
class Attack:
    """One way to attack one kind of client."""

    model: str
    samples: int
    way: Way


PROTECTIONS = (
    Protection("none"),
    Protection("sum of 10 clients", clients=10),
    Protection("sum of 100 clients", clients=100),
    Protection("local noise, ε = 100", epsilon=100.0),
    Protection("local noise, ε = 10", epsilon=10.0),
    Protection("local noise, ε = 1", epsilon=1.0),
)


@dataclass(frozen=True, eq=False)
class Victims:
    """The digits that clients hold, between 0 and 1, and the models that they train; make it with `victims`."""

    rows: torch.Tensor
    labels: torch.Tensor
    models: Mapping[str, nn.Module]

    def means(self) -> torch.Tensor:
        """Return the mean image of each class, which anybody can guess without seeing an update."""
        count = int(self.labels.max()) + 1
        return torch.stack([self.rows[self.labels == label].mean(dim=0) for label in range(count)])


def victims() -> Victims:
    """Load digits and build a linear model and an MLP with their first parameters."""
    dataset = load(DataSettings(source="digits"))
    rows = dataset.features.reshape(len(dataset), -1).to(torch.float32)
    rows = (rows - rows.min()) / (rows.max() - rows.min()).clamp(min=1e-12)
    kinds = {"linear": ModelSettings(name="logistic"), "MLP": ModelSettings(name="mlp", hidden=(32,))}
    models = {name: build(kind, torch.Size(rows.shape[1:]), dataset.classes, 0) for name, kind in kinds.items()}
    return Victims(rows, dataset.labels.to(torch.int64), models)


@dataclass(frozen=True)
class InversionRow:
    """One attack on one kind of client under one protection; the correlation with what is found, the share read."""

    model: str
    samples: int
    attack: str
    protection: str
    likeness: float
    read: float
    tries: int


def audit_inversion(
    batches: Sequence[int] = (1, 4), tries: int = 20, steps: int = 300, source: Source | None = None
) -> list[InversionRow]:
    """Attack clients of digits, a linear model and an MLP; one entry per model, batch and protection.

    `likeness` is the mean correlation of each sample with the nearest one that was found, `read` the share above 0.99;
    the control "guess" is the mean image of the sample's class, for which nothing need be sent.
    """
    held = victims()
    found: list[InversionRow] = []
    for name in held.models:
        # The search costs seconds a try; what is read off costs nothing.
        ways: tuple[Way, ...] = ("analytic", "search") if name == "MLP" and steps else ("analytic",)
        for batch in batches:
            tried: list[tuple[str, str, Floats, int]] = [("guess", "nothing is sent", guess(held, batch, tries), tries)]
            for protection in PROTECTIONS:
                for way in ways:
                    count = tries if way == "analytic" else max(1, tries // 5)
                    values = attack_many(held, Attack(name, batch, way), protection, count, steps, source)
                    tried.append((way, protection.name, values, count))
            found += [
                InversionRow(name, batch, way, over, float(values.mean()), float((values > READ).mean()), count)
                for way, over, values, count in tried
            ]
    return found


def guess(held: Victims, batch: int, tries: int) -> Floats:
    """Return the control: how alike each sample is to the mean image of its class."""
    means = held.means()
    values: list[Floats] = []
    for number in range(tries):
        chosen = picked(held, batch, number)
        pairs = [likeness(means[held.labels[row]][None], held.rows[row][None]) for row in chosen]
        values.append(torch.cat(pairs).numpy())
    return np.concatenate(values)


def attack_many(
    held: Victims, attack: Attack, protection: Protection, tries: int, steps: int, source: Source | None = None
) -> Floats:
    """Attack several clients and return the likeness of each of their samples to what the server finds."""
    found = [attack_one(held, attack, protection, steps, number, source) for number in range(tries)]
    return np.concatenate([likeness(images, samples).numpy() for images, samples in found])


def attack_one(
    held: Victims, attack: Attack, protection: Protection, steps: int, seed: int, source: Source | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the server finds from one client's update, and the client's samples: [samples, pixels] each."""
    net, rows, labels = held.models[attack.model], held.rows, held.labels
    chosen = picked(held, attack.samples * protection.clients, seed)
    gradient = sent(held, attack.model, chosen.split(attack.samples), protection, source)
    mine = chosen[: attack.samples]
    if attack.way == "search":
        return search(net, gradient, tuple(rows.shape[1:]), labels[mine], steps, seed), rows[mine]
    return read_off(gradient[0], gradient[1])[None], rows[mine]


def sent(
    held: Victims, model: str, clients: Sequence[torch.Tensor], protection: Protection, source: Source | None = None
) -> list[torch.Tensor]:
    """Return what the server sees of clients with these rows: the mean of their gradients, with noise or without."""
    net = held.models[model]
    each = [gradient(net, held.rows[mine], held.labels[mine]) for mine in clients]
    mean = [torch.stack(parts).mean(dim=0) for parts in zip(*each, strict=True)]
    return mean if protection.epsilon is None else _noised(mean, protection.epsilon, source or SystemSource())


def picked(held: Victims, count: int, seed: int) -> torch.Tensor:
    """Return the rows that an audit with this seed looks at, no row twice."""
    return torch.from_numpy(generator(seed, purpose="audit").choice(len(held.rows), size=count, replace=False))


def _noised(parts: list[torch.Tensor], epsilon: float, source: Source) -> list[torch.Tensor]:
    """Return a gradient as a device with local noise would send it: clipped to its own length, the kindest clip."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    clip = float(flat.norm())
    deviation = gaussian_noise(epsilon, DELTA) * 2.0 * clip
    sent = noisy_sum(flat[None], torch.zeros_like(flat), np.ones(1), clip, deviation, source)
    return [part.reshape(like.shape) for part, like in zip(sent.split([p.numel() for p in parts]), parts, strict=True)]


# Membership inference: was this sample among those that a client trained on?
#
# The curious server holds a sample and asks whether the client's update contains it: a sample that was trained on
# pulled the update along its own gradient. Its score is the part of what was sent that lies along that gradient (the
# attack of M. Nasr, R. Shokri, A. Houmansadr: "Comprehensive Privacy Analysis of Deep Learning", S&P 2019, without
# learning it).


STRANGERS = 100
"""Samples that nobody trained on, for each client that is attacked."""


@dataclass(frozen=True)
class MembershipRow:
    """Membership inference on one kind of client under one protection."""

    model: str
    samples: int
    protection: str
    ranked: float
    found: float
    tries: int


def audit_membership(
    batches: Sequence[int] = (4, 16), tries: int = 20, source: Source | None = None
) -> list[MembershipRow]:
    """Attack clients of digits, a linear model and an MLP; one entry per model, batch and protection.

    `ranked` is how often a sample of the client's scores above one that nobody trained on (0.5 by guessing), `found`
    the share of its samples that score above 99 of 100 such strangers (0.01 by guessing).
    """
    held = victims()
    found: list[MembershipRow] = []
    for model in held.models:
        for batch in batches:
            scored = [_scored(held, model, batch, number, source) for number in range(tries)]
            for index, protection in enumerate(PROTECTIONS):
                pairs = [(mine[index], others[index]) for mine, others in scored]
                ranked = [np.mean(mine[:, None] > others) for mine, others in pairs]
                beyond = [np.mean(mine > np.quantile(others, 0.99, method="higher")) for mine, others in pairs]
                means = float(np.mean(ranked)), float(np.mean(beyond))
                found.append(MembershipRow(model, batch, protection.name, *means, tries))
    return found


def _scored(
    held: Victims, model: str, batch: int, seed: int, source: Source | None
) -> tuple[list[Floats], list[Floats]]:
    """Return the scores of a client's samples and of strangers, under each protection."""
    most = max(protection.clients for protection in PROTECTIONS)
    # Strangers are drawn after all that take part in the largest sum, so that nobody trained on them.
    drawn = picked(held, batch * most + STRANGERS, seed)
    candidates = torch.cat([drawn[:batch], drawn[-STRANGERS:]])
    net = held.models[model]
    each = [_flat(gradient(net, held.rows[[row]], held.labels[[row]])) for row in candidates.tolist()]
    directions = torch.stack([one / one.norm().clamp(min=1e-12) for one in each])
    members, strangers = list[Floats](), list[Floats]()
    for protection in PROTECTIONS:
        clients = drawn[: batch * protection.clients].split(batch)
        scores = (directions @ _flat(sent(held, model, clients, protection, source))).numpy()
        members.append(scores[:batch].astype(np.float64))
        strangers.append(scores[batch:].astype(np.float64))
    return members, strangers


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


# Model extraction: how well is a model copied by whoever may only ask it?
#
# A linear model is solved for from its probabilities: ln p_c − ln p_0 = (w_c − w_0)·x + b_c − b_0 is linear in what is
# sought, so as many questions as inputs, and one more, give it exactly (F. Tramèr, F. Zhang, A. Juels, M. K. Reiter, T.
# Ristenpart: "Stealing Machine Learning Models via Prediction APIs", USENIX Security 2016). All else is copied by
# training a model of the same form on the answers.


ANSWERS: Mapping[str, int | None] = {"probabilities": None, "two digits": 2, "class alone": 0}
"""What is answered to a question: all digits of each probability, some of them, or which class is the likeliest."""
_ROWS = 600
"""Rows that the model is trained on, and as many that the attacker has of the same kind, without labels."""
_STEPS = 200


@dataclass(frozen=True)
class ExtractionRow:
    """One copy of one model; `agrees` is the share of fresh rows to which both say the same class."""

    model: str
    questions: str
    count: int
    answer: str
    agrees: float
    apart: float


def audit_extraction(count: int) -> list[ExtractionRow]:
    """Copy a linear model and an MLP by `count` questions; one entry per model, kind of question and answer.

    `apart` is how far the probabilities of model and copy are apart on fresh rows: half the sum of the differences.
    """
    held = victims()
    rows = picked(held, len(held.rows), 0)
    mine, theirs, fresh = rows[:_ROWS], rows[_ROWS : 2 * _ROWS], rows[2 * _ROWS :]
    noise = torch.rand((count, held.rows.shape[1]), generator=torch.Generator().manual_seed(0))
    asked = {"digits of others": held.rows[theirs[:count]], "random pixels": noise}
    found: list[ExtractionRow] = []
    for name, start in held.models.items():
        model = _trained(start, held.rows[mine], nn.functional.one_hot(held.labels[mine]).float())
        for kind, questions in asked.items():
            for answer, digits in ANSWERS.items():
                answered = _answered(model, questions, digits)
                solved = name == "linear" and digits is None
                copied = _solved(start, questions, answered) if solved else _trained(start, questions, answered)
                same = _compared(model, copied, held.rows[fresh])
                found.append(ExtractionRow(name, kind, len(questions), answer, *same))
    return found


@torch.no_grad()
def _answered(model: nn.Module, rows: torch.Tensor, digits: int | None) -> torch.Tensor:
    """Return the probabilities of each class as the model's owner gives them out."""
    shares = model(rows).double().softmax(dim=1)
    if digits == 0:
        return nn.functional.one_hot(shares.argmax(dim=1), shares.shape[1]).double()
    return shares if digits is None else shares.round(decimals=digits)


def _solved(start: nn.Module, rows: torch.Tensor, answers: torch.Tensor) -> nn.Module:
    """Return the linear model whose probabilities these are, by least squares over all questions."""
    logs = answers.clamp(min=1e-300).log()
    inputs = torch.cat([rows.double(), torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
    found = torch.linalg.lstsq(inputs, logs - logs[:, :1], driver="gelsd").solution
    solved = copy.deepcopy(start).double()
    weights, biases = solved.parameters()
    with torch.no_grad():
        weights.copy_(found[:-1].T)
        biases.copy_(found[-1])
    return solved.float()


def _trained(start: nn.Module, rows: torch.Tensor, shares: torch.Tensor) -> nn.Module:
    """Return a model of this form, trained to give these shares of each class."""
    model = copy.deepcopy(start)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(rows), shares.float()).backward()
        optimiser.step()
    return model


@torch.no_grad()
def _compared(model: nn.Module, copied: nn.Module, rows: torch.Tensor) -> tuple[float, float]:
    """Return to which share of rows both say the same class, and how far their probabilities are apart."""
    one, other = (each(rows).softmax(dim=1) for each in (model, copied))
    same = (one.argmax(dim=1) == other.argmax(dim=1)).double().mean()
    return float(same), float((one - other).abs().sum(dim=1).mean() / 2)
