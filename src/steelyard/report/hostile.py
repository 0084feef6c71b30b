"""What hostile clients did to a comparison: accuracy under each rule, what was lost, and what weight they had."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.report.comparison import compare_run
from steelyard.report.flawed import flaws_of
from steelyard.report.statistics import estimate
from steelyard.rounds.settings import RoundSettings
from steelyard.runs.reader import History


def outcome(folder: Path | str, settings: RoundSettings) -> dict[str, dict[str, Any]]:
    """Return by rule: accuracy per seed (mean of the last rounds, on the server's rows where some report, else on the
    clients' tests), the share of all weight that flawed clients had, the largest weight that one had in any round,
    and how often a backdoor worked in the last round.
    """
    document, history = compare_run(folder, settings), History(folder)
    curves: dict[str, list[list[float]]] = {row["rule"]: row["values"] for row in document["curves"]}
    curves |= {row["rule"]: row["accuracy"] for row in document["server_curves"] if "accuracy" in row}
    weights = {row["rule"]: row["weight"]["mean"] for row in document["flawed"]}
    return {
        rule: {
            "accuracy": [sum(curve[-settings.last :]) / len(curve[-settings.last :]) for curve in by_seed],
            "weight": weights.get(rule),
            "largest": _largest(history, rule, document["seeds"]),
            "backdoor": _backdoor(history, rule),
        }
        for rule, by_seed in curves.items()
    }


def _largest(history: History, rule: str, seeds: Sequence[int]) -> float | None:
    flawed = {(seed, client) for seed in seeds for client in flaws_of(history, seed)}
    frame = history.clients
    columns = (frame[name].tolist() for name in ("rule", "seed", "client", "weight"))
    found = [
        float(weight)
        for of, seed, client, weight in zip(*columns, strict=True)
        if of == rule and (seed, client) in flawed and weight is not None and not math.isnan(weight)
    ]
    return max(found) if found else None


def _backdoor(history: History, rule: str) -> list[float] | None:
    """Return per seed how often the last model takes the pattern for its class, over all clients' test rows."""
    frame = history.evaluations
    if "backdoor" not in frame.columns:
        return None
    columns = (frame[name].tolist() for name in ("rule", "seed", "round", "samples", "backdoor"))
    mine = [row[1:] for row in zip(*columns, strict=True) if row[0] == rule]
    last = max(round for _, round, _, _ in mine)
    found: list[float] = []
    for seed in sorted({seed for seed, *_ in mine}):
        rows = [(samples, rate) for of, round, samples, rate in mine if (of, round) == (seed, last)]
        found.append(sum(samples * rate for samples, rate in rows) / sum(samples for samples, _ in rows))
    return found


def attack_document(outcomes: Mapping[str, Mapping[str, Mapping[str, Any]]], fraction: float) -> dict[str, Any]:
    """Return the outcomes of several attacks as one JSON-ready document; "clean" among them is what is lost from."""
    clean = outcomes.get("clean", {})
    attacks: list[dict[str, Any]] = []
    for attack, rules in outcomes.items():
        rows: list[dict[str, Any]] = []
        for rule, found in rules.items():
            before = clean[rule]["accuracy"] if rule in clean else []
            lost = [a - b for a, b in zip(before, found["accuracy"], strict=True)] if before else []
            rows.append(
                {
                    "rule": rule,
                    **found,
                    "accuracy": estimate(found["accuracy"]).as_json(),
                    "lost": estimate(lost).as_json() if lost and attack != "clean" else None,
                    "backdoor": None if not found["backdoor"] else estimate(found["backdoor"]).as_json(),
                }
            )
        attacks.append({"attack": attack, "rules": rows})
    return {"fraction": fraction, "attacks": attacks}


def attack_lines(document: Mapping[str, Any], width: int = 80) -> list[str]:
    """Lay the document out for people, a block per attack, no wider than `width`."""
    lines: list[str] = []
    for block in document["attacks"]:
        share = "" if block["attack"] == "clean" else f", {document['fraction']:.0%} of the clients hostile"
        doors = any(row["backdoor"] for row in block["rules"])
        longest = max(len(row["rule"]) for row in block["rules"])
        column = max(4, min(longest, width - (43 if doors else 32)))
        head = f"{'rule':<{column}}  {'accuracy':>12}  {'lost':>6}  {'weight':>6}"
        lines += ["", f"{block['attack']}{share}", head + (f"  {'backdoor':>9}" if doors else "")]
        for row in block["rules"]:
            name = row["rule"]
            if len(name) > column:
                lines.append(name if len(name) <= width else f"{name[: width - 1]}…")
                name = ""
            lines.append(f"{name:<{column}}  {_figures(row)}" + (f"  {_percent(row['backdoor']):>9}" if doors else ""))
    return lines[1:]


def _figures(row: Mapping[str, Any]) -> str:
    accuracy, lost = row["accuracy"], row["lost"]
    one = math.isnan(accuracy["high"])
    half = "" if one else f" ±{100 * (accuracy['high'] - accuracy['mean']):4.1f}"
    shown = f"{100 * accuracy['mean']:.1f}{half}"
    weight = "" if row["weight"] is None else f"{row['weight']:.0%}"
    return f"{shown:>12}  {'' if lost is None else format(100 * lost['mean'], '.1f'):>6}  {weight:>6}"


def _percent(value: Mapping[str, Any] | None) -> str:
    return "" if value is None else f"{value['mean']:.0%}"
