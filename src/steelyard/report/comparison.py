"""The comparison of rules as one document: rounds to target and gains, devices, samples, curves, verdicts.

All figures are pure functions of what a run recorded; `tables` writes the document for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

from steelyard.base.errors import UserError
from steelyard.base.measures import MEASURES, Estimate, EstimateJson, Measure, estimate, measure_of
from steelyard.experiment.description import Description
from steelyard.messages.updates import Counts
from steelyard.report.curves import (
    Curve,
    jain,
    on_rows,
    read_curves,
    rounds_to_shares,
    worst_devices,
    worst_score,
    worst_tenth,
)
from steelyard.report.decide import find_baseline, verdict_of
from steelyard.report.notices import chain_of, flawed_shares, single_client_rounds
from steelyard.report.result import (
    ClassCurve,
    ClientScore,
    Comparison,
    DeviceRow,
    FlawedRow,
    OnRows,
    PairedTest,
    RightWrong,
    RuleTables,
    RuleTests,
    RuleVerdict,
    ScoreCurve,
    ServerCurve,
    ServerFigure,
    ServerRow,
    TargetCell,
    TargetRow,
    TargetTable,
    TestingRow,
)
from steelyard.report.statistics import holm, paired_p, verdict
from steelyard.runs.history import History, at_once

TestName = Literal[
    "gain",
    "final",
    "late",
    "server_accuracy",
    "server_accuracy_late",
    "server_macro_f1",
    "server_macro_f1_late",
    "server_mape",
    "server_c_index",
    "server_dice",
]
"""What rules are held against the baseline by."""


def verdicts(
    measured: Mapping[TestName, Mapping[str, Sequence[float]]],
    baseline: str,
    rules: Sequence[str],
    last: int = 5,
    score: Measure = MEASURES["accuracy"],
) -> list[RuleVerdict]:
    """Test every rule against the baseline, per measure with Holm's correction over the rules, and say it in words.

    `last` is how many rounds the measures of the last rounds are means of; `score` is what each client's score is.
    """
    found: dict[str, RuleTests] = {rule: {} for rule in rules[1:]}
    for measure, by_rule in measured.items():
        raw = [paired_p(by_rule[rule]) for rule in rules[1:]]
        for rule, p, adjusted in zip(rules[1:], raw, holm(raw), strict=True):
            mean = estimate(by_rule[rule])
            found[rule][measure] = {
                **mean.as_json(),
                "p": p,
                "p_holm": adjusted,
                "verdict": verdict(mean.mean, adjusted),
            }
    return [
        {"rule": rule, **tests, "sentence": sentence(rule, baseline, tests, last, score)}
        for rule, tests in found.items()
    ]


_PHRASES: dict[TestName, tuple[str, str, float]] = {
    # measure: what is compared, unit, factor
    "gain": ("rounds to the targets", "rounds gained on average", 1.0),
    "final": ("score after the last round", "points", 100.0),
    "late": ("mean score of the last rounds", "points", 100.0),
    "server_accuracy": ("accuracy on the server's test set", "points", 100.0),
    "server_macro_f1": ("macro F1 on the server's test set", "", 1.0),
    "server_accuracy_late": ("mean accuracy of the last rounds on the server's test set", "points", 100.0),
    "server_macro_f1_late": ("mean macro F1 of the last rounds on the server's test set", "", 1.0),
    "server_c_index": ("C-index on the server's test set", "", 1.0),
    "server_dice": ("mean Dice on the server's test set", "", 1.0),
    "server_mape": ("error on the server's test set", "points of MAPE saved", 100.0),
}


def sentence(rule: str, baseline: str, tests: RuleTests, last: int = 5, score: Measure = MEASURES["accuracy"]) -> str:
    """Say plainly whether a rule is better, worse or not distinguishable from the baseline, measure by measure."""
    parts: list[str] = []
    given = cast("dict[TestName, PairedTest]", tests)
    for measure, test in given.items():
        what, unit, factor = _PHRASES[measure]
        what = what.replace("last rounds", f"last {last} rounds")
        if measure in ("final", "late") and not score.percent:
            what, unit, factor = what.replace("score", score.name), "", 1.0
        amount = f"{_signed(test['mean'] * factor)} {unit}".strip()
        if test["verdict"] == "untested":
            parts.append(f"{what} {amount}")
            continue
        low, high = test["low"] * factor, test["high"] * factor
        parts.append(
            f"{test['verdict']} in {what} ({amount}, 95 % interval {_signed(low)} to {_signed(high)}, "
            f"p = {test['p_holm']:.2g} after Holm's correction)"
        )
    text = f"{rule} against {baseline}: {'; '.join(parts)}."
    single = any(test["verdict"] == "untested" for test in given.values())
    return f"{text} One seed: it may be chance." if single else text


def _signed(value: float) -> str:
    """Write a difference with its sign; one that is only rounding of sums, such as -9.25e-18 rounds, is 0."""
    return f"{0.0 if abs(value) < 1e-12 else value:+.3g}"


class NotTested(UserError):
    """No round of a run has been tested, so that there is nothing to compare; its folder is whole."""


@at_once
def compare_run(run: History | Path | str, experiment: Description, baseline: str | None = None) -> Comparison:
    """Return the comparison of a run's rules as one JSON-ready document; `steelyard table --format json` prints it."""
    history = run if isinstance(run, History) else History(run)
    folder, settings = history.folder, experiment.rounds
    curves = read_curves(history)
    chosen = find_baseline(history, baseline)
    if not curves or not all(len(curve.rounds) for curve in curves):
        raise NotTested(
            f"{folder}: no round has been tested, either not yet or because none is ever tested (partition.test = "
            "'none', or nodes with tests = false, and no partition.server_report); allowed: a run with at least one"
        )
    # A recommender may count epochs in place of rounds; its limit is then the last round there is.
    limit = settings.count or max(int(curve.rounds[-1]) for curve in curves)
    return {
        "recommendation": verdict_of(history, experiment, curves, chosen),
        "measure": experiment.score_name,
        "run": str(folder),
        "status": history.facts.status,
        "chain": chain_of(history),
        "algorithms": {str(row["rule"]): str(row["algorithm"]) for row in history.federations.to_dict("records")},
        "personal": sorted(history.personal),
        "rounds": max(int(curve.rounds[-1]) for curve in curves),
        "limit": limit,
        "last": settings.last,
        "reach": settings.reach,
        "weighed_one": single_client_rounds(history),
        "flawed": _flawed(history, curves),
        "ended": [
            {"rule": rule, "seed": seed, "round": round, "reason": reason}
            for (rule, seed), (round, reason) in history.ended.items()
        ],
        "left_out": experiment.left_out,
        **describe(
            *(curves, chosen, settings.all_targets, settings.shares, limit, settings.last),
            above=settings.above,
            measure=measure_of(experiment.score_name),
        ),
    }


def _flawed(history: History, curves: Sequence[Curve]) -> list[FlawedRow]:
    """Return the share of all weight that flawed clients got under each rule; empty for a run without flaws."""
    found: dict[str, list[float]] = {}
    for curve in curves:
        shares = flawed_shares(history, curve.rule, curve.seed)
        if shares is not None:
            found.setdefault(curve.rule, []).append(shares["weight"])
    return [{"rule": rule, "weight": estimate(values).as_json()} for rule, values in found.items()]


def describe(
    curves: Sequence[Curve],
    baseline: str,
    targets: Sequence[float],
    shares: Sequence[float],
    limit: int,
    last: int = 5,
    *,
    above: bool = False,
    measure: Measure = MEASURES["accuracy"],
) -> RuleTables:
    """Return all tables of a comparison as plain values; verdicts look at the last round and at the `last` rounds.

    The papers' targets are about accuracies, shares of rows: other measures have none.
    """
    rules = list(dict.fromkeys(curve.rule for curve in curves))
    rules = [baseline, *(rule for rule in rules if rule != baseline)]
    table = {(curve.rule, curve.seed): curve for curve in curves}
    seeds = sorted({curve.seed for curve in curves})
    by_rule = {rule: [table[rule, seed] for seed in seeds] for rule in rules}
    tested = all(curve.scores.size for curve in curves)
    gains: dict[str, list[list[float]]] = {rule: [] for rule in rules}
    sections: list[TargetTable] = []
    for target in targets if tested and measure.of_rows else ():
        section = rounds_section(table, rules, seeds, target, shares, limit, above=above)
        sections.append(section)
        for row in section["rows"][1:]:
            gains[row["rule"]].append(row["average"]["values"])
    longest = max(len(curve.overall) for curve in curves)
    measured = _measures(table, rules, seeds, gains, last)
    return {
        "baseline": baseline,
        "rules": rules,
        "seeds": seeds,
        "confidence": 0.95,
        "rounds_to_target": sections,
        "verdicts": verdicts(measured, baseline, rules, min(last, longest), measure),
        "devices": [device_row(rule, by_rule[rule], measure) for rule in rules] if tested else [],
        "clients": [row for rule in rules for row in client_scores(rule, by_rule[rule], measure)] if tested else [],
        "server": [server_row(rule, curves) for rule, curves in by_rule.items()],
        "testing": [testing_row(rule, curves) for rule, curves in by_rule.items()],
        "right_wrong": [found for rule in rules[1:] if (found := right_wrong(table, baseline, rule, seeds))],
        "server_curves": [server_curve(rule, curves) for rule, curves in by_rule.items()],
        "class_curves": [class_curve(rule, curves) for rule, curves in by_rule.items()],
        "curves": [score_curve(rule, curves) for rule, curves in by_rule.items()],
    }


def rounds_section(
    table: Mapping[tuple[str, int], Curve],
    rules: Sequence[str],
    seeds: Sequence[int],
    target: float,
    shares: Sequence[float],
    limit: int,
    *,
    above: bool = False,
) -> TargetTable:
    """Return one target's part of the papers' tables: rounds of the baseline (the first rule), gains of the others.

    A target that is not reached counts as the round limit, so that both unreached is a gain of 0 (SPEC §6). `average`
    is over all shares (paper 004), `printed` over those that the thesis prints: reached by the baseline or by the rule.
    """
    reached = {
        key: rounds_to_shares(curve.rounds, curve.scores, target, shares, above=above) for key, curve in table.items()
    }
    counted = {key: [limit if found is None else found for found in row] for key, row in reached.items()}
    base = rules[0]
    rows: list[TargetRow] = []
    for rule in rules:
        by_seed = [
            counted[rule, seed] if rule == base else np.subtract(counted[base, seed], counted[rule, seed]).tolist()
            for seed in seeds
        ]
        cells: list[TargetCell] = [
            {
                "share": share,
                "unreached": sum(reached[rule, seed][column] is None for seed in seeds),
                **estimate([float(row[column]) for row in by_seed]).as_json(),
            }
            for column, share in enumerate(shares)
        ]
        average = estimate([math.fsum(row) / len(shares) for row in by_seed])
        either = [
            [reached[base, seed][column] is not None or reached[rule, seed][column] is not None for seed in seeds]
            for column in range(len(shares))
        ]
        printed = estimate(printed_means(by_seed, [list(row) for row in zip(*either, strict=True)]))
        rows.append(
            {
                "rule": rule,
                "kind": "rounds" if rule == base else "gain",
                "cells": cells,
                "average": average.as_json(),
                "printed": printed.as_json(),
            }
        )
    return {"target": target, "shares": list(shares), "rows": rows}


def printed_means(by_seed: Sequence[Sequence[float]], printed: Sequence[Sequence[bool]]) -> list[float]:
    """Return each seed's mean over the shares that are printed, those that the baseline or the rule reached.

    Use it for the thesis' averages (Table 5.5); a seed in which neither reached any share has none and is left out.
    """
    kept = [
        [value for value, shown in zip(row, marks, strict=True) if shown]
        for row, marks in zip(by_seed, printed, strict=True)
    ]
    return [math.fsum(row) / len(row) for row in kept if row]


def _measures(
    table: Mapping[tuple[str, int], Curve],
    rules: Sequence[str],
    seeds: Sequence[int],
    gains: Mapping[str, list[list[float]]],
    last: int,
) -> dict[TestName, dict[str, list[float]]]:
    """Return for each measure and rule the differences from the baseline, one per seed; more is better."""
    measures: dict[TestName, dict[str, list[float]]] = {}
    if any(gains.values()):
        measures["gain"] = {rule: np.mean(gains[rule], axis=0).tolist() for rule in rules[1:]}

    def against_baseline(figure: Callable[[Curve], float]) -> dict[str, list[float]]:
        return {
            rule: [figure(table[rule, seed]) - figure(table[rules[0], seed]) for seed in seeds] for rule in rules[1:]
        }

    measures["final"] = against_baseline(lambda curve: float(curve.overall[-1]))
    measures["late"] = against_baseline(lambda curve: float(np.mean(curve.overall[-last:])))
    known = set.intersection(*(set(curve.server) for curve in table.values()))
    figures: tuple[tuple[str, TestName, TestName | None], ...] = (
        ("accuracy", "server_accuracy", "server_accuracy_late"),
        ("macro_f1", "server_macro_f1", "server_macro_f1_late"),
        ("c_index", "server_c_index", None),
        ("dice", "server_dice", None),
    )
    for name, final, late in figures:
        if name in known:
            measures[final] = against_baseline(lambda curve, name=name: curve.server[name][-1])
        if name in known and late is not None:
            measures[late] = against_baseline(lambda curve, name=name: float(np.mean(curve.server[name][-last:])))
    if "mape" in known:
        measures["server_mape"] = against_baseline(lambda curve: -curve.server["mape"][-1])
    return measures


# The rows of one rule in the document of a comparison.


MOST_CLIENTS = 1_000
"""Up to so many clients are listed one by one."""


def _over_seeds(curves: Sequence[Curve], figure: Callable[[Curve], float]) -> EstimateJson:
    return estimate([figure(curve) for curve in curves]).as_json()


def device_row(rule: str, curves: Sequence[Curve], measure: Measure) -> DeviceRow:
    """Return how the last model serves devices: all samples, the worst tenth, LEAF's percentiles, spread, Jain."""

    def percentile(per_cent: float) -> Callable[[Curve], float]:
        return lambda curve: float(np.percentile(curve.scores[-1], per_cent))

    pairs = [(curve, worst_devices(curve.scores[-1])) for curve in curves]
    return {
        "rule": rule,
        "final": _over_seeds(curves, lambda curve: float(curve.overall[-1])),
        "best": _over_seeds(curves, lambda curve: float(curve.overall.max())),
        "worst": _over_seeds(curves, lambda curve: worst_score(curve.scores[-1])),
        "worst_tenth": _over_seeds(curves, lambda curve: worst_tenth(curve.scores[-1])),
        "worst_tenth_on": _on_rows(pairs, measure) if all(len(curve.rows) for curve in curves) else None,
        "p10": _over_seeds(curves, percentile(10)),
        "p90": _over_seeds(curves, percentile(90)),
        "spread": _over_seeds(curves, lambda curve: float(np.std(curve.scores[-1]))),
        "jain": _over_seeds(curves, lambda curve: jain(curve.scores[-1])),
    }


def _on_rows(devices: Sequence[tuple[Curve, Counts]], measure: Measure) -> OnRows | None:
    """Return on how many rows some devices of each curve were tested after its last round."""
    scores = [curve.scores[-1][places] for curve, places in devices]
    errors = [None if curve.errors is None else curve.errors[places] for curve, places in devices]
    return on_rows(scores, [curve.rows[places] for curve, places in devices], measure, errors)


def client_scores(rule: str, curves: Sequence[Curve], measure: Measure) -> list[ClientScore]:
    """Return the score at each client with the rows that it rests on; none where there are too many clients to read."""
    names = sorted({name for curve in curves for name in curve.devices})
    found: list[ClientScore] = []
    for name in names if len(names) <= MOST_CLIENTS else ():
        held = [(curve, np.array([curve.devices.index(name)])) for curve in curves if name in curve.devices]
        if rows := _on_rows(held, measure):
            score = float(np.mean([curve.scores[-1][place] for curve, place in held]))
            found.append({"rule": rule, "client": name, "score": score, **rows})
    return found


def server_row(rule: str, curves: Sequence[Curve]) -> ServerRow:
    """Return the figures of the server's tests after the last round."""
    row: ServerRow = {"rule": rule}
    for name in _server_figures(curves):
        row[name] = _over_seeds(curves, lambda curve, name=name: curve.server[name][-1])
    return row


def server_curve(rule: str, curves: Sequence[Curve]) -> ServerCurve:
    """Return every figure of the server's tests, per seed and round: what AdaFed's figures are drawn from."""
    row: ServerCurve = {"rule": rule}
    for name in _server_figures(curves):
        row[name] = [list(curve.server[name]) for curve in curves]
    return row


def _server_figures(curves: Sequence[Curve]) -> list[ServerFigure]:
    """Return which figures of the server's tests every seed has."""
    known = set.intersection(*(set(curve.server) for curve in curves))
    return [name for name in get_args(ServerFigure) if name in known]


def class_curve(rule: str, curves: Sequence[Curve]) -> ClassCurve:
    """Return F1 of single classes on the server's rows, per seed, round and class (paper 001)."""
    row: ClassCurve = {"rule": rule}
    if all("f1" in curve.by_class for curve in curves):
        row["f1"] = [[list(values) for values in curve.by_class["f1"]] for curve in curves]
    return row


def testing_row(rule: str, curves: Sequence[Curve]) -> TestingRow:
    """Return how many rounds tested several orders, and how often each order was kept."""
    kept: dict[str, int] = {}
    for curve in curves:
        for order, count in curve.orders.items():
            kept[order] = kept.get(order, 0) + count
    return {
        "rule": rule,
        "testing_rounds": _over_seeds(curves, lambda curve: float(curve.tests)),
        "orders_kept": dict(sorted(kept.items(), key=lambda item: (-item[1], item[0]))),
    }


def right_wrong(
    table: Mapping[tuple[str, int], Curve], baseline: str, rule: str, seeds: Sequence[int]
) -> RightWrong | None:
    """Count test samples that baseline and rule get right or wrong in the last round, summed over seeds."""
    counts = np.zeros((2, 2), dtype=np.int64)
    for seed in seeds:
        ours, theirs = table[baseline, seed].hits, table[rule, seed].hits
        if ours is None or theirs is None or len(ours) != len(theirs):
            return None
        np.add.at(counts, (ours.astype(np.int64), theirs.astype(np.int64)), 1)
    return {
        "rule": rule,
        "both_wrong": int(counts[0, 0]),
        "only_rule_right": int(counts[0, 1]),
        "only_baseline_right": int(counts[1, 0]),
        "both_right": int(counts[1, 1]),
    }


def score_curve(rule: str, curves: Sequence[Curve]) -> ScoreCurve:
    """Return mean and interval of the overall score, round by round, as far as all seeds went."""
    length = min(len(curve.rounds) for curve in curves)
    points: list[Estimate] = [estimate([float(curve.overall[i]) for curve in curves]) for i in range(length)]
    ends = [curve.seconds[:length].tolist() for curve in curves if curve.seconds is not None]
    found: ScoreCurve = {
        "rule": rule,
        "rounds": curves[0].rounds[:length].tolist(),
        "values": [curve.overall[:length].tolist() for curve in curves],
        "mean": [point.mean for point in points],
        "low": [point.low for point in points],
        "high": [point.high for point in points],
    }
    if len(ends) == len(curves):
        found["seconds"] = ends
    return found
