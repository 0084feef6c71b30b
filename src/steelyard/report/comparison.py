"""The comparison of rules as one document: rounds to target and gains, devices, samples, curves, verdicts.

All figures are pure functions of what a run recorded; `tables` writes the document for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from steelyard.base.errors import UserError
from steelyard.base.measures import MEASURES, Measure, estimate, measure_of
from steelyard.experiment.description import Description
from steelyard.report.baseline import TestName, find_baseline, verdicts
from steelyard.report.documents.comparison import Comparison, FlawedRow, RuleTables, TargetCell, TargetRow, TargetTable
from steelyard.report.flawed import flawed_shares
from steelyard.report.measures import rounds_to_shares
from steelyard.report.notices import chain_of, single_client_rounds
from steelyard.report.recorded_curves import Curve, read_curves
from steelyard.report.reporting_rows import recommendation_of
from steelyard.report.rule_rows import (
    class_curve,
    client_scores,
    device_row,
    right_wrong,
    score_curve,
    server_curve,
    server_row,
    testing_row,
)
from steelyard.runs.history import History, at_once


@at_once
def compare_run(run: History | Path | str, experiment: Description, baseline: str | None = None) -> Comparison:
    """Return the comparison of a run's rules as one JSON-ready document; `steelyard table --format json` prints it."""
    history = run if isinstance(run, History) else History(run)
    folder, settings = history.folder, experiment.rounds
    curves = read_curves(history)
    chosen = find_baseline(history, baseline)
    if not curves or not all(len(curve.rounds) for curve in curves):
        raise UserError(
            f"{folder}: no round has been tested, either not yet or because none is ever tested (partition.test = "
            "'none', or nodes with tests = false, and no partition.server_report); allowed: a run with at least one"
        )
    # A recommender may count epochs in place of rounds; its limit is then the last round there is.
    limit = settings.count or max(int(curve.rounds[-1]) for curve in curves)
    return {
        "recommendation": recommendation_of(history, experiment, curves, chosen),
        "measure": experiment.score_name,
        "run": str(folder),
        "status": history.info.get("status", "unknown"),
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
