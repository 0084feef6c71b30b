"""One or several runs as figures read them: every rule under one label, each table read once; weighing again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from steelyard.base.documents import Document
from steelyard.base.errors import UserError, listed, nearest
from steelyard.messages.updates import Floats
from steelyard.report.curves import RecordedRule, find_baseline, flaws_of
from steelyard.report.result import Comparison, RuleResult, computed
from steelyard.runs.columns import sampled as sampled
from steelyard.runs.export import clients_frame, evaluations_frame
from steelyard.runs.history import LOOKED_AT, History
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.words import label

if TYPE_CHECKING:
    from steelyard.experiment.description import Description


Frame = Any
"""A pandas data frame; pandas is typed in part only, so strict checks cannot follow it."""


@dataclass(frozen=True, eq=False)
class FederationView:
    """One rule with one seed of one run."""

    label: str
    """What figures call the rule: its name, with its run's before it where there are several runs."""
    rule: str
    seed: int
    history: History
    settings: RecordedRule

    @property
    def criteria(self) -> list[str]:
        """The criteria of the rule, as listed."""
        return list(self.settings.criteria)


class RunView:
    """One or several runs under one set of labels; what every figure takes.

    Make it from open histories (or folders) and hand it to `figures.draw`; make a new one to see rounds written since.
    """

    def __init__(
        self,
        runs: Sequence[History | Path | str],
        baseline: str | None = None,
        documents: Sequence[Comparison] = (),
    ) -> None:
        """Open the runs; `baseline` names the rule of a single run that its others are compared with.

        `documents` are the results of these runs, where they have been computed already.
        """
        self.histories = [run if isinstance(run, History) else History(run) for run in runs]
        if not self.histories:
            raise UserError("report: no run named; allowed: one folder of a run or several")
        self._baseline, self._documents = baseline, documents
        self._looked_at = [history.spaced() for history in self.histories]
        self.names = _names([history.folder for history in self.histories])
        self.charts: dict[tuple[object, ...], Any] = {}
        """Figures that were drawn, by name and what they are of: a view shows the same rounds for good."""

    @cached_property
    def federations(self) -> list[FederationView]:
        """Every rule and seed of every run, in the order in which the runs list them."""
        return [
            FederationView(
                self.label(index, str(row["rule"])),
                str(row["rule"]),
                int(row["seed"]),
                history,
                RecordedRule.model_validate_json(row["settings"]),
            )
            for index, history in enumerate(self._looked_at)
            for row in history.federations.to_dict("records")
        ]

    def label(self, run: int, rule: str) -> str:
        """Return what figures call a rule of the run at this position."""
        return f"{self.names[run]} · {rule}" if len(self.histories) > 1 else rule

    @cached_property
    def labels(self) -> list[str]:
        """The rules by label, each once."""
        return list(dict.fromkeys(one.label for one in self.federations))

    @cached_property
    def experiment(self) -> Description:
        """The first run's experiment."""
        return self.experiments[0]

    @cached_property
    def experiments(self) -> list[Description]:
        """The experiment of each run."""
        # For speed of start: the kinds of experiment import most of the library.
        from steelyard.experiment.loading import read_experiment

        return [read_experiment(history.folder) for history in self.histories]

    @cached_property
    def measure(self) -> str:
        """What a client's score is: accuracy, ndcg@10, minus RMSE."""
        return self.experiment.score_name

    @cached_property
    def baseline(self) -> str:
        """The label of the rule that the others are held against."""
        base = find_baseline(self.histories[0], self._baseline)
        return next(one.label for one in self.federations if one.rule == base)

    @cached_property
    def rounds(self) -> Frame:
        """Every round of every rule and seed, `rule` being the label."""
        frames: list[Frame] = []
        for index, history in enumerate(self.histories):
            frame: Frame = history.rounds
            if len(self.histories) > 1:
                frame = frame.assign(rule=[self.label(index, rule) for rule in frame["rule"]])
            frames.append(frame)
        return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]

    @cached_property
    def documents(self) -> list[Comparison]:
        """The result of each run, as `steelyard table` prints it."""
        if self._documents:
            return list(self._documents)
        runs = zip(self.histories, self.experiments, strict=True)
        return [computed(history, experiment, self._baseline) for history, experiment in runs]

    def rule(self, label: str) -> RuleResult:
        """Return what a rule came to, over its seeds."""
        found = next(one for one in self.federations if one.label == label)
        place = [history.folder for history in self.histories].index(found.history.folder)
        return self.documents[place].rule(found.rule)

    def federation(self, label: str | None = None, seed: int | None = None) -> FederationView:
        """Return one rule with one seed; by default the first rule that asks clients, and its first seed."""
        asked = [one for one in self.federations if one.settings.asks_clients] or self.federations
        among = self.federations if label else asked
        found = [one for one in among if label in (None, one.label) and seed in (None, one.seed)]
        if not found:
            if label is not None and label not in self.labels:
                raise UserError(f"--rule: got '{label}'{nearest(label, self.labels)}; allowed: {listed(self.labels)}")
            seeds = sorted({str(one.seed) for one in self.federations})
            raise UserError(f"--seed: got {seed}; allowed: {listed(seeds)}")
        return found[0]

    def clients(self, federation: FederationView) -> Frame:
        """Return the rows of clients asked under one rule and seed: raw and normalised criteria, weight, failure.

        Of a long run, some rounds, evenly spaced; failures of all.
        """
        key = ("clients", federation.label, federation.seed)
        if key not in self._kept:
            failures: Frame = self._failures[id(federation.history)]
            mine = failures[(failures["rule"] == federation.rule) & (failures["seed"] == federation.seed)]
            found = federation.history.cohorts(federation.rule, federation.seed)
            self._kept[key] = clients_frame([((federation.rule, federation.seed), found)], mine)
        return self._kept[key]

    def evaluations(self, federation: FederationView) -> Frame:
        """Return the local scores of one rule and seed, round 0 left out; of a long run some rounds, evenly spaced."""
        key = ("evaluations", federation.label, federation.seed)
        if key not in self._kept:
            found = federation.history.tested_at(federation.rule, federation.seed, LOOKED_AT)
            self._kept[key] = evaluations_frame([((federation.rule, federation.seed), found)])
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict[tuple[str, str, int], Frame]:
        return {}

    @cached_property
    def _failures(self) -> dict[int, Frame]:
        return {id(history): history.failures_after() for history in self._looked_at}

    def flaws(self, federation: FederationView) -> dict[str, list[str]]:
        """Return what is wrong with each flawed client of a federation's seed; empty for a run without flaws."""
        return flaws_of(federation.history, federation.seed)


def _names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders; a name that comes twice gets a number."""
    made: list[str] = []
    for folder in folders:
        name = folder.resolve().name
        count = sum(other == name or other.startswith(f"{name} (") for other in made)
        made.append(f"{name} ({count + 1})" if count else name)
    return made


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinities become None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


# Weighing a run's updates again by another rule, from the raw criteria that it stored: no training, no result.


LABEL = "The weights that this rule would have given these updates. No model was trained with them."


class ReweighedClient(Document):
    """A client's share of all weight, as recorded and as another rule would have given it."""

    client: str
    recorded: float
    weight: float
    rounds: int
    flaws: tuple[str, ...]


class FlawedWeights(Document):
    """What flawed clients have together of all weight."""

    recorded: float
    weight: float


class Reweighed(Document):
    """A run's updates weighed by another rule."""

    run: str
    updates_of: str
    seed: int
    rule: str
    rounds: int
    note: str
    clients: tuple[ReweighedClient, ...]
    flawed: FlawedWeights | None


def cohorts(frame: Frame, criteria: Sequence[str]) -> Iterator[tuple[int, list[str], Floats, Floats]]:
    """Yield (round, clients, raw [clients, criteria], recorded weights) of every round whose updates were weighed."""
    weighed = frame[frame["weight"].notna()]
    measured = np.column_stack([weighed[f"raw_{name}"].to_numpy(np.float64) for name in criteria])
    names = np.array(weighed["client"], dtype=object)
    weights = weighed["weight"].to_numpy(np.float64)
    for number, rows in sorted(weighed.groupby("round", sort=True).indices.items()):
        raw = measured[rows]
        if np.isfinite(raw).all():
            yield int(number), [str(client) for client in names[rows]], raw, weights[rows]


def federation_with(view: RunView, criteria: Sequence[str], rule: str | None, seed: int | None) -> FederationView:
    """Return the rule whose updates are weighed again: the one named, else the first that measured all the criteria."""
    if rule is not None:
        chosen = view.federation(rule, seed)
    else:
        first = view.federation(None, seed)
        able = [one for one in view.federations if one.seed == first.seed and set(criteria) <= set(one.criteria)]
        chosen = first if set(criteria) <= set(first.criteria) else next(iter(able), first)
    missing = [name for name in criteria if name not in chosen.criteria]
    if missing:
        known = "; ".join(
            f"{one.label}: {', '.join(one.criteria)}" for one in view.federations if one.seed == chosen.seed
        )
        raise UserError(f"criteria: {', '.join(missing)} not measured under '{chosen.label}'; allowed: {known}")
    return chosen


def reweigh(view: RunView, federation: FederationView, settings: WeighingSettings) -> Reweighed:
    """Return each client's share of all weight as recorded and as the rule would have given it, over the whole run."""
    if settings.policy is not None and not settings.policy.of_measures:
        raise UserError(
            f"rule: '{label(settings)}' looks at updates or remembers rounds; allowed for a stored run: rules of its "
            "criteria alone"
        )
    rule = Rule(settings)
    recorded: dict[str, float] = {}
    given: dict[str, float] = {}
    asked: dict[str, int] = {}
    rounds = 0
    for _, clients, raw, before in cohorts(view.clients(federation), settings.criteria):
        rounds += 1
        for client, old, new in zip(clients, before, rule.weigh(raw, clients=clients).weights, strict=True):
            recorded[client] = recorded.get(client, 0.0) + float(old)
            given[client] = given.get(client, 0.0) + float(new)
            asked[client] = asked.get(client, 0) + 1
    if not rounds:
        raise UserError(
            f"{federation.history.folder}: no weighted updates under '{federation.label}'; allowed: a run with some"
        )
    flaws = view.flaws(federation)
    old_total, new_total = sum(recorded.values()) or 1.0, sum(given.values()) or 1.0
    rows = tuple(
        ReweighedClient(
            client=client,
            recorded=recorded[client] / old_total,
            weight=given[client] / new_total,
            rounds=asked[client],
            flaws=tuple(flaws.get(client, ())),
        )
        for client in sorted(given, key=lambda name: (-given[name], name))
    )
    flawed = [row for row in rows if row.flaws]
    totals = FlawedWeights(recorded=sum(row.recorded for row in flawed), weight=sum(row.weight for row in flawed))
    return Reweighed(
        run=str(federation.history.folder),
        updates_of=federation.rule,
        seed=federation.seed,
        rule=label(settings),
        rounds=rounds,
        note=LABEL,
        clients=rows,
        flawed=totals if flawed else None,
    )
