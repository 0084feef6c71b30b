"""From the updates of a cohort to a new model: admitted, measured, weighed, combined; with or without noise.

A model that is not finite, or that exploded, is never kept: the round is aggregated without the most distant update.
What a round does with the server's own rows is here as well: it trains on them alone, or fits the weights to them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType

import numpy as np
import torch

from steelyard.base.errors import UserError, in_words
from steelyard.base.usercode import is_ours
from steelyard.clients.protocol import Server
from steelyard.defence.admission import NOT_FINITE, admit
from steelyard.defence.robust import RobustRule
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors
from steelyard.messages.payloads import DenseModels, Payload, ServerTest, SingleModels
from steelyard.messages.updates import Counts, Failure, Floats, Task, Updates
from steelyard.privacy.hidden import BeyondBound
from steelyard.rounds.private import NO_GUARANTEE, Guarantee, nobody
from steelyard.rounds.state import Draft, Federation, Plan, RoundState
from steelyard.weighing.cohort import CohortView, Memory, ServerSide
from steelyard.weighing.criterion import Criterion, CriterionFault
from steelyard.weighing.fitted import FitSettings, fit_weights
from steelyard.weighing.weights import Weighing

LARGEST = 1e15
"""No parameter of a model that can still learn is larger."""


class Exploded(UserError):
    """No sound global model came out of a round: the federation ends before it, and the last good model stays.

    The loop goes on with the others; a run that has no other stops with this line.
    """

    def __init__(self, federation: str, round: int, reason: str, allowed: str = "a smaller learning rate") -> None:
        self.reason = reason
        super().__init__(
            f"round {round} of {in_words(federation)}: {reason}; the model before this round is kept "
            f"(allowed: {allowed})"
        )


def is_sound(model: torch.Tensor) -> bool:
    """Whether a global model may be kept: all its numbers are finite and none is absurd."""
    if not model.numel():
        return True
    # Smallest and largest in one go need no memory of the model's size; a comparison with NaN is false.
    smallest, largest = model.aminmax()
    return bool((smallest >= -LARGEST) & (largest <= LARGEST))


def without_culprit(task: Task, updates: Updates, least: int) -> Updates:
    """Return the updates without the one farthest from the model that was sent; the client and why are noted.

    Where fewer than `least` would be left, the model is beyond repair, and that is no lack of clients.
    """
    distances = updates.payload.divergence(task.parameters)
    culprit = int(np.argmax(np.where(np.isfinite(distances), distances, np.inf)))
    if len(updates.clients) <= max(1, least):
        raise Exploded(task.federation, task.round, "training diverged, even with clients excluded")
    keep = [row for row in range(len(updates.clients)) if row != culprit]
    reason = f"excluded: with its update ({distances[culprit]:.3g} away) training diverges"
    return updates.select(keep, [Failure(updates.clients[culprit], reason)])


# Faults in an algorithm of the user's own; a fault of ours keeps its traceback.


@contextmanager
def told_in_one_line(line: Callable[[Exception], str | None]) -> Generator[None]:
    """Raise an error as the line that is given for it; one without a line goes on as it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (found := line(error)) is None:
            raise
        raise UserError(found) from error


def training_fault(tasks: Sequence[Task], error: Exception) -> str | None:
    """Return where one of the tasks' algorithms fails while clients train, which cohorts of several may do at once."""
    for task in tasks:
        if where := _where(error, task.algorithm):
            told = f"algorithm {task.algorithm.name}: {where} fails: {type(error).__name__}: {error}"
            return f"round {task.round}: {told}"
    return None


def step_fault(algorithm: Algorithm, task: Task, error: Exception) -> str | None:
    """Return that the server's step of an algorithm fails, and why."""
    if is_ours(type(algorithm)):
        return None
    return (
        f"round {task.round} of {in_words(task.federation)}: algorithm {algorithm.name}: its step fails: "
        f"{type(error).__name__}: {error}; allowed: the new parameters, and a dict of what the server keeps"
    )


def _where(error: Exception, algorithm: Algorithm) -> str | None:
    """Return the function and line of an algorithm's own file that an error went through last."""
    made = type(algorithm)
    if is_ours(made):
        return None
    files = {method.__code__.co_filename for method in vars(made).values() if isinstance(method, FunctionType)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else None


# Drafting: From the updates of a cohort to a new model: admitted, measured, weighed, combined; with or without noise.


RADIUS = "defence/radius"
"""Under this name a federation remembers the radius of adaptive clipping from round to round."""


class Combiner:
    """Combines one cohort under any weights: the rule's sum of the models, then the algorithm's step at the server."""

    def __init__(
        self,
        federation: Federation,
        task: Task,
        tensors: Vectors,
        average: Callable[[Floats], torch.Tensor],
        share: float,
        updates: Updates | None = None,
    ) -> None:
        algorithm = federation.algorithm
        self.average = average
        self._algorithm, self._task, self._tensors = algorithm, task, tensors
        self._share, self._momentum = share, federation.momentum
        self._updates = updates if algorithm.sees == "models" else None
        self._steps = type(algorithm).step is not Algorithm.step

    def models(self, weights: Floats) -> torch.Tensor:
        """Return the new model for weights [clients], or one row per candidate for [candidates, clients]."""
        if not self._steps:
            return self.average(weights)
        if weights.ndim == 1:
            return self.step(weights)[0]
        return torch.stack([self.step(row)[0] for row in weights])

    def step(self, weights: Floats) -> tuple[torch.Tensor, Vectors]:
        """Return the new model for weights [clients], and what the server keeps with it."""
        average = self.average(weights)
        if not self._steps:
            return average, self._tensors
        updates = self._updates
        models = None if updates is None else updates.payload.dense
        given = ServerStep(
            parameters=self._task.parameters.to(average.device),
            average=average,
            weights=weights,
            tensors={name: tensor.to(average.device) for name, tensor in self._tensors.items()},
            share=self._share,
            momentum=self._momentum,
            models=None if models is None else models.models,
            sent=None if updates is None else updates.vectors,
            steps=None if updates is None else updates.steps,
        )
        with told_in_one_line(partial(step_fault, self._algorithm, self._task)):
            found = self._algorithm.step(given)
        return self._checked(found, average.shape)

    def _checked(self, found: object, shape: torch.Size) -> tuple[torch.Tensor, Vectors]:
        """Refuse what is no model of this shape with the server's vectors: users write algorithms, too."""
        match found:
            case (torch.Tensor() as model, Mapping() as kept) if model.shape == shape:
                return model, kept  # pyright: ignore[reportUnknownVariableType]
            case (torch.Tensor() as model, Mapping()):
                what = f"a model of shape {tuple(model.shape)}"
            case _:
                what = f"{type(found).__name__}"
        raise UserError(
            f"algorithm {self._algorithm.name}: its step returned {what}; allowed: the new parameters, "
            f"a tensor of shape {tuple(shape)}, and a dict of what the server keeps"
        )


def combiner(federation: Federation, tensors: Vectors, task: Task, updates: Updates, view: CohortView) -> Combiner:
    """Return what combines this cohort under any weights; call it once a round and federation."""
    average = _average(federation, task, updates, view)
    share = len(updates.clients) / max(task.registered, len(updates.clients), 1)
    return Combiner(federation, task, tensors, average, share, updates)


def _average(
    federation: Federation, task: Task, updates: Updates, view: CohortView
) -> Callable[[Floats], torch.Tensor]:
    """Return what sums this cohort's models under any weights: plainly, hidden, or by a robust rule."""
    settings, models, policy = federation.rule.settings.defence, updates.payload.single, federation.rule.policy
    if models is not None and policy is not None and policy.applies_to == "updates":
        return partial(_stepped, task, models)
    if settings is None or not settings.robust:
        return partial(_aggregate, task, updates.payload)
    if models is None:
        raise UserError(
            "weighing.defence: the server sees no single models in this run; allowed: no [weighing.defence]"
        )
    rule = RobustRule(settings, models, task.parameters, lambda: view.gram, lambda: view.root, view.memory.get(RADIUS))

    def combine(weights: Floats) -> torch.Tensor:
        found = rule.combine(weights)
        if (radius := settings.remembered(rule)) is not None:
            view.remember(RADIUS, radius)
        return found

    return combine


def _stepped(task: Task, payload: SingleModels, weights: Floats) -> torch.Tensor:
    """Return Θ + Σ wᵢ(θᵢ − Θ) for weights [clients] or [candidates, clients] that need not sum to 1."""
    rest = payload.like.new_tensor(1.0 - weights.sum(axis=-1))[..., None]
    start = task.parameters.to(payload.like.device)
    return payload.keep_frozen(payload.combine(task.parameters, weights) + rest * start, task.parameters)


def _aggregate(task: Task, payload: Payload, weights: Floats) -> torch.Tensor:
    """Return the weighted sum; a hidden one that honest clients cannot have ends the federation.

    It does not go on with the next round: that would begin from the same model, where full batches give the same
    updates, and a second sum of them for other clients or weights is one more equation about single ones.
    """
    try:
        return payload.aggregate(task.parameters, weights)
    except BeyondBound as error:
        allowed = "another run, from another seed, without clients that are not trusted"
        raise Exploded(task.federation, task.round, str(error), allowed) from None


def as_summed(updates: Updates, weighing: Weighing) -> tuple[Updates, Weighing]:
    """Return both without the clients that dropped out while a sum was taken, and with the weights that it then has.

    Only hidden updates can be missing from their own sum: those that the server sees are there before it weighs.
    """
    summed = updates.payload.summed
    if summed is None:
        return updates, weighing
    stayed = set(summed.clients)
    keep = [row for row, name in enumerate(updates.clients) if name in stayed]
    if len(keep) < len(updates.clients):
        updates = updates.select(keep, summed.dropped)
        weights = weighing.weights[keep]
        weighing = replace(
            weighing,
            raw=weighing.raw[keep],
            normalised=weighing.normalised[keep],
            scores=weighing.scores[keep],
            weights=weights / weights.sum(),
        )
    if summed.bytes_sent:
        sent = np.array([summed.bytes_sent.get(name, 0) for name in updates.clients])
        updates = replace(updates, bytes_sent=sent)
    return updates, weighing


class TooFewClients(UserError):
    """Fewer clients gave a usable update than `rounds.min_clients` asks; the run stops and can be resumed."""


def weigh_soundly(
    federation: Federation,
    state: RoundState,
    task: Task,
    updates: Updates,
    server: Server,
    plan: Plan,
    guarantee: Guarantee = NO_GUARANTEE,
) -> Draft:
    """Weigh and combine; where that gives no sound model, again without the client that is farthest away."""
    if guarantee.central:
        # Clipped updates cannot make a model explode, and to leave a client out for it would be a release about it.
        return _weigh_privately(federation, state, task, updates, server, plan, guarantee)
    draft = _weigh(federation, state, task, updates, server, plan)
    while not draft.kept_old and not is_sound(draft.model):
        draft = _weigh(federation, state, task, without_culprit(task, draft.updates, plan.min_clients), server, plan)
    return draft


def _weigh(
    federation: Federation, state: RoundState, task: Task, updates: Updates, server: Server, plan: Plan
) -> Draft:
    criteria = federation.rule.criteria
    updates = _admitted(task, updates, criteria, server, plan.min_clients)
    order = state.orders.order
    if not updates.clients:
        return _kept(federation, state, updates, None, state.memory)
    view = _view(federation, state, updates, server, plan)
    raw = _measured(task, criteria, updates, view)
    weighing = federation.rule.weigh(raw, order, clients=updates.clients, view=view)
    # A criterion that is 0 for everyone became 1/n each; when all are, no client showed any worth (AdaFed's p = 0).
    worthless = weighing.uniform or len(weighing.all_zero) == len(weighing.criteria)
    if worthless and federation.rule.settings.when_zero == "keep":
        return _kept(federation, state, updates, weighing, view.remembered)
    weighing = discounted(weighing, updates)
    combine = combiner(federation, state.tensors, task, updates, view)
    model, tensors = combine.step(weighing.weights)
    updates, weighing = as_summed(updates, weighing)
    _require(task, updates, plan.min_clients)
    return Draft(federation, state, updates, weighing, model, order, view.remembered, combine=combine, tensors=tensors)


def discounted(weighing: Weighing, updates: Updates) -> Weighing:
    """Return the weights with those of late updates multiplied by their discount; they sum to what they did."""
    if not updates.late:
        return weighing
    weights = weighing.weights * np.array([updates.late.get(name, 1.0) for name in updates.clients])
    return replace(weighing, weights=weights * (weighing.weights.sum() / weights.sum()))


def _kept(
    federation: Federation, state: RoundState, updates: Updates, weighing: Weighing | None, memory: Mapping[str, Memory]
) -> Draft:
    """Return a round that keeps the old model, and what the algorithm's server has."""
    order = state.orders.order
    return Draft(
        federation, state, updates, weighing, state.parameters, order, memory, kept_old=True, tensors=state.tensors
    )


def _weigh_privately(
    federation: Federation,
    state: RoundState,
    task: Task,
    updates: Updates,
    server: Server,
    plan: Plan,
    private: Guarantee,
) -> Draft:
    """Weigh and combine with noise; also where nobody came, since that must not show."""
    criteria = federation.rule.criteria
    updates = _admitted(task, updates, criteria, server, min(plan.min_clients, len(task.clients)))
    view = _view(federation, state, updates, server, plan)
    raw = _measured(task, criteria, updates, view) if updates.clients else np.zeros((0, len(criteria)))
    order = state.orders.order
    weighing = private.weigh(federation, task, raw, order)
    # What the algorithm makes of the noisy sum costs nothing more; the size of a secret cohort stays out of it.
    noisy = private.combine(federation, task, updates, weighing)
    share = plan.fraction if private.secret else len(updates.clients) / max(task.registered, 1)
    combine = Combiner(federation, task, state.tensors, lambda weights: noisy, share)
    model, tensors = combine.step(weighing.weights)
    if not is_sound(model):
        reason, allowed = "noise has carried the model away", "a smaller privacy.central.clip, or less noise"
        raise Exploded(task.federation, task.round, reason, allowed)
    return Draft(federation, state, updates, weighing, model, order, view.remembered, tensors=tensors)


def _admitted(task: Task, updates: Updates, criteria: Sequence[Criterion], server: Server, least: int) -> Updates:
    """Return what can be weighed; fewer clients than `least` stop the run."""
    bounded = any(criterion.at_most_classes for criterion in criteria)
    updates = admit(task, updates, criteria, server.classes if bounded else None)
    _require(task, updates, least)
    return updates


def _require(task: Task, updates: Updates, least: int) -> None:
    """Stop the run where fewer clients than `least` are left; where every model is broken, this federation alone."""
    if len(updates.clients) < least:
        broken = bool(updates.failures) and all(failure.reason == NOT_FINITE for failure in updates.failures)
        if broken and not updates.clients:
            reason = f"no client's model is finite after local training ({len(task.clients)} asked)"
            raise Exploded(task.federation, task.round, reason)
        reasons = "; ".join(f"{failure.client}: {failure.reason}" for failure in updates.failures[:3])
        raise TooFewClients(
            f"round {task.round} of {in_words(task.federation)}: {len(updates.clients)} of {len(task.clients)} clients "
            f"gave a usable update, fewer than rounds.min_clients = {least} ({reasons or 'no answers'})"
        )


class _OfServer(ServerSide):
    """What a run's server can do for the view of one federation's cohort; its kind says what that is."""

    def __init__(self, server: Server, federation: Federation, state: RoundState) -> None:
        self._server, self._seed, self._state = server, federation.seed, state

    def test(self, models: torch.Tensor) -> ServerTest:
        return self._server.test(self._seed, models)

    def trained(self) -> torch.Tensor:
        found = self._server.train(self._seed, self._state.round + 1, self._state.parameters)
        return super().trained() if found is None else found

    def gradient(self, model: torch.Tensor) -> torch.Tensor:
        found = self._server.gradients([self._seed], model[None])
        return super().gradient(model) if found is None else found[0]

    def kernels(self) -> Counts:
        found = self._server.kernels(self._seed)
        return super().kernels() if found is None else found

    def output_layer(self) -> Counts:
        found = self._server.output_layer(self._seed)
        return super().output_layer() if found is None else found


def _view(federation: Federation, state: RoundState, updates: Updates, server: Server, plan: Plan) -> CohortView:
    return CohortView.of(
        updates,
        state.parameters,
        _OfServer(server, federation, state),
        state.memory,
        samples=federation.rule.samples(updates.samples),
        seed=federation.seed,
        round=state.round + 1,
        rounds=plan.rounds,
        rate=federation.learning_rate * plan.rate(state.round + 1),
    )


def _measured(task: Task, criteria: Sequence[Criterion], updates: Updates, view: CohortView) -> np.ndarray:
    """Measure, and say which federation it was where a criterion of the user's own fails at the server."""
    try:
        return measure(criteria, updates, view)
    except CriterionFault as error:
        raise UserError(f"round {task.round} of {in_words(task.federation)}: {error}") from error


def measure(criteria: Sequence[Criterion], updates: Updates, view: CohortView) -> np.ndarray:
    """Put the raw criteria of a cohort side by side: [clients, criteria], measured by whoever each criterion says."""
    columns = [
        updates.criteria[criterion.name] if criterion.measured_by == "client" else criterion.on_server(view)
        for criterion in criteria
    ]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


# Server rows: What a round does with the server's own rows: train on them alone, or fit the weights to them.


def train_alone(federation: Federation, state: RoundState, server: Server, round: int) -> Draft:
    """The control without a federation: the server trains on its own rows, and nobody is asked."""
    model = server.train(federation.seed, round, state.parameters)
    if model is None:
        raise UserError("weighing.trained_by: got 'server', but this server cannot train; allowed: clients")
    if not is_sound(model):
        raise Exploded(federation.name, round, "the server's own model is no longer finite")
    alone, order = nobody(federation.name, round, model), state.orders.order
    return Draft(federation, state, alone, None, model, order, state.memory, tensors=state.tensors)


def fit_to_server(drafts: Sequence[Draft], server: Server) -> None:
    """Fit the weights of all federations that ask for it to the server's own rows, side by side."""
    fitting = [draft for draft in drafts if not draft.kept_old and draft.weighing is not None]
    if not fitting:
        return
    payloads: list[DenseModels] = []
    starts: list[np.ndarray] = []
    for draft in fitting:
        if (models := draft.updates.payload.dense) is None or draft.weighing is None:
            raise UserError("weighing.fit: the server sees no single models in this run; allowed: no [weighing.fit]")
        payloads.append(models)
        starts.append(draft.weighing.weights)
    seeds = [draft.federation.seed for draft in fitting]
    start = fitting[0].before.parameters

    def slopes(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        combined = [payload.combine(start, mine) for payload, mine in zip(payloads, weights, strict=True)]
        gradients = server.gradients(seeds, torch.stack(combined))
        if gradients is None:
            raise UserError("weighing.fit: given, but this server has no rows to fit to; allowed: no [weighing.fit]")
        return [payload.slopes(gradient) for payload, gradient in zip(payloads, gradients, strict=True)]

    settings = [draft.federation.rule.settings.fit or FitSettings() for draft in fitting]
    for draft, weights in zip(fitting, fit_weights(starts, slopes, settings), strict=True):
        if draft.weighing is not None and draft.combine is not None:
            limited = draft.federation.rule.settings.limited(weights, draft.updates.clients)
            draft.weighing = replace(draft.weighing, weights=limited)
            draft.model, draft.tensors = draft.combine.step(limited)
