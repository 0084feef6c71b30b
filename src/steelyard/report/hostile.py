"""What hostile clients did to a comparison: accuracy under each rule, what was lost, and what weight they had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from steelyard.report.comparison import compare_run
from steelyard.report.documents import AttackBlock, AttackRow, Attacks, Outcome
from steelyard.report.flawed import flaws_of
from steelyard.report.rendering import Table, render, wrapped
from steelyard.report.statistics import estimate
from steelyard.rounds.settings import RoundSettings
from steelyard.runs.reader import History


def outcome(folder: Path | str, settings: RoundSettings, without: Path | str | None = None) -> dict[str, Outcome]:
    """Return by rule: accuracy per seed (mean of the last rounds, on the server's rows where some report, else on the
    clients' tests), the share of all weight that hostile clients had, the largest weight that one had in any round,
    and how often a backdoor worked in the last round.

    Hostile are the flawed clients; given the folder of a run `without` the attack, those with more flaws than there.
    """
    document, history = compare_run(folder, settings), History(folder)
    before = None if without is None else History(without)
    hostile = {seed: _hostile(history, before, seed) for seed in document["seeds"]}
    curves: dict[str, list[list[float]]] = {row["rule"]: row["values"] for row in document["curves"]}
    curves |= {row["rule"]: row["accuracy"] for row in document["server_curves"] if "accuracy" in row}
    found: dict[str, Outcome] = {}
    for rule, by_seed in curves.items():
        weight, largest = _weights(history, rule, hostile)
        late = [curve[-settings.last :] for curve in by_seed]
        found[rule] = {
            "accuracy": [sum(rounds) / len(rounds) for rounds in late],
            "weight": weight,
            "largest": largest,
            "backdoor": _backdoor(history, rule),
        }
    return found


def _hostile(history: History, before: History | None, seed: int) -> set[str]:
    known = {} if before is None else flaws_of(before, seed)
    return {name for name, flaws in flaws_of(history, seed).items() if Counter(flaws) - Counter(known.get(name, []))}


def _weights(history: History, rule: str, hostile: Mapping[int, set[str]]) -> tuple[float | None, float | None]:
    """Return the share of all weight that hostile clients had, mean over seeds, and the largest of one in a round."""
    shares: list[float] = []
    largest: list[float] = []
    for seed, names in hostile.items():
        found = history.cohorts(rule, seed) if names else None
        weighed = None if found is None else ~np.isnan(found.weight)
        if found is None or weighed is None or not weighed.any():
            continue
        weight = found.weight[weighed]
        theirs = weight[np.isin(found.client[weighed], [i for i, name in enumerate(found.clients) if name in names])]
        shares.append(float(theirs.sum() / (weight.sum() or 1.0)))
        largest += [float(theirs.max())] if len(theirs) else []
    return math.fsum(shares) / len(shares) if shares else None, max(largest) if largest else None


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


def attack_document(outcomes: Mapping[str, Mapping[str, Outcome]], fraction: float) -> Attacks:
    """Return the outcomes of several attacks as one JSON-ready document; "clean" among them is what is lost from."""
    clean = outcomes.get("clean", {})
    attacks: list[AttackBlock] = []
    for attack, rules in outcomes.items():
        rows: list[AttackRow] = []
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


_EXPLAINED = (
    "accuracy: % in the last rounds, over the seeds; lost: points less than without hostile clients; weight: the "
    "share of all weight that hostile clients had; backdoor: how often the pattern is taken for its class"
)


def attack_text(document: Attacks, width: int | None = None) -> str:
    """Write the outcomes for people, a table for each attack, no wider than `width` where one is given."""
    tables: list[Table] = []
    for block in document["attacks"]:
        clean = block["attack"] == "clean"
        share = "no hostile clients" if clean else f"{document['fraction']:.0%} of the clients hostile"
        doors = any(row["backdoor"] for row in block["rules"])
        headings = ("accuracy",) if clean else ("accuracy", "lost", "weight", *(("backdoor",) if doors else ()))
        rows = tuple((row["rule"], *_cells(row)[: len(headings)]) for row in block["rules"])
        tables.append(Table(f"{block['attack']}: {share}", ("rule", *headings), rows))
    return f"{render(tables, [], 'text', width)}\n{wrapped(_EXPLAINED, width)}"


def _cells(row: AttackRow) -> tuple[str, str, str, str]:
    accuracy, lost, weight, backdoor = row["accuracy"], row["lost"], row["weight"], row["backdoor"]
    half = "" if math.isnan(accuracy["high"]) else f" ±{100 * (accuracy['high'] - accuracy['mean']):4.1f}"
    return (
        f"{100 * accuracy['mean']:.1f}{half}",
        "" if lost is None else f"{100 * lost['mean']:.1f}",
        "" if weight is None else f"{weight:.0%}",
        "" if backdoor is None else f"{backdoor['mean']:.0%}",
    )
