"""What happens to updates of simulated clients on their way out: the steps before noise, signature and masks.

`protocol.ON_THE_WAY_OUT` has the order of all steps. Each is a small object here, and none knows of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from steelyard.base import randomness
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.population import DevicePopulation, Ints
from steelyard.clients.protocol import Sending, Step
from steelyard.data.attacks import OMNISCIENT
from steelyard.data.dataset import HONEST, Behaviour
from steelyard.defence.robust import spectral_scores
from steelyard.learning.parameters import Layout
from steelyard.messages.algorithm import LAST, OWN, Listening, LocalTraining, SecondTraining
from steelyard.messages.payloads import DenseModels, spans
from steelyard.messages.updates import Counts, Failure, Floats, Task
from steelyard.weighing.criterion import Criterion, LocalData


@dataclass(eq=False)
class Trained(Sending):
    """One task's updates as they were trained, and on their way out."""

    cohort: Cohort
    number: int
    """Of the task in its cohort."""
    local: LocalTraining | None = None
    """What the clients did, where the algorithm asks for it."""
    own: torch.Tensor | None = None
    """The models that the clients trained, where these listen to each other."""

    @property
    def models(self) -> torch.Tensor:
        """What is sent, [clients, parameters], brought into this process; steps write into it."""
        payload = self.updates.payload.dense
        assert payload is not None
        if (here := payload.here()) is not payload:
            self.updates = replace(self.updates, payload=here)
        return here.models

    @property
    def mine(self) -> Cohort:
        """The jobs of the task."""
        return self.cohort.of_task(self.number)

    @property
    def clients(self) -> Ints:
        """Where the clients stand in their population."""
        return self.mine.client


class OfAlgorithm(Step[Trained]):
    """What the algorithm makes of the training, and what of a model stays at home."""

    name = "algorithm"

    def __init__(self, context: SimulationContext) -> None:
        self._context = context

    def out(self, sending: Trained) -> None:
        task, algorithm = sending.task, sending.task.algorithm
        asks = algorithm.keeps or algorithm.sends or algorithm.listens or algorithm.private != "nothing"
        if not sending.updates.clients or not (asks or algorithm.replaces):
            return
        models = sending.models
        if algorithm.keeps or algorithm.sends:
            sending.local = self._local(sending)
        if algorithm.listens:
            sending.own = models.clone()
        if algorithm.private != "nothing":
            # Clients keep their whole model where a part of it is private; what is sent lacks that part.
            sending.mine.keep({OWN: models})
            private = self._context.private(algorithm).to(models.device)
            models.copy_(models.where(~private, task.parameters.to(models.device)))
        if algorithm.replaces and sending.local is not None:
            sent, keep = algorithm.sent(sending.local)
            models.copy_(sent)
            sending.mine.keep(keep)

    def _local(self, sending: Trained) -> LocalTraining:
        """Return what the clients of a task did, with their second training."""
        mine, task, context, device = sending.mine, sending.task, self._context, self._context.device
        common = len(np.unique(mine.origin)) == 1
        start = mine.starts[mine.origin[0]].to(device)[None] if common else mine.start(device)
        steps = torch.from_numpy(mine.counts).to(device, torch.float32)[:, None]
        kept = mine.vectors(start.expand(len(mine), -1))
        did = (start, sending.models.to(device), steps, mine.descent.rate, context.received(task), kept)
        local = LocalTraining(*did)
        second = task.algorithm.again(local)
        return local if second is None else replace(local, second=self._trained_again(mine, second))

    def _trained_again(self, cohort: Cohort, second: SecondTraining) -> torch.Tensor:
        descent = replace(cohort.descent, pull=second.pull, corrects="gradient")
        out = self._context.matrix(len(cohort))
        again = replace(cohort.begin_at(second.start), descent=descent, corrections=second.correction)
        (self._context.leader or self._context.engine).train(again, out)
        return out.to(self._context.device)


class OfBehaviour(Step[Trained]):
    """What malicious clients send in place of what they would have sent; they act on the stacked models of a cohort.

    u is the client's own update Θ_a − Θ, μ and σ are the mean and the standard deviation of the honest updates of its
    cohort, coordinate by coordinate. The omniscient attacks (from alie on) see them all, and but for the last two all
    malicious clients send the same.

        reversed   −s · u                        sign flip for s = 1, scaled reversal for s = 10
        boosted    s · u, s = n/m by default     E. Bagdasaryan et al.: "How To Backdoor …" (AISTATS 2020)
        bias       u + s · ‖u‖ · e_b             b is the bias of one class in the last layer
        gaussian   s · rms(u) · z, z ~ N(0, I)   noise s times as large as the update
        drift      u − s · ‖u‖ · Θ/‖Θ‖, brought back to ‖u‖
        alie       μ − s · σ                     G. Baruch, M. Baruch, Y. Goldberg: "A Little Is Enough" (NeurIPS 2019)
        ipm        −s · μ                        C. Xie, O. Koyejo, I. Gupta: "Fall of Empires" (UAI 2019)
        min-max    μ − γ · σ                     V. Shejwalkar, A. Houmansadr: "Manipulating the Byzantine" (NDSS 2021)
        min-sum    μ − γ · σ                     the same
        mimic      u_i of an honest i            S. P. Karimireddy, L. He, M. Jaggi: "Byzantine-Robust Learning on
                                                 Heterogeneous Datasets via Bucketing" (ICLR 2022)
        neurotoxin u where |μ| is least          Z. Zhang et al.: "Neurotoxin: Durable Backdoors" (ICML 2022)
        decoy      B d by one, s ū + B d/(n − k + 1) by the other k − 1

    with γ of min-max the greatest for which max_i ‖μ − γσ − u_i‖ ≤ max_ij ‖u_i − u_j‖ over the honest i, j, of min-sum
    that for which Σ_i ‖μ − γσ − u_i‖² ≤ max_i Σ_j ‖u_i − u_j‖². Mimicked is who stands out most along the first
    principal direction of honest updates (the paper learns that direction over rounds). Neurotoxin's authors look at
    the last step of the model and project every step of the training. Of the decoy, ū is the mean of the k colluders'
    own updates, d a random direction of length 1, and B = 20 s k max ‖u‖: the others then stand where the mean of all n
    stands along d.
    """

    name = "behaviour"

    def __init__(self, context: SimulationContext) -> None:
        self._context = context

    def out(self, sending: Trained) -> None:
        task, updates, population = sending.task, sending.updates, sending.cohort.populations[sending.number]
        behaviours = population.behaviours
        if not behaviours or not updates.clients:
            return
        if any((how := behaviours.get(name, HONEST)).attack or how.own_model for name in updates.clients):
            attack(task, updates.clients, sending.models, behaviours, self._context.setup.layout)
            for name, model in zip(updates.clients, sending.models, strict=True):
                self._context.kept.keep_model(task, name, model, behaviours)
        # At least one sample, as they have some.
        claimed = np.maximum(1, np.rint(updates.samples * population.claims(task.round)[sending.clients]))
        sending.updates = replace(sending.updates, samples=claimed.astype(np.int64))


def attack(
    task: Task,
    names: Sequence[str],
    models: torch.Tensor,
    behaviours: Mapping[str, Behaviour],
    layout: Layout | None = None,
) -> None:
    """Replace the rows of malicious clients in models [clients, parameters] of one cohort, in place.

    `layout` says where the biases of classes are, for those who push one.
    """
    kinds = [behaviours.get(name, HONEST) for name in names]
    # What adaptive colluders send is chosen once the whole cohort is there (rounds.colluding).
    active = [how.attack if how.attacks_from <= task.round else None for how in kinds]
    hostile = [row for row, kind in enumerate(active) if kind not in (None, "adaptive")]
    if not hostile:
        return
    origin = task.parameters.to(models.device)
    groups: dict[Behaviour, list[int]] = {}
    for row in hostile:
        if kinds[row].attack in OMNISCIENT:
            groups.setdefault(kinds[row], []).append(row)
        else:
            _alone(task, names[row], models[row], origin, kinds[row], layout)
    honest = [row for row in range(len(names)) if row not in hostile] or hostile
    for how, rows in groups.items():
        if how.attack == "decoy":
            _decoy(task, models, origin, rows, how)
        elif how.attack == "neurotoxin":
            moved = (models[honest].mean(dim=0) - origin).abs()
            most = moved >= torch.topk(moved, max(1, round(how.strength * len(moved)))).values[-1]
            models[rows] = torch.where(most, origin, models[rows])
        elif how.attack == "mimic":
            scores = spectral_scores(DenseModels(models[honest]).gram(origin))
            models[rows] = models[honest[int(np.argmax(scores))]].clone()
        else:
            _together(models, origin, honest, rows, how)


def _alone(
    task: Task, name: str, model: torch.Tensor, origin: torch.Tensor, how: Behaviour, layout: Layout | None
) -> None:
    update = model - origin
    if how.attack in ("reversed", "boosted"):
        model.copy_(origin + (how.strength if how.attack == "boosted" else -how.strength) * update)
        return
    if how.attack == "drift":
        turned = update - how.strength * update.norm() * origin / origin.norm().clamp(min=1e-30)
        model.copy_(origin + update.norm() / turned.norm().clamp(min=1e-30) * turned)
        return
    if how.attack == "bias":
        assert layout is not None, "whoever has models knows their layout"
        biases = layout.output[:, -1].tolist()
        # One output tells two classes apart: less of it is class 0.
        sign = -1.0 if len(biases) == 1 and how.target == 0 else 1.0
        model[biases[min(how.target, len(biases) - 1)]] += sign * how.strength * update.norm()
        return
    # Noise of the same seed, round and client is the same in every federation that is compared.
    chance = randomness.generator(task.seed, task.round, name, "attack/gaussian")
    noise = torch.from_numpy(chance.standard_normal(len(model), dtype=np.float32)).to(model.device)
    model.copy_(origin + how.strength * update.square().mean().sqrt() * noise)


def _decoy(task: Task, models: torch.Tensor, origin: torch.Tensor, rows: list[int], how: Behaviour) -> None:
    own = models[rows] - origin
    chance = randomness.generator(task.seed, task.round, purpose="attack/decoy")
    along = torch.from_numpy(chance.standard_normal(len(origin), dtype=np.float32)).to(models.device)
    huge = 20.0 * how.strength * len(rows) * own.norm(dim=1).max() * along / along.norm()
    models[rows[0]] = origin + huge
    models[rows[1:]] = origin + how.strength * own.mean(dim=0) + huge / (len(models) - len(rows) + 1)


def _together(models: torch.Tensor, origin: torch.Tensor, honest: list[int], rows: list[int], how: Behaviour) -> None:
    scale = _widest(models, origin, honest, how) if how.attack in ("min-max", "min-sum") else how.strength
    for span in spans(models.shape[1], len(honest), models.device.type):
        part, start = models[:, span][honest], origin[span]
        mean = part.mean(dim=0)
        away = mean - start if how.attack == "ipm" else part.std(dim=0, correction=0)
        models[rows, span] = (start if how.attack == "ipm" else mean) - scale * away


def _widest(models: torch.Tensor, origin: torch.Tensor, honest: list[int], how: Behaviour) -> float:
    """Return γ of min-max: for each honest i the positive root of ‖μ − u_i − γσ‖² = D², and of these the least.

    Of min-sum it is the root of the mean of these equations, with the mean of an honest client's distances for D².
    """
    gram = DenseModels(models[honest]).gram(origin)
    squares = np.diag(gram)
    apart = squares[:, None] + squares[None, :] - 2 * gram
    widest = float((apart.mean(axis=1) if how.attack == "min-sum" else apart).max(initial=0.0))
    share = np.full(len(honest), 1.0 / len(honest))
    away = squares - 2 * gram @ share + share @ gram @ share
    length, along = 0.0, np.zeros(len(honest))
    for span in spans(models.shape[1], len(honest), models.device.type):
        exact = models[:, span][honest].to(torch.float64)
        deviation = exact.std(dim=0, correction=0)
        length += float(deviation.square().sum())
        along += ((exact.mean(dim=0) - exact) @ deviation).cpu().numpy()
    if length <= 0:
        return 0.0
    if how.attack == "min-sum":
        along, away = along.mean(keepdims=True), away.mean(keepdims=True)
    # a γ² − 2 b γ + c = 0 with a = ‖σ‖², b = ⟨μ − u_i, σ⟩, c = ‖μ − u_i‖² − D² ≤ 0.
    roots = (along + np.sqrt(np.maximum(np.square(along) - length * (away - widest), 0.0))) / length
    return float(roots.min())


class OfVectors(Step[Trained]):
    """What the algorithm's clients send beside their models, and what they do with each other's."""

    name = "vectors"

    def __init__(self, context: SimulationContext) -> None:
        self._context = context

    def out(self, sending: Trained) -> None:
        algorithm = sending.task.algorithm
        if not algorithm.sends and sending.local is None and sending.own is None:
            return
        models = sending.models
        vectors = {name: models.new_zeros((0, models.shape[1])) for name in algorithm.sends}
        if sending.local is not None:
            # A hostile client's vectors follow from the model that it sends, not from the one that it trained.
            sent = replace(sending.local, models=models.to(self._context.device))
            keep, made = algorithm.after_training(sent)
            sending.mine.keep(keep)
            vectors = dict(made)
        listening = self._listen(sending) if sending.own is not None else None
        sending.updates = replace(sending.updates, vectors=vectors, listening=listening)

    def _listen(self, sending: Trained) -> Floats:
        """Let each client weigh the models that all have sent, and keep its own mixture of them.

        Returns the weights, [clients, models].
        """
        task, device = sending.task, self._context.device
        received = task.parameters.to(device).expand(len(sending.clients), -1)
        last = sending.mine.vectors(received)[LAST]
        sent = sending.models.to(device)
        matrix = task.algorithm.listen(self._heard(sending, sent, last))
        mixed = matrix @ sent.nan_to_num(0.0, 0.0, 0.0) + (1 - matrix.sum(dim=1, keepdim=True)) * last
        assert sending.own is not None, "the algorithm has put it there"
        sending.mine.keep({OWN: mixed, LAST: sending.own})
        return matrix.to(torch.float64).cpu().numpy()

    def _heard(self, sending: Trained, sent: torch.Tensor, last: torch.Tensor) -> Listening:
        task, context = sending.task, self._context
        population = context.population(task.seed, task.algorithm.held_back)
        sizes = context.population(task.seed).sizes
        spans: list[torch.Tensor] = []
        for client in sending.clients.tolist():
            begin, kept = int(population.begins[client]), int(population.sizes[client])
            first = kept if kept < sizes[client] else 0  # A client with one row tests on it too.
            spans.append(torch.arange(begin + first, begin + int(sizes[client]), device=context.device))
        rows, labels, counts = population.rows[held := torch.cat(spans)], population.labels[held], list(map(len, spans))
        evaluator, dataset, loss = context.evaluator, population.dataset, context.loss(task.loss)
        each = torch.cat(
            [
                evaluator.losses(evaluator.outputs(part, dataset, rows), labels, loss)
                for part in sent.split(TESTED_TOGETHER)
            ]
        )
        losses = torch.stack([part.mean(dim=1) for part in each.split(counts, dim=1)])
        own = evaluator.losses(evaluator.apart(last, dataset, rows.split(counts))[None], labels, loss)[0]
        before = torch.stack([part.mean() for part in own.split(counts)])
        distances = torch.stack([torch.linalg.vector_norm(sent - model, dim=1) for model in last])
        return Listening(losses, before, distances)


TESTED_TOGETHER = 64
"""Clients whose own models lie in memory at once while they are tested."""
SIZE = "DS"
"""The criterion that is a client's number of samples: what it claims of its size, it claims here too."""


class Measured(Step[Trained]):
    """Clients measure criteria of what they send, and of all of their rows, also those not trained on this round.

    What is of the data alone is measured once a client, since data do not change.
    """

    name = "measure"

    def __init__(self, context: SimulationContext, criteria: Iterable[Criterion]) -> None:
        every, self._context = list(criteria), context
        self.criteria = [criterion for criterion in every if criterion.measured_by == "client"]
        self._needs_first_losses = any(criterion.needs.first_losses for criterion in every)
        """Whether clients measure the loss of the received model: only where a criterion of the run needs it."""
        self._tell_label_counts = any(criterion.needs.label_counts for criterion in every)
        self._known: dict[tuple[DevicePopulation, str], Floats] = {}
        """Values by population (one per seed) and criterion, one for each registered client; nan where not measured."""
        self._label_counts: dict[DevicePopulation, Counts | None] = {}

    def out(self, sending: Trained) -> None:
        task, updates, clients = sending.task, sending.updates, sending.clients
        population = self._context.population(task.seed)
        criteria, refused = self._measure(population, clients, sending, task.round)
        measured = replace(
            sending.updates,
            criteria=criteria,
            first_losses=self._context.first_losses(task, clients) if self._needs_first_losses else None,
            label_counts=self._label_counts_of(population, clients),
        )
        keep = [row for row, name in enumerate(updates.clients) if name not in refused]
        failed = [Failure(name, why) for name, why in refused.items()]
        sending.updates = measured.select(keep, failed) if refused else measured

    def _measure(
        self, population: DevicePopulation, clients: Ints, sending: Trained, round: int
    ) -> tuple[dict[str, Floats], dict[str, str]]:
        """Return raw values by criterion of the clients at these positions, and for those that failed the reason."""
        refused: dict[str, str] = {}
        values: dict[str, Floats] = {}
        seen: dict[int, LocalData] = {}  # what a client can look at is put together once for all its criteria
        for criterion in self.criteria:
            known = self._values(population, criterion)
            for job in np.flatnonzero(np.isnan(known[clients])).tolist():
                name = population.names[clients[job]]
                if job not in seen:
                    seen[job] = population.local(name)
                value, why = criterion.taken(_own_copy(seen[job], criterion, sending, job))
                known[clients[job]] = value
                if why is not None:
                    refused[name] = why
            values[criterion.name] = np.nan_to_num(known[clients])
        if population.behaviours:
            if SIZE in values:
                values[SIZE] = values[SIZE] * population.claims(round)[clients]
            self._inflate(population, clients, values, round)
        return values, refused

    def _inflate(self, population: DevicePopulation, clients: Ints, values: dict[str, Floats], round: int) -> None:
        """Let clients that inflate their criteria report the most that can be true, or a multiple of what is."""
        factors = population.inflates(round)[clients]
        liars = factors != 1
        if not liars.any():
            return
        for criterion in self.criteria:
            if criterion.name != SIZE:
                most = criterion.most(population.dataset.classes)
                claimed = np.full(len(clients), most) if math.isfinite(most) else values[criterion.name] * factors
                values[criterion.name] = np.where(liars, claimed, values[criterion.name])

    def _values(self, population: DevicePopulation, criterion: Criterion) -> Floats:
        """Return the known values of a criterion, one for each registered client; nan where not measured yet."""
        if criterion.about != "data":
            return np.full(len(population.names), np.nan)
        key = (population, criterion.name)
        if key not in self._known:
            self._known[key] = _at_once(population, criterion)
        return self._known[key]

    def _label_counts_of(self, population: DevicePopulation, clients: Ints) -> Counts | None:
        """Return the samples of each class of the clients at these positions, where a criterion of the run needs it."""
        if not self._tell_label_counts:
            return None
        if population not in self._label_counts:
            self._label_counts[population] = population.labelled.counts()
        counts = self._label_counts[population]
        return None if counts is None else counts[clients]

    def forget(self) -> None:
        """Drop the values measured so far, and with them the populations."""
        self._known.clear()
        self._label_counts.clear()


def _own_copy(local: LocalData, criterion: Criterion, sending: Trained, job: int) -> LocalData:
    """What a criterion of the user's gets: copies, so that what it writes changes nobody's data or update."""
    if criterion.built_in:
        return local
    mine = replace(local, labels=local.labels.clone())
    return replace(mine, model=sending.models[job].detach().clone()) if criterion.about == "model" else mine


def _at_once(population: DevicePopulation, criterion: Criterion) -> Floats:
    """Measure all clients in one go where the criterion can; nan where each has to be measured on its own."""
    nothing = np.full(len(population.names), np.nan)
    if criterion.of_labels is None:
        return nothing
    try:
        found = criterion.of_labels(population.labelled)
        values = nothing if found is None else np.array(found, dtype=np.float64)
    except (Exception, SystemExit):  # of a user's own: measuring one by one says which client it fails for, and why
        return nothing
    return np.where(np.isfinite(values) & (values >= 0), values, np.nan) if values.shape == nothing.shape else nothing
