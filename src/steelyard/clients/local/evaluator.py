"""Testing many models on many samples: whole test sets in large batches, all models together where kernels do it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from steelyard.base.errors import UserError
from steelyard.base.measures import ERROR, MEASURES
from steelyard.base.tallies import Leading, Tally, errors_of, figures_of, tallied
from steelyard.clients.local.cnn.steps import ConvSteps
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.steps import MappedStep
from steelyard.clients.local.engines.table import is_convolutional, is_dense, kernel_steps
from steelyard.clients.local.hardware import arithmetic, threads_for
from steelyard.clients.local.population import DeviceDataset, Ints, TestRows
from steelyard.clients.local.settings import Precision
from steelyard.clients.local.steps import dense
from steelyard.data.sources.source import FurtherTask
from steelyard.learning import evaluation, losses
from steelyard.learning.descent import Descent
from steelyard.learning.training import class_weights, outputs_of
from steelyard.messages.updates import Evaluations, Failure, Floats, LossState, Question

if TYPE_CHECKING:
    from steelyard.clients.local.cnn.gpu import KernelSteps


MANY = 64
"""So many models, such as coalitions of clients, are tested in one stack; fewer one after another."""
SIDE_BY_SIDE = ("cuda",)
"""Devices on which models with rows of their own are tested side by side: there the calls are all the time."""
ALIKE = 0.02
"""How far outputs of models side by side may be from those one by one, as a share of their size."""


class Evaluator:
    """Runs models over rows of a data set; use it for every client's local test set and for the server's."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.module = copy.deepcopy(setup.module).to(setup.device).eval()
        self.kernels = self._kernels(setup)
        self._stacks: bool | None = None if setup.device.type in SIDE_BY_SIDE else False
        """Whether models are tested on rows of their own side by side; None until that has been tried."""
        self._ours = is_convolutional(setup.module) or is_dense(setup.module)
        if setup.device.type == "cpu":
            # Convolutions and pooling run several times faster on the CPU with channels last; dense layers ignore it.
            self.module = self.module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @staticmethod
    def _kernels(setup: TrainingSetup) -> KernelSteps | None:
        """Our own kernels, which test all models in one launch, where there are some for this network."""
        if not is_convolutional(setup.module) or setup.device.type != "cuda":
            return None
        steps = ConvSteps(setup.module, setup.layout, half=False)
        return kernel_steps(steps, Descent.of(setup.training), _tested(setup.precision), setup.device)

    def outputs(self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each model on each row: [models, rows, outputs]."""
        if not len(models) or not len(rows):
            return torch.zeros((len(models), len(rows), max(dataset.classes, 1)), device=self.setup.device)
        small = threads_for(self.setup.device, self.setup.layout.size)
        with small, torch.no_grad(), arithmetic(_tested(self.setup.precision), self.setup.device):
            if self.kernels is not None:
                return self._together(self.kernels, models, dataset, rows)
            if len(models) >= MANY and is_dense(self.setup.module):
                return self._stacked(models, dataset, rows)
            found: list[list[torch.Tensor]] = [[] for _ in range(len(models))]
            for part in rows.split(self._batch(dataset)):
                features = dataset.gather(part)
                for number, model in enumerate(models):
                    self.setup.layout.write(self.module, model)
                    # A user's module may write into what it is given: the next model must not see that.
                    found[number].append(outputs_of(self.module, features if self._ours else features.clone()))
        return torch.stack([torch.cat(parts) for parts in found])

    def _stacked(self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor) -> torch.Tensor:
        """All models of dense layers in batched products, as many at a time as a fiftieth of the memory holds."""
        widest = max(slot.shape[0] for slot in self.setup.layout.slots)
        parts = rows.split(self._batch(dataset))
        together = max(1, int(0.02 * self.setup.memory / (4 * widest * len(parts[0]))))
        found = [
            torch.cat([self._dense(some.to(self.setup.device), features) for some in models.split(together)])
            for features in (dataset.gather(part).flatten(1) for part in parts)
        ]
        return torch.cat(found, dim=1)

    def _dense(self, models: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        named = self.setup.layout.views(models)
        depth = sum(name.endswith("weight") for name in named)
        # The first layer sees the same rows in every model: one product for all.
        weight = named["layers.0.weight"]
        flat = features @ weight.reshape(-1, features.shape[1]).t()
        found = flat.view(len(features), len(models), -1).transpose(0, 1) + named["layers.0.bias"][:, None, :]
        for layer in range(1, depth):
            found = dense(found.relu_(), f"layers.{layer}", named)
        return found

    def _together(
        self, steps: KernelSteps, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor
    ) -> torch.Tensor:
        """All models in one launch, on as many rows at a time as a tenth of the memory holds."""
        native = steps.native(models.to(self.setup.device))
        fits = int(0.1 * self.setup.memory / (4 * len(models) * steps.sample_floats(len(rows))))
        parts = rows.split(max(64, min(fits, len(rows))))
        return torch.cat([steps.outputs_of(native, dataset, part) for part in parts], dim=1)

    def apart(self, models: torch.Tensor, dataset: DeviceDataset, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the outputs of each model on rows of its own, those of one model after another: [rows, outputs].

        On a GPU, where calls are all the time, models run side by side, unless this gives something else.
        """
        if self._stacks:
            return self._side_by_side(models, dataset, rows)
        found = torch.cat(
            [self.outputs(model[None], dataset, mine)[0] for model, mine in zip(models, rows, strict=True)]
        )
        if self._stacks is None and len(found):
            try:
                together = self._side_by_side(models, dataset, rows)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a module of the user's does not let be mapped
                together = torch.zeros_like(found)
            self._stacks = float((together - found).norm()) <= ALIKE * float(found.norm())
            return together if self._stacks else found
        return found

    def _side_by_side(self, models: torch.Tensor, dataset: DeviceDataset, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        models, found = models.to(self.setup.device), list[torch.Tensor]()
        columns = max(1, self._batch(dataset) // len(rows))
        with torch.no_grad(), arithmetic(_tested(self.setup.precision), self.setup.device):
            for part in pad_sequence(list(rows), batch_first=True).split(columns, dim=1):
                if self.kernels is not None:
                    found.append(self.kernels.outputs_of(self.kernels.native(models), dataset, part))
                else:
                    found.append(self._mapped.outputs(models, dataset.gather(part)))
        return torch.cat([each[: len(mine)] for each, mine in zip(torch.cat(found, dim=1), rows, strict=True)])

    @cached_property
    def _mapped(self) -> MappedStep:
        return MappedStep(self.setup, Descent.of(self.setup.training))

    def test(
        self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor, loss: LossState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions and per-sample losses of models on rows; see `judged`."""
        if not len(rows):
            return (nothing := torch.zeros((len(models), 0), device=self.setup.device)), nothing
        if dataset.task == "segmentation" and len(models) > 1:
            # Outputs of all pixels are large: one model after another.
            each_model = [self.test(models[one : one + 1], dataset, rows, loss) for one in range(len(models))]
            return tuple(map(torch.cat, zip(*each_model, strict=True)))  # pyright: ignore[reportReturnType]
        return self.judged(self.outputs(models, dataset, rows), dataset, rows, loss)

    def judged(
        self, outputs: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor, loss: LossState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions and per-sample losses (class weights left out) of outputs on rows, both [models, rows].

        Several labels have a prediction each, [models, rows, labels]; of masks the Dice of each row stands in place of
        its many predictions.
        """
        labels = dataset.labels[rows]
        each = losses.per_sample(loss)
        # Small operators too: two threads on a busy machine would wait for each other at every call.
        with threads_for(self.setup.device, self.setup.layout.size):
            found = [each(mine, labels) for mine in outputs]
        each_loss = torch.stack(found) if found else outputs[..., 0]
        if dataset.task == "segmentation":
            return evaluation.dice(outputs, labels), each_loss
        return outputs > 0 if dataset.task == "multi-label" else evaluation.predictions(
            outputs, dataset.classes
        ), each_loss

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor, loss: LossState) -> torch.Tensor:
        """Return per-sample losses of outputs [..., rows, outputs] on labels, class weights counted, as in training."""
        each, weights = losses.per_sample(loss), class_weights(loss, outputs.device)
        with threads_for(self.setup.device, self.setup.layout.size):
            return torch.stack([losses.weigh(each(mine, labels), labels, weights) for mine in outputs])

    def _batch(self, dataset: DeviceDataset) -> int:
        """Rows at once: a tenth of the memory, with some 200 floats of activations per input number at the worst."""
        fits = int(0.1 * self.setup.memory / (200 * dataset.sample_bytes))
        return max(64, min(fits, 4096 if self.setup.device.type == "cuda" else 1024))


def _tested(precision: Precision) -> Precision:
    """A model is tested in TF32 where it is trained in bfloat16: what counts is the model, not its rounding."""
    return "tf32" if precision == "bfloat16" else precision


def evaluations(
    question: Question, tests: TestRows, dataset: DeviceDataset, predictions: torch.Tensor, losses: torch.Tensor
) -> Evaluations:
    """Return each client's score and loss of each model, from predictions and losses [models, tested rows].

    Scores are accuracies for classes, minus the root mean squared error for a regression, C-indices for survival, means
    of Dice for masks, and macro F1 for several labels.
    """
    classes = dataset.classes
    labels = dataset.labels[tests.unique]
    metrics: dict[str, Floats] = {}
    right = None
    means = tests.sums(losses.to(torch.float64).cpu().numpy()) / tests.sizes
    if classes:
        hits = (predictions == labels).to(torch.float64).cpu().numpy()
        scores = tests.sums(hits) / tests.sizes
        if question.detailed and len(hits):
            right = hits[0][tests.index].astype(bool)
    elif dataset.task is not None:
        scores, metrics = _further(dataset.task, predictions, labels, tests)
        if dataset.task == "survival":
            means = _cox(predictions, labels, tests)
    else:
        metrics = _regression(predictions, labels, tests)
        scores = -np.sqrt(tests.sums((predictions - labels).square().to(torch.float64).cpu().numpy()) / tests.sizes)
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tests.clients,
        samples=tests.sizes,
        scores=scores,
        losses=means,
        metrics=metrics,
        right=right,
    )


def measured(
    answer: Evaluations, measure: Leading, tests: TestRows, dataset: DeviceDataset, outputs: torch.Tensor
) -> Evaluations:
    """Return answers scored by a measure, with every client's sums, from outputs [models, tested rows, outputs].

    A client whose rows say nothing of the measure, such as ROC AUC of one class, gives no score.
    """
    tallies = tallies_of(measure, dataset, tests.unique, tests.index, tests.sizes, outputs)
    figures = figures_of(Tally(tallies))
    if measure.name not in figures:
        raise UserError(f"rounds.measure: got '{measure.name}'; allowed for these data: {', '.join(figures)}")
    scores = figures[measure.name]
    first = [errors_of(cells)[measure.name] for cells in tallies[0]] if len(tallies) else []
    metrics = {name: values[0] for name, values in figures.items() if len(values) and name != measure.name}
    found = replace(
        answer, scores=scores, tallies=tallies, metrics={**answer.metrics, **metrics, ERROR: np.array(first)}
    )
    unknown = [name for name, score in zip(answer.clients, scores.T, strict=True) if not np.isfinite(score).all()]
    why = f"its test rows say nothing of {MEASURES[measure.name].name}: one class alone, or targets all alike"
    left = found.without(unknown) if unknown else found
    return replace(left, failures=(*left.failures, *(Failure(name, why) for name in unknown)))


def tallies_of(
    measure: Leading, dataset: DeviceDataset, rows: torch.Tensor, index: Ints, sizes: Ints, outputs: torch.Tensor
) -> Floats:
    """Return the sums [models, clients, sums] of clients with so many rows each, one after another, `index` in `rows`.

    `outputs` [models, rows, outputs] are those of a classifier or of a regression.
    """
    labels = dataset.labels[rows].cpu().numpy()[index]
    each = outputs.to(torch.float64).cpu().numpy()[:, index]
    sites = np.repeat(np.arange(len(sizes)), sizes)
    given = each if dataset.classes else each[..., 0]
    return np.array([tallied(mine, labels, sites, len(sizes), measure.threshold) for mine in given])


def _regression(predictions: torch.Tensor, labels: torch.Tensor, tests: TestRows) -> dict[str, Floats]:
    """Return mape, mae, rmse and the standard error of the score of the first candidate on every client."""
    parts = [(mine[0], true) for mine, true in _parts(predictions, labels, tests)]
    each = [evaluation.errors(mine, true) for mine, true in parts]
    found = {name: np.array([float(found[name]) for found in each]) for name in ("mape", "mae", "rmse")}
    return found | {ERROR: np.array([evaluation.rmse_error(mine, true) for mine, true in parts])}


def _parts(predictions: torch.Tensor, labels: torch.Tensor, tests: TestRows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each client's rows are predicted to be, [models, rows, ...], and what they are."""
    tested, counts = torch.from_numpy(tests.index).to(predictions.device), tests.sizes.tolist()
    return list(zip(predictions[:, tested].split(counts, dim=1), labels[tested].split(counts), strict=True))


def _further(
    task: FurtherTask, predictions: torch.Tensor, labels: torch.Tensor, tests: TestRows
) -> tuple[Floats, dict[str, Floats]]:
    """Return the score of each model on each client, and of the first one its further figures and standard error."""
    parts = _parts(predictions, labels, tests)
    figures = [list(evaluation.FIGURES[task](mine, true).items()) for mine, true in parts]
    scores = [each[0][1] for each in figures]
    further = {name: np.array([dict(each)[name][0] for each in figures]) for name, _ in (figures or [[]])[0][1:]}
    errors = np.array([evaluation.ERRORS[task](mine[0], true) for mine, true in parts])
    empty = np.zeros((len(predictions), 0))
    return np.stack(scores, axis=1) if scores else empty, {**further, ERROR: errors}


def _cox(predictions: torch.Tensor, labels: torch.Tensor, tests: TestRows) -> Floats:
    """Return the mean loss of each model on each client, whose rows are held against each other alone."""
    parts = _parts(predictions, labels, tests)
    each = [
        losses.cox(mine, times.expand_as(mine)).to(torch.float64).mean(dim=1).cpu().numpy() for mine, times in parts
    ]
    return np.stack(each, axis=1)
