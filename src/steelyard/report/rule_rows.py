"""The rows of one rule in the document of a comparison: devices, clients, the server's figures, curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np

from steelyard.base.measures import Estimate, EstimateJson, Measure, estimate
from steelyard.messages.updates import Counts
from steelyard.report.documents.comparison import (
    ClassCurve,
    ClientScore,
    DeviceRow,
    RightWrong,
    ScoreCurve,
    ServerCurve,
    ServerFigure,
    ServerRow,
    TestingRow,
)
from steelyard.report.documents.shared import OnRows
from steelyard.report.measures import jain, on_rows, worst_devices, worst_score, worst_tenth
from steelyard.report.recorded_curves import Curve

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
