"""The devices of a federation inside this process: a cohort is trained together, every test set tested in one go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from steelyard.clients.local.context import Room
from steelyard.clients.local.criteria import Measures
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.dataset import Stock
from steelyard.clients.local.engines.choice import Engines
from steelyard.clients.local.evaluator import Examiner
from steelyard.clients.local.settings import ComputeSettings, peak_memory
from steelyard.data.dataset import Population
from steelyard.learning import evaluation
from steelyard.learning.models import Factory, ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import DenseModels, Evaluations, Failure, LossState, Question, Task, Updates
from steelyard.weighing.criteria import Criterion

Populations = Mapping[int, Population] | Callable[[int], Population]


class LocalClients:
    """All clients of a simulation; use it for experiments on one machine, with or without a GPU.

    `populations` gives the population of each seed. Tasks of several federations that arrive in one call are
    trained in one stack. `facts` are per-client facts for criteria about the device or the user:
    {"client": {"device": {"battery": 0.7}, "user": {...}}}.
    """

    def __init__(
        self,
        populations: Populations,
        model: ModelSettings | Factory,
        training: TrainingSettings,
        compute: ComputeSettings | None = None,
        criteria: Iterable[Criterion] = (),
        facts: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        self.compute = compute or ComputeSettings()
        self.room = Room(populations, model, training, self.compute)
        self.measures = Measures(criteria, facts or {})
        self._engines: Engines | None = None
        self._examiner: Examiner | None = None
        self._own: dict[tuple[str, str], torch.Tensor] = {}
        self._peak = 0

    def names(self, seed: int) -> Sequence[str]:
        return self.room.stock(seed).names

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers: dict[int, Updates] = {}
        for group in self._groups(tasks):
            answers.update(self._train_group([tasks[i] for i in group], group))
        return [answers[place] for place in range(len(tasks))]

    def _groups(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Positions of the tasks that can be trained in one stack: one data set, one form of the loss."""
        groups: dict[object, list[int]] = {}
        for place, task in enumerate(tasks):
            loss = self.room.loss(task.loss)
            key = (id(self.room.stock(task.seed).shelf), loss.name, loss.shape, loss.scale)
            groups.setdefault(key, []).append(place)
        return list(groups.values())

    def _train_group(self, tasks: list[Task], places: list[int]) -> list[tuple[int, Updates]]:
        cohort, failures = self._cohort(tasks)
        models = self.room.matrix(len(cohort))
        self._peak = max(self._peak, models.numel() * 4)
        if len(cohort):
            engines = self._engines or Engines(self.room.shop, self.compute.engine)
            self._engines = engines
            lost = engines.train(cohort, models)
        else:
            lost = np.zeros(0)
        self._keep_own(cohort, models)
        return [
            (place, self._updates(cohort, number, models, lost, failures[number]))
            for number, place in enumerate(places)
        ]

    def _cohort(self, tasks: list[Task]) -> tuple[Cohort, list[list[Failure]]]:
        stocks = tuple(self.room.stock(task.seed) for task in tasks)
        failures: list[list[Failure]] = [[] for _ in tasks]
        starts: list[torch.Tensor] = [task.parameters for task in tasks]
        rows: list[tuple[int, int, int]] = []
        for number, (task, stock) in enumerate(zip(tasks, stocks, strict=True)):
            sizes = stock.sizes.tolist()
            for name in sorted(task.clients):
                place = stock.position.get(name)
                if place is None or not sizes[place]:
                    why = "not registered" if place is None else "no training samples"
                    failures[number].append(Failure(name, why))
                    continue
                own = self._own.get((task.federation, name)) if name in stock.stubborn else None
                rows.append((number, place, number if own is None else len(starts)))
                if own is not None:
                    starts.append(own)
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        loss = self.room.loss(tasks[0].loss)
        form = LossState(loss.name, None, loss.shape, loss.scale)
        cohort = Cohort(tuple(tasks), stocks, form, table[:, 0], table[:, 1], tuple(starts), table[:, 2])
        return cohort, failures

    def _keep_own(self, cohort: Cohort, models: torch.Tensor) -> None:
        """Clients that ignore the model they receive train on from their own: keep it for their next round."""
        if not any(stock.stubborn for stock in cohort.stocks):
            return
        for job in range(len(cohort)):
            name = cohort.name(job)
            if name in cohort.stocks[cohort.task[job]].stubborn:
                federation = cohort.tasks[cohort.task[job]].federation
                self._own[federation, name] = models[job].detach().cpu().clone()

    def _updates(
        self, cohort: Cohort, number: int, models: torch.Tensor, lost: np.ndarray, failures: list[Failure]
    ) -> Updates:
        jobs = np.flatnonzero(cohort.task == number)
        task, stock = cohort.tasks[number], cohort.stocks[number]
        places = cohort.client[jobs]
        names = tuple(stock.names[place] for place in places.tolist())
        # Jobs of one task stand together, so its models are a slice of the matrix, not a copy.
        mine = models[jobs[0] : jobs[-1] + 1] if len(jobs) else models[:0]
        criteria, refused = self.measures.take(stock, places, mine)
        updates = Updates(
            federation=task.federation,
            round=task.round,
            clients=names,
            samples=stock.sizes[places],
            criteria=criteria,
            losses=lost[jobs],
            payload=DenseModels(mine),
            failures=tuple(failures),
        )
        if not refused:
            return updates
        keep = [place for place, name in enumerate(names) if name not in refused]
        return updates.select(keep, [Failure(name, why) for name, why in refused.items()])

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        answers: dict[int, Evaluations] = {}
        for seed in dict.fromkeys(question.seed for question in questions):
            # Questions of one seed concern the same samples: all their models are tested on them in one go.
            places = [place for place, question in enumerate(questions) if question.seed == seed]
            stock = self.room.stock(seed)
            loss = self.room.loss(LossState(self.room.training.loss))
            models = torch.cat([questions[place].models.to(self.room.device) for place in places])
            said, lost = self.examiner.judge(models, stock.shelf, stock.tests.unique, loss)
            sizes = [len(questions[place].models) for place in places]
            for place, mine, cost in zip(places, said.split(sizes), lost.split(sizes), strict=True):
                answers[place] = self._answer(questions[place], stock, mine, cost)
        return [answers[place] for place in range(len(questions))]

    def _answer(self, question: Question, stock: Stock, said: torch.Tensor, lost: torch.Tensor) -> Evaluations:
        tests, classes = stock.tests, stock.shelf.classes
        labels = stock.shelf.labels[tests.unique]
        metrics: dict[str, np.ndarray] = {}
        right = None
        if classes:
            hits = (said == labels).to(torch.float64).cpu().numpy()
            scores = tests.sums(hits) / tests.sizes
            if question.detailed and len(hits):
                right = hits[0][tests.place].astype(bool)
        else:
            metrics = _regression(said, labels, tests.place, tests.sizes)
            scores = -np.sqrt(tests.sums((said - labels).square().to(torch.float64).cpu().numpy()) / tests.sizes)
        return Evaluations(
            federation=question.federation,
            round=question.round,
            clients=tests.clients,
            samples=tests.sizes,
            scores=scores,
            losses=tests.sums(lost.to(torch.float64).cpu().numpy()) / tests.sizes,
            metrics=metrics,
            right=right,
        )

    @property
    def examiner(self) -> Examiner:
        """What tests models; made when first needed."""
        if self._examiner is None:
            self._examiner = Examiner(self.room.shop)
        return self._examiner

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {json.dumps(["own", *key]): model for key, model in sorted(self._own.items())}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        for key, model in state.items():
            _, federation, client = json.loads(key)
            self._own[federation, client] = model.cpu()

    def describe(self) -> Mapping[str, str]:
        shop = self.room.shop
        said = {
            "clients": "local",
            "device": self.room.device_name,
            "precision": shop.precision,
            "threads": str(shop.threads),
            "memory_limit_gb": f"{shop.memory / 1e9:.1f}",
            "memory_peak_gb": f"{peak_memory(shop.device) / 1e9:.2f}",
            "updates_peak_gb": f"{self._peak / 1e9:.3f}",
            "parameters": str(shop.layout.trained),
        }
        chosen = self._engines.describe() if self._engines else {"engine_choice": self.compute.engine}
        notes = self.room.notes()
        return {**said, **chosen, **({"notes": notes} if notes else {})}

    def close(self) -> None:
        self._engines = None
        self._examiner = None
        self.room.close()


def _regression(
    said: torch.Tensor, labels: torch.Tensor, place: np.ndarray, sizes: np.ndarray
) -> dict[str, np.ndarray]:
    """Return mape, mae and rmse of the first candidate on every client."""
    where = torch.from_numpy(place).to(said.device)
    parts = zip(said[0][where].split(sizes.tolist()), labels[where].split(sizes.tolist()), strict=True)
    each = [evaluation.errors(mine, true) for mine, true in parts]
    return {name: np.array([float(found[name]) for found in each]) for name in ("mape", "mae", "rmse")}
