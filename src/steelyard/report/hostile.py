"""What hostile clients did to a comparison: accuracy under each rule, what was lost, and what weight they had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import MEASURES, EstimateJson, estimate, show_estimate
from steelyard.report.curves import read_curves
from steelyard.report.decide import Exclusions, Rows, Verdict, decide, recorded_rules
from steelyard.report.notices import flaws_of
from steelyard.report.rendering import Table, paragraph, render, wrapped
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.history import History, at_once

CLEAN = "clean"
"""The name of the run without hostile clients."""


class Outcome(TypedDict):
    """A rule under one attack: accuracy per seed, the weight of hostile clients, how often a backdoor worked, and in
    what share of its rounds an honest client was under alarm (None without a detector, the criterion TR).
    """

    accuracy: list[float]
    weight: float | None
    largest: float | None
    backdoor: list[float] | None
    false_alarms: float | None
    ended: int
    """In how many seeds its model exploded."""
    fedavg: bool
    """Whether it weighs by dataset size alone, whatever it is called."""


class AttackRow(TypedDict):
    """A rule under one attack, over its seeds; `lost` is what it lost against the run without hostile clients."""

    rule: str
    accuracy: EstimateJson
    lost: EstimateJson | None
    weight: float | None
    largest: float | None
    backdoor: EstimateJson | None
    false_alarms: float | None
    ended: int
    fedavg: bool


class AttackBlock(TypedDict):
    """All rules under one attack."""

    attack: str
    rules: list[AttackRow]


class Attacks(TypedDict):
    """The outcomes of several attacks; "clean" among them is what is lost from."""

    recommendation: Verdict | None
    fraction: float
    flawed_clients: list[str]
    attacks: list[AttackBlock]


@at_once
def outcome(folder: Path | str, settings: RoundSettings, without: Path | str | None = None) -> dict[str, Outcome]:
    """Return by rule: accuracy per seed (mean of the last rounds, on the server's rows where some report, else on the
    clients' tests), the share of all weight that hostile clients had, the largest weight that one had in any round,
    how often a backdoor worked in the last round, and how often honest clients were under alarm.

    Hostile are the flawed clients; given the folder of a run `without` the attack, those with more flaws than there.
    """
    history = History(folder)
    before = None if without is None else History(without)
    found_curves = sorted(read_curves(history), key=lambda curve: curve.seed)
    hostile = {curve.seed: _hostile(history, before, curve.seed) for curve in found_curves}
    curves: dict[str, list[Sequence[float]]] = {}
    for curve in found_curves:
        tested = curve.server.get("accuracy") or curve.overall.tolist()
        curves.setdefault(curve.rule, []).append(tested)
    settings_of = recorded_rules(history)
    found: dict[str, Outcome] = {}
    for rule, by_seed in curves.items():
        weight, largest = _weights(history, rule, hostile)
        late = [curve[-settings.last :] for curve in by_seed]
        found[rule] = {
            "accuracy": [sum(rounds) / len(rounds) for rounds in late],
            "weight": weight,
            "largest": largest,
            "backdoor": _backdoor(history, rule),
            "false_alarms": _false_alarms(history, rule, hostile),
            "ended": sum(name == rule for name, _ in history.ended),
            "fedavg": settings_of[rule].fedavg,
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


def _false_alarms(history: History, rule: str, hostile: Mapping[int, set[str]]) -> float | None:
    """Return the share of the rounds of honest clients in which the detector (TR) left them out; None without it."""
    flags: list[bool] = []
    for seed, names in hostile.items():
        found = history.cohorts(rule, seed)
        if "TR" not in found.criteria:
            return None
        bad = [place for place, name in enumerate(found.clients) if name in names]
        flags += (found.raw[~np.isin(found.client, bad), found.criteria.index("TR")] == 0).tolist()
    return math.fsum(flags) / len(flags) if flags else None


def _backdoor(history: History, rule: str) -> list[float] | None:
    """Return per seed how often the last model takes what the attack aims at for its class, over all such test rows."""
    frame = history.evaluations
    if "backdoor" not in frame.columns:
        return None
    # Clients have more or fewer rows that show it, some none; runs of before counted all test rows.
    counts = "backdoor_rows" if "backdoor_rows" in frame.columns else "samples"
    columns = (frame[name].tolist() for name in ("rule", "seed", "round", counts, "backdoor"))
    mine = [row[1:] for row in zip(*columns, strict=True) if row[0] == rule]
    last = max(round for _, round, _, _ in mine)
    found: list[float] = []
    for seed in sorted({seed for seed, *_ in mine}):
        rows = [(count, rate) for of, round, count, rate in mine if (of, round) == (seed, last)]
        found.append(sum(count * rate for count, rate in rows) / (sum(count for count, _ in rows) or 1.0))
    return found


def flawed_before(folder: Path | str) -> list[str]:
    """Return which clients the experiment itself makes flawed, before anybody attacks: in the first seed, by name."""
    history = History(folder)
    return sorted(flaws_of(history, min(history.federations["seed"], default=0)))


def attack_document(
    outcomes: Mapping[str, Mapping[str, Outcome]], fraction: float, flawed: Sequence[str] = ()
) -> Attacks:
    """Return the outcomes of several attacks as one JSON-ready document; "clean" among them is what is lost from.

    `flawed` are the clients that the experiment itself makes flawed: they stay so, in the run without attack too.
    """
    clean = outcomes.get(CLEAN, {})
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
                    "lost": estimate(lost).as_json() if lost and attack != CLEAN else None,
                    "backdoor": None if not found["backdoor"] else estimate(found["backdoor"]).as_json(),
                }
            )
        attacks.append({"attack": attack, "rules": rows})
    hostile = {attack: rules for attack, rules in outcomes.items() if attack != CLEAN}
    return {
        "recommendation": _recommendation(hostile),
        "fraction": fraction,
        "flawed_clients": list(flawed),
        "attacks": attacks,
    }


def _recommendation(outcomes: Mapping[str, Mapping[str, Outcome]]) -> Verdict | None:
    """Say which rule to use against these attacks: by the attack that harms it most, seed by seed."""
    if not outcomes:
        return None
    first = next(iter(outcomes.values()))
    rules = list(first)
    least = {
        rule: [min(seed) for seed in zip(*(found[rule]["accuracy"] for found in outcomes.values()), strict=True)]
        for rule in rules
    }
    where = f"under {next(iter(outcomes))}" if len(outcomes) == 1 else f"under the worst of {len(outcomes)} attacks"
    baseline = next((rule for rule in rules if first[rule]["fedavg"]), rules[0])
    left_out = {
        rule: f"its model exploded in {found[rule]['ended']} of {len(least[rule])} seeds under {attack}"
        for attack, found in outcomes.items()
        for rule in rules
        if found[rule]["ended"]
    }
    problem = f"{baseline}, which the others are held against: {left_out[baseline]}" if baseline in left_out else ""
    rows, exclusions = Rows(MEASURES["accuracy"], where), Exclusions(left_out, problem)
    return decide(least, baseline, rows, exclusions, command="steelyard attack")


_EXPLAINED = (
    "accuracy: % in the last rounds, over the seeds; lost: points less than without hostile clients; weight: the "
    "share of all weight that hostile clients had; backdoor: how often rows that an attack aims at are taken for its "
    "class; false alarms: rounds of honest clients in which the detector left them out"
)


def attack_text(document: Attacks, width: int | None = None) -> str:
    """Write the outcomes for people, a table for each attack, no wider than `width` where one is given."""
    tables: list[Table] = []
    for block in document["attacks"]:
        clean = block["attack"] == CLEAN
        share = _without(document) if clean else f"{document['fraction']:.0%} of the clients hostile"
        cells = {row["rule"]: _cells(row) for row in block["rules"]}
        always = ("accuracy",) if clean else ("accuracy", "lost", "weight")
        headings = [name for name in _HEADINGS if name in always or any(found[name] for found in cells.values())]
        rows = tuple((rule, *(found[name] for name in headings)) for rule, found in cells.items())
        name = "no attack" if clean else block["attack"]
        tables.append(Table(f"{name}: {share}", ("rule", *headings), rows))
    found = document["recommendation"]
    answer = "" if found is None else f"{paragraph(found.sentence, 'text', width)}\n\n"
    return f"{answer}{render(tables, [], 'text', width)}\n{wrapped(_EXPLAINED, width)}"


def _without(document: Attacks) -> str:
    """Say what the run without attack is: not free of flawed clients where the experiment has some of its own."""
    flawed = len(document["flawed_clients"])
    return (
        f"no hostile clients, but {flawed} that the experiment itself makes flawed" if flawed else "no hostile clients"
    )


_HEADINGS = ("accuracy", "lost", "weight", "backdoor", "false alarms")


def _cells(row: AttackRow) -> dict[str, str]:
    accuracy, lost, weight, backdoor = row["accuracy"], row["lost"], row["weight"], row["backdoor"]
    alarms = row["false_alarms"]
    return {
        "accuracy": show_estimate(accuracy, 1, 100.0),
        "lost": "" if lost is None else show_estimate(lost, 1, 100.0),
        "weight": "" if weight is None else f"{weight:.0%}",
        "backdoor": "" if backdoor is None else show_estimate(backdoor, 0, 100.0, unit=" %"),
        "false alarms": "" if alarms is None else f"{alarms:.1%}",
    }
