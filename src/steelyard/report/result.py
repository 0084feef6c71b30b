"""The result of a run, computed once: which rule to use, and every figure of every rule, as frozen classes.

`computed` makes a `Comparison` of what a run recorded. The terminal, the report, the record and notebooks read it,
`report.tables` lays it out, and as JSON it is what `run`, `compare` and `table` print: docs/reference/result.md has its
schema.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from steelyard.base.documents import Document
from steelyard.base.errors import UserError
from steelyard.base.measures import Estimate, Measure, estimate, measure_of
from steelyard.experiment.description import Description, stored_settings
from steelyard.report.curves import Chain, Curve, Exploded, FailingClient, HeavyClient, SingleClient, read_run
from steelyard.report.decide import Verdict, verdict_of
from steelyard.report.statistics import (
    FIGURES,
    OnRows,
    OnSample,
    PairedTest,
    figures_of,
    on_rows,
    on_sample,
    paired_tests,
    rounds_to_shares,
    worst_devices,
)
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.facts import BestRound, Promise
from steelyard.runs.history import History, at_once
from steelyard.weighing import criterion
from steelyard.weighing.order import chooses
from steelyard.weighing.reading import reading

MOST_CLIENTS = 1_000
"""Up to so many clients are listed one by one."""


class NotTested(UserError):
    """No round of a run has been tested, so that there is nothing to compare; its folder is whole."""


class CriterionUsed(Document):
    """A criterion of a rule, who measured it, and how far it can be trusted."""

    name: str
    measured_by: str
    trust: str


class Orders(Document):
    """Priority orders of a rule with one seed: that of the last round, how often each was kept and tested."""

    last: str | None
    kept: dict[str, int]
    tried: dict[str, int]


class BestModel(BestRound):
    """The best round of a rule, and how it does on rows that did not choose it."""

    measure: str
    reported: float
    """This measure on the server's rows that report, or on those of the clients that did not choose."""


class SeedResult(Document):
    """What a rule did with one seed, beside its figures."""

    seed: int
    ended: Exploded | None
    """Where its model exploded."""
    best: BestModel | None
    """With `rounds.keep = "best"` or `rounds.patience`."""
    accuracy_on: OnSample | None
    """On how many clients the last score was measured, where a sample of them tests."""
    orders: Orders
    heaviest_clients: tuple[HeavyClient, ...]


class ClientScore(OnRows):
    """The score of a rule's last model at one client: the mean over the seeds, on the rows of one of them."""

    client: str
    score: float


class ScoreCurve(Document):
    """The overall score round by round: each seed's, their mean and its interval."""

    rounds: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...] | None
    """Of each seed: when each round ended on the devices' clock; only in runs with one."""
    values: tuple[tuple[float, ...], ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class RightWrong(Document):
    """Test samples that the baseline and a rule get right or wrong in the last round, summed over seeds."""

    both_wrong: int
    only_rule_right: int
    only_baseline_right: int
    both_right: int


class RuleResult(Document):
    """A rule of a run: its figures over the seeds, and what they rest on."""

    rule: str
    algorithm: str
    reading: str = ""
    """What it weights clients by, in words; empty where its settings are not of this version."""
    criteria: tuple[CriterionUsed, ...]
    fedavg: bool
    """Whether it weighs by dataset size alone, whatever it is called."""
    asks_clients: bool
    adapts_loss: bool
    own_models: bool
    """Whether its clients tested models of their own; all figures of clients are then of these models."""
    rounds: int
    zero_criteria: dict[str, int]
    """By criterion: in how many rounds of all seeds it was 0 for every client."""
    figures: dict[str, Estimate]
    """By their names in `report.statistics.FIGURES`; `values` are in the order of seeds, null where one has none."""
    worst_tenth_on: OnRows | None
    """The rows that the worst tenth of the clients was tested on."""
    tests: dict[str, PairedTest]
    """Against the baseline, by figure; more is better."""
    in_words: str
    """These tests as a sentence; empty for the baseline."""
    right_wrong: RightWrong | None
    clients: tuple[ClientScore, ...]
    curve: ScoreCurve
    server: dict[str, tuple[tuple[float, ...], ...]]
    """Figures of the server's tests: of each seed, round by round."""
    class_f1: tuple[tuple[tuple[float, ...], ...], ...]
    """F1 of single classes on the server's rows: of each seed, by round and class."""
    seeds: tuple[SeedResult, ...]


@dataclass(frozen=True)
class TargetCell(Estimate):
    """Rounds to a target, or rounds gained, for one share of the clients; not reached counts as the last round."""

    share: float
    unreached: int
    rounds: tuple[int | None, ...]
    """The rule's own rounds, seed by seed; None where it never got there."""


class TargetRow(Document):
    """One rule's rounds (the baseline) or gains (the others) for a target."""

    rule: str
    kind: Literal["rounds", "gain"]
    cells: tuple[TargetCell, ...]
    average: Estimate
    printed: Estimate
    """The average over those shares that the baseline or the rule reached."""


class TargetTable(Document):
    """One target's part of the papers' tables."""

    target: float
    shares: tuple[float, ...]
    rows: tuple[TargetRow, ...]


class Comparison(Document):
    """A run and its rules, compared."""

    run: str
    status: str
    notes: str
    chain: Chain
    privacy: Promise | None
    measure: str
    """What a client's score is: accuracy, ndcg@10, minus RMSE."""
    server_rows: str
    """What the server's reporting rows are called: "the server's 46 test samples"."""
    clients: int
    flaws: dict[int, dict[str, tuple[str, ...]]]
    """By seed and client, in words."""
    weighed_one: tuple[SingleClient, ...]
    """Rules and seeds with rounds that weighted one client only; empty for a sound run."""
    failing: tuple[FailingClient, ...] = ()
    """Clients that failed in at least half of the rounds in which they were selected."""
    left_out: dict[str, str]
    """What `--rules all` asked for and could not run, with the reason."""
    seeds: tuple[int, ...]
    rounds: int
    """The newest round that was tested."""
    limit: int
    """The round that a target counts as that is not reached."""
    last: int
    """Of how many of the last rounds the deciding figures are means."""
    target: float
    share: float
    above: bool
    """Whether a target must be passed, not met."""
    confidence: float = 0.95
    baseline: str
    recommendation: Verdict | None
    """None before a round has been tested."""
    rules: tuple[RuleResult, ...]
    """The baseline first."""
    rounds_to_target: tuple[TargetTable, ...]

    def rule(self, name: str) -> RuleResult:
        """Return one rule."""
        return next(rule for rule in self.rules if rule.rule == name)

    def has(self, figure: str) -> bool:
        """Whether every rule has a figure."""
        return all(figure in rule.figures for rule in self.rules)

    def tested(self) -> Verdict:
        """Return the recommendation; refuse a run of which no round has been tested."""
        if self.recommendation is None:
            raise NotTested(
                f"{self.run}: no round has been tested, either not yet or because none is ever tested (partition.test "
                "= 'none', or nodes with tests = false, and no partition.server_report); allowed: a run with at least "
                "one"
            )
        return self.recommendation


@at_once
def computed(run: History | Path | str, experiment: Description, baseline: str | None = None) -> Comparison:
    """Return the result of a run; `steelyard table --format json` prints it."""
    history = run if isinstance(run, History) else History(run)
    settings, measure = experiment.rounds, measure_of(experiment.score_name)
    found = read_run(history, baseline)
    curves = found.curves
    tested = all(len(curve.rounds) for curve in curves)
    newest = max((int(curve.rounds[-1]) for curve in curves if len(curve.rounds)), default=0)
    # A recommender may count epochs in place of rounds; its limit is then the last round there is.
    limit = settings.count or newest
    rules, targets = compared(curves, settings, measure, limit)
    facts = history.facts
    stored = {str(row["rule"]): stored_settings(str(row["settings"])) for row in history.federations.to_dict("records")}
    readings = {name: "" if settings is None else reading(settings) for name, settings in stored.items()}
    known = {name: each.measured_by for name, each in criterion.known().items()} | facts.measured_by

    def completed(rule: RuleResult) -> RuleResult:
        mine = [curve for curve in curves if curve.rule == rule.rule]
        trusted = facts.trust.get(rule.rule, {})
        return rule.model_copy(
            update={
                "own_models": rule.rule in history.personal,
                "reading": readings[rule.rule],
                "criteria": tuple(
                    CriterionUsed(name=name, measured_by=known.get(name, "unknown"), trust=trusted.get(name, "unknown"))
                    for name in mine[0].settings.criteria
                ),
                "seeds": tuple(_seed(history, curve, experiment) for curve in mine),
            }
        )

    return Comparison(
        run=str(history.folder),
        status=facts.status,
        notes=history.notes,
        chain=found.chain,
        privacy=facts.privacy,
        measure=experiment.score_name,
        server_rows=found.server_rows,
        clients=found.clients,
        flaws={
            seed: {client: tuple(words) for client, words in of_seed.items()} for seed, of_seed in found.flaws.items()
        },
        weighed_one=found.weighed_one,
        failing=found.failing,
        left_out=experiment.left_out,
        seeds=tuple(found.flaws),
        rounds=newest,
        limit=limit,
        last=settings.last,
        target=settings.target,
        share=settings.share,
        above=settings.above,
        baseline=found.baseline,
        recommendation=verdict_of(found, experiment) if tested else None,
        rules=tuple(map(completed, rules)),
        rounds_to_target=targets,
    )


def _seed(history: History, curve: Curve, experiment: Description) -> SeedResult:
    """Return what a rule did with one seed."""
    sample, drawn = None, history.facts.tested.get(str(curve.seed))
    if drawn is not None and curve.scores.size:
        tested = history.tested(curve.rule, curve.seed, int(curve.rounds[-1]) - 1)
        sample = on_sample(tested.score, tested.samples, drawn[1])
    return SeedResult(
        seed=curve.seed,
        ended=curve.ended,
        best=_best(history, curve, experiment),
        accuracy_on=sample,
        orders=Orders(last=curve.last_order, kept=dict(curve.orders), tried=dict(curve.tried)),
        heaviest_clients=curve.heaviest,
    )


def _best(history: History, curve: Curve, experiment: Description) -> BestModel | None:
    """Return the best round of a rule and seed, on the rows that report: never on those that chose it."""
    best = history.best.get((curve.rule, curve.seed))
    if best is None:
        return None
    at, by_clients = curve.rounds == best.round, experiment.round_chosen_by == "clients"
    if experiment.reports_on_server and not by_clients:
        measure, figures = experiment.server_figure, curve.server.get(experiment.server_figure, ())
        reported = figures[best.round - 1] if len(figures) >= best.round else math.nan
    else:
        measure, reported = experiment.score_name, math.nan
        mine = np.array([not (by_clients and chooses(name)) for name in curve.devices], dtype=np.bool_)
        if at.any() and mine.any():
            reported = float(np.average(curve.scores[at][0, mine], weights=curve.rows[mine]))
    return BestModel(**dict(best), measure=measure, reported=reported)


# What is a pure function of the curves: figures, tests against the baseline, rounds to target.


def compared(
    curves: Sequence[Curve], settings: RoundSettings, measure: Measure, limit: int
) -> tuple[list[RuleResult], tuple[TargetTable, ...]]:
    """Return every rule and the tables of rounds to target; the first curve is of the baseline, seeds rise.

    The papers' targets are about accuracies, shares of rows: other measures have none.
    """
    by_rule: dict[str, list[Curve]] = {}
    for curve in curves:
        by_rule.setdefault(curve.rule, []).append(curve)
    baseline, *others = by_rule
    tested = measure.of_rows and all(curve.scores.size for curve in curves)
    targets = tuple(_target(by_rule, settings, target, limit) for target in settings.all_targets if tested)
    values = {rule: figures_of(mine, settings) for rule, mine in by_rule.items()}
    tests: dict[str, dict[str, PairedTest]] = {rule: {} for rule in by_rule}
    words: dict[str, list[str]] = {rule: [] for rule in by_rule}

    def test(name: str, what: str, unit: str, factor: float, differences: Mapping[str, Sequence[float]]) -> None:
        for rule, found in paired_tests(differences).items():
            tests[rule][name] = found
            words[rule].append(_in_words(found, what, unit, factor))

    if targets:
        rows = {rule: [row for table in targets for row in table.rows if row.rule == rule] for rule in others}
        gains = {rule: np.mean([row.average.values for row in mine], axis=0).tolist() for rule, mine in rows.items()}
        test("gain", "rounds to the targets", "rounds gained on average", 1.0, gains)
    last = min(settings.last, max(len(curve.overall) for curve in curves))
    for figure in FIGURES if others else ():
        known = {rule: values[rule][figure.name] for rule in by_rule}
        if not figure.tested or not np.isfinite(list(known.values())).all():
            continue
        used = figure.measure or measure
        sign = -1.0 if used.less_is_better else 1.0
        unit = "" if not used.percent else f"points of {used.name} saved" if used.less_is_better else "points"
        what = figure.tested.replace("last rounds", f"last {last} rounds")
        what = what if figure.measure or measure.percent else what.replace("score", measure.name)
        differences = {rule: (sign * np.subtract(known[rule], known[baseline])).tolist() for rule in others}
        test(figure.name, what, unit, used.factor, differences)
    rules: list[RuleResult] = []
    for rule, mine in by_rule.items():
        text = "" if rule == baseline else f"{rule} against {baseline}: {'; '.join(words[rule])}."
        chance = " One seed: not tested." if text and len(mine) == 1 else ""
        found = _rule(mine, measure, None if rule == baseline else _right_wrong(by_rule[baseline], mine))
        figures = {name: estimate(each) for name, each in values[rule].items() if not np.isnan(each).all()}
        rules.append(found.model_copy(update={"figures": figures, "tests": tests[rule], "in_words": text + chance}))
    return rules, targets


def _in_words(test: PairedTest, what: str, unit: str, factor: float) -> str:
    """Say plainly whether a rule is better, worse or not distinguishable from the baseline in one figure."""
    amount = f"{_signed(test.mean * factor)} {unit}".strip()
    if test.verdict == "untested":
        return f"{what} {amount}"
    return (
        f"{test.verdict} in {what} ({amount}, 95% interval {_signed(test.low * factor)} to "
        f"{_signed(test.high * factor)}, p = {test.p_holm:.2g} after Holm's correction)"
    )


def _signed(value: float) -> str:
    """Write a difference with its sign; one that is only rounding of sums, such as -9.25e-18 rounds, is 0."""
    return f"{0.0 if abs(value) < 1e-12 else value:+.3g}"


def _rule(curves: Sequence[Curve], measure: Measure, right_wrong: RightWrong | None) -> RuleResult:
    """Return one rule without its figures: what it is, its curves, its clients."""
    first = curves[0]
    tested = [(curve, worst_devices(curve.scores[-1])) for curve in curves if len(curve.rows) and curve.scores.size]
    server = [name for name in first.server if all(name in curve.server for curve in curves)]
    return RuleResult(
        rule=first.rule,
        algorithm=first.algorithm,
        criteria=(),
        fedavg=first.settings.fedavg,
        asks_clients=first.settings.asks_clients,
        adapts_loss=first.settings.loss is not None,
        own_models=False,
        rounds=max(curve.played for curve in curves),
        zero_criteria=dict(sum((Counter(curve.zero) for curve in curves), Counter[str]())),
        figures={},
        worst_tenth_on=_on_rows(tested, measure) if len(tested) == len(curves) else None,
        tests={},
        in_words="",
        right_wrong=right_wrong,
        clients=_client_scores(curves, measure),
        curve=_score_curve(curves),
        server={name: tuple(tuple(curve.server[name]) for curve in curves) for name in server},
        class_f1=tuple(tuple(map(tuple, curve.by_class["f1"])) for curve in curves)
        if all("f1" in curve.by_class for curve in curves)
        else (),
        seeds=(),
    )


def _on_rows(devices: Sequence[tuple[Curve, Any]], measure: Measure) -> OnRows | None:
    """Return on how many rows some clients of each curve were tested after its last round."""
    scores = [curve.scores[-1][places] for curve, places in devices]
    errors = [None if curve.errors is None else curve.errors[places] for curve, places in devices]
    return on_rows(scores, [curve.rows[places] for curve, places in devices], measure, errors)


def _client_scores(curves: Sequence[Curve], measure: Measure) -> tuple[ClientScore, ...]:
    """Return the score at each client with the rows that it rests on; none where there are too many clients to read."""
    names = sorted({name for curve in curves for name in curve.devices})
    found: list[ClientScore] = []
    for name in names if len(names) <= MOST_CLIENTS else ():
        held = [(curve, np.array([curve.devices.index(name)])) for curve in curves if name in curve.devices]
        if rows := _on_rows(held, measure):
            score = float(np.mean([curve.scores[-1][place] for curve, place in held]))
            found.append(ClientScore(client=name, score=score, **dict(rows)))
    return tuple(found)


def _right_wrong(baseline: Sequence[Curve], rule: Sequence[Curve]) -> RightWrong | None:
    counts = np.zeros((2, 2), dtype=np.int64)
    for one, other in zip(baseline, rule, strict=True):
        if one.hits is None or other.hits is None or len(one.hits) != len(other.hits):
            return None
        np.add.at(counts, (one.hits.astype(np.int64), other.hits.astype(np.int64)), 1)
    (both_wrong, rule_right), (baseline_right, both_right) = counts.tolist()
    return RightWrong(
        both_wrong=both_wrong, only_rule_right=rule_right, only_baseline_right=baseline_right, both_right=both_right
    )


def _score_curve(curves: Sequence[Curve]) -> ScoreCurve:
    """Return mean and interval of the overall score, round by round, as far as all seeds went."""
    length = min(len(curve.rounds) for curve in curves)
    values = [curve.overall[:length].tolist() for curve in curves]
    points = [estimate(each) for each in zip(*values, strict=True)]
    ends = [curve.seconds[:length].tolist() for curve in curves if curve.seconds is not None]
    return ScoreCurve(
        rounds=tuple(curves[0].rounds[:length].tolist()),
        seconds=tuple(map(tuple, ends)) if len(ends) == len(curves) else None,
        values=tuple(map(tuple, values)),
        mean=tuple(point.mean for point in points),
        low=tuple(point.low for point in points),
        high=tuple(point.high for point in points),
    )


def _target(by_rule: Mapping[str, Sequence[Curve]], settings: RoundSettings, target: float, limit: int) -> TargetTable:
    """Return one target's part of the papers' tables: rounds of the baseline, gains of the others.

    A target that is not reached counts as the round limit, so that both unreached is a gain of 0 (SPEC §6). `average`
    is over all shares (paper 004), `printed` over those that the thesis prints: reached by the baseline or by the rule.
    """
    reached = {
        rule: [
            rounds_to_shares(curve.rounds, curve.scores, target, settings.shares, above=settings.above)
            for curve in curves
        ]
        for rule, curves in by_rule.items()
    }
    counted = {rule: [[limit if at is None else at for at in row] for row in rows] for rule, rows in reached.items()}
    base = next(iter(by_rule))
    rows: list[TargetRow] = []
    for rule, found in reached.items():
        by_seed = (
            np.array(counted[rule], float) if rule == base else np.subtract(counted[base], counted[rule]).astype(float)
        )
        cells = [
            TargetCell(
                **vars(estimate(by_seed[:, column].tolist())),
                share=share,
                unreached=sum(row[column] is None for row in found),
                rounds=tuple(row[column] for row in found),
            )
            for column, share in enumerate(settings.shares)
        ]
        rows.append(
            TargetRow(
                rule=rule,
                kind="rounds" if rule == base else "gain",
                cells=tuple(cells),
                average=estimate([math.fsum(row) / len(row) for row in by_seed.tolist()]),
                printed=estimate(_printed(by_seed.tolist(), reached[base], found)),
            )
        )
    return TargetTable(target=target, shares=settings.shares, rows=tuple(rows))


def _printed(
    by_seed: Sequence[Sequence[float]], base: Sequence[Sequence[int | None]], rule: Sequence[Sequence[int | None]]
) -> list[float]:
    """Return each seed's mean over the shares that the baseline or the rule reached (the thesis, Table 5.5).

    A seed in which neither reached any share has none and is left out.
    """
    kept = [
        [value for value, *at in zip(*rows, strict=True) if at != [None, None]]
        for rows in zip(by_seed, base, rule, strict=True)
    ]
    return [math.fsum(row) / len(row) for row in kept if row]
