"""The account of a finished run: final figures, rounds to target, who carried most weight; in a few lines too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.base.measures import ERROR, Measure, measure_of
from steelyard.experiment.description import Description
from steelyard.messages.updates import Counts, Floats
from steelyard.report.curves import (
    OF_A_STEP,
    on_rows,
    on_sample,
    read_curves,
    rounds_to_target,
    worst_devices,
    worst_tenth,
)
from steelyard.report.decide import find_baseline, flawed_lines, servers_rows, verdict_of
from steelyard.report.notices import (
    chain_of,
    flawed_shares,
    flaws_of,
    privacy_of,
    single_client_lines,
    single_client_rounds,
)
from steelyard.report.rendering import Table, as_text
from steelyard.report.result import (
    Cost,
    CriterionUsed,
    Exploded,
    HeavyClient,
    Lost,
    OnRows,
    OnSample,
    Orders,
    RecordedRule,
    RuleSummary,
    ServerTest,
    Summary,
    TargetReached,
)
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.columns import Tested
from steelyard.runs.database import unreadable
from steelyard.runs.history import History, at_once
from steelyard.weighing import criterion

TOP = 5
MOST_RULES = 12
LONGEST_NAME = 40


@at_once
def summarise(folder: Path, experiment: Description) -> Summary:
    """Return the account of a run as one JSON-ready document."""
    history, settings, measure = History(folder), experiment.rounds, experiment.score_name
    rules: list[RuleSummary] = []
    table: list[TargetReached] = []
    for federation in history.federations.to_dict("records"):
        rule, seed = str(federation["rule"]), int(federation["seed"])
        found = history.scores(rule, seed)
        rules.append(_account(history, rule, seed, federation, found, settings, measure_of(measure)))
        for target in settings.all_targets if measure_of(measure).of_rows else ():
            for share in settings.shares:
                reached = _reached(found, target, share, settings)
                table.append({"rule": rule, "seed": seed, "target": target, "share": share, "round": reached})
    seeds = list(dict.fromkeys(int(seed) for seed in history.federations["seed"]))
    if not seeds:
        raise unreadable(folder, "it names no rule")
    flaws = {str(seed): flaws_of(history, seed) for seed in seeds}
    return {
        "run": str(folder),
        "status": history.facts.status,
        "notes": history.notes,
        "weighed_one": single_client_rounds(history),
        "privacy": privacy_of(history),
        "chain": chain_of(history),
        "measure": measure,
        "target": settings.target,
        "share": settings.share,
        "server_rows": servers_rows(history),
        "sentence": _sentence(history, experiment, rules, flaws[str(seeds[0])]),
        "flaws": flaws,
        "rules": rules,
        "rounds_to_target": table,
    }


def _sentence(
    history: History, experiment: Description, rules: Sequence[RuleSummary], flaws: Mapping[str, Sequence[str]]
) -> str:
    """Say which rule to use and what flawed clients weighed, as the report does; nothing of a single rule."""
    curves, names = read_curves(history), list(dict.fromkeys(rule["rule"] for rule in rules))
    if len(names) < 2 or not curves or not all(len(curve.rounds) for curve in curves):
        return ""
    found = verdict_of(history, experiment, curves, find_baseline(history, None))
    weights: dict[str, list[float]] = {}
    for rule in rules:
        if rule["flawed"] is not None:
            weights.setdefault(rule["rule"], []).append(rule["flawed"]["weight"])
    means = {rule: float(np.mean(values)) for rule, values in weights.items()}
    return " ".join([found.sentence, *flawed_lines(flaws, _clients(history, names, rules[0]["seed"]), means, found)])


def _account(
    history: History,
    rule: str,
    seed: int,
    stored: Mapping[Any, Any],
    found: tuple[Counts, Floats],
    settings: RoundSettings,
    measure: Measure,
) -> RuleSummary:
    """Return the figures of one rule with one seed: `stored` is its row, `found` rounds and scores."""
    given = RecordedRule.model_validate_json(stored["settings"])
    scores = found[1]
    last = scores[-1] if len(scores) else np.zeros(0)
    tested = history.tested(rule, seed, int(found[0][-1]) - 1) if len(last) else None
    mine: Any = history.rounds[(history.rounds["rule"] == rule) & (history.rounds["seed"] == seed)]
    measured = mine[mine["accuracy"].notna()]
    flawed = flawed_shares(history, rule, seed)
    return {
        "algorithm": str(stored["algorithm"]),
        "rule": rule,
        "seed": seed,
        "rounds": int(mine["round"].max()) if len(mine) else 0,
        "accuracy": float(measured["accuracy"].iloc[-1]) if len(measured) else None,
        "accuracy_on": _on_sample(history, rule, seed, found),
        "worst_tenth": worst_tenth(last) if len(last) else None,
        "worst_tenth_on": None if tested is None else _worst_on(last, tested, measure),
        "p10": float(np.percentile(last, 10)) if len(last) else None,
        "p90": float(np.percentile(last, 90)) if len(last) else None,
        "rounds_to_target": _reached(found, settings.target, settings.share, settings) if measure.of_rows else None,
        "testing_rounds": int(mine["tests"].to_numpy().sum()),
        "orders": _orders(list(mine["priority"]), list(mine["tried"])),
        "server": _server(list(mine["server_metrics"]), list(mine["server_accuracy"])),
        "lost": _lost(list(mine["server_metrics"])),
        "ended": _ended(history, rule, seed),
        "left_out": int((mine["cohort"] - mine["answered"]).to_numpy().sum()),
        "seconds": float(mine["seconds"].to_numpy().sum()),
        "cost": _cost(mine),
        "heaviest_clients": _heaviest(history, rule, seed),
        "criteria": _criteria(rule, given, history),
        "fedavg": given.fedavg,
        "asks_clients": given.asks_clients,
        "adapts_loss": given.loss is not None,
        "flawed": flawed,
        "flawed_weight": None if flawed is None else flawed["weight"],
    }


def _worst_on(last: Floats, tested: Tested, measure: Measure) -> OnRows | None:
    """Return on how many rows the worst tenth of the clients was tested after the last round."""
    worst, errors = worst_devices(last), tested.metrics.get(ERROR)
    return on_rows([last[worst]], [tested.samples[worst]], measure, [None if errors is None else errors[worst]])


def _on_sample(history: History, rule: str, seed: int, found: tuple[Counts, Floats]) -> OnSample | None:
    """Return the interval of the last score, where a sample of the clients tested it; None where all did."""
    drawn = history.facts.tested.get(str(seed))
    if drawn is None or not len(found[1]):
        return None
    tested = history.tested(rule, seed, int(found[0][-1]) - 1)
    return on_sample(tested.score, tested.samples, drawn[1])


def _cost(rounds: Any) -> Cost:
    """Return what a rule's rounds took; what is known of no round stays unknown."""

    def total(column: str) -> float | None:
        return float(rounds[column].sum()) if rounds[column].notna().any() else None

    return {
        "cpu_seconds": total("cpu"),
        "gpu_seconds": total("gpu"),
        "bytes_up": total("up"),
        "bytes_down": total("down"),
    }


def _reached(found: tuple[Counts, Floats], target: float, share: float, settings: RoundSettings) -> int | None:
    return rounds_to_target(*found, target, share, above=settings.above)


def _orders(kept: list[str | None], tried: list[str]) -> Orders:
    """Return the priority order of the last round, how many rounds kept each, and how often each was tested."""
    known = [order for order in kept if isinstance(order, str)]
    tested = [order for text in tried for order, _ in json.loads(text)]
    return {"last": known[-1] if known else None, "kept": dict(Counter(known)), "tried": dict(Counter(tested))}


def _ended(history: History, rule: str, seed: int) -> Exploded | None:
    """Return in which round a rule's model exploded, and why; None for one that went on to its end."""
    round, reason = history.ended.get((rule, seed), (0, ""))
    return {"round": round, "reason": reason} if reason else None


def _server(metrics: list[str | None], accuracies: list[float]) -> ServerTest:
    """Return how the last model that the server tested does on its rows; empty when it tests none."""
    known = [(text, accuracy) for text, accuracy in zip(metrics, accuracies, strict=True) if isinstance(text, str)]
    if not known:
        return {}
    found = json.loads(known[-1][0])
    for name in OF_A_STEP:
        found.pop(name, None)
    if "f1" in found:
        found |= {"accuracy": known[-1][1], "macro_f1": float(np.mean(found["f1"]))}
    return found


def _lost(metrics: list[str | None]) -> Lost | None:
    """Return what the last weighing of low-rank adapters lost; None where there are none."""
    known = [json.loads(text) for text in metrics if isinstance(text, str)]
    found = [one for one in known if OF_A_STEP[0] in one]
    return {"product": found[-1][OF_A_STEP[0]], "factors": found[-1][OF_A_STEP[1]]} if found else None


def _clients(history: History, rules: list[str], seed: int) -> int:
    tested = {client for rule in rules for client in history.tested(rule, seed).clients}
    return len(tested or {client for rule in rules for client in history.cohorts(rule, seed).clients})


def _criteria(rule: str, settings: RecordedRule, history: History) -> list[CriterionUsed]:
    """Say for each criterion of a rule who measured it, so that a reader knows what a client could have lied about."""
    known = {name: found.measured_by for name, found in criterion.known().items()}
    known |= history.facts.measured_by
    trusted = history.facts.trust.get(rule, {})
    return [
        {"name": name, "measured_by": known.get(name, "unknown"), "trust": trusted.get(name, "unknown")}
        for name in settings.criteria
    ]


def _heaviest(history: History, rule: str, seed: int) -> list[HeavyClient]:
    found = history.cohorts(rule, seed)
    weighed = ~np.isnan(found.weight)
    client, weight = found.client[weighed], found.weight[weighed]
    totals = np.bincount(client, weight, minlength=len(found.clients))
    rounds = np.bincount(client, minlength=len(found.clients))
    samples = np.zeros(len(found.clients), np.int64)
    np.maximum.at(samples, client, found.samples[weighed])
    whole = float(totals.sum()) or 1.0
    # Names are in ascending order: of two with the same weight the first comes first.
    ranked = [index for index in np.argsort(-totals, kind="stable") if rounds[index]][:TOP]
    return [
        {
            "client": found.clients[index],
            "share": float(totals[index]) / whole,
            "rounds": int(rounds[index]),
            "samples": int(samples[index]),
        }
        for index in ranked
    ]


def short_account(summary: Summary) -> str:
    """Return a summary as a small table: rule, scores, rounds to the target; only columns that some rule has."""
    rules = summary["rules"]
    columns = {"rule": [_name(rule, several=len({rule["seed"] for rule in rules}) > 1) for rule in rules]}
    if any(rule["algorithm"] != "fedavg" for rule in rules):
        columns["algorithm"] = [str(rule["algorithm"]) for rule in rules]
    measure = summary["measure"]
    who = "users" if ranks_lists(measure) else "clients"
    columns[f"{measure} on the {who}"] = [show_measure(rule["accuracy"], measure) for rule in rules]
    columns["worst 10%"] = [show_measure(rule["worst_tenth"], measure) for rule in rules]
    columns[f"on {summary['server_rows']}"] = [show_measure(rule["server"].get("accuracy")) for rule in rules]
    reached = [rule["rounds_to_target"] for rule in rules]
    columns["rounds to target"] = ["-" if rounds is None else str(rounds) for rounds in reached]
    shown = {name: cells for name, cells in columns.items() if name == "rule" or any(cell != "-" for cell in cells)}
    rows = tuple(zip(*shown.values(), strict=True))
    text = as_text(Table("", tuple(shown), rows[:MOST_RULES]))
    more = [f"and {len(rules) - MOST_RULES} more rules"] if len(rules) > MOST_RULES else []
    return "\n".join([text, *more, *single_client_lines(summary["weighed_one"]), f"run stored in {summary['run']}"])


def _name(rule: RuleSummary, *, several: bool) -> str:
    name = str(rule["rule"])
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
    return f"{name}, seed {rule['seed']}" if several else name


def show_measure(value: float | None, measure: str = "accuracy") -> str:
    """Write a score: an accuracy in per cent, nDCG and errors as the numbers that they are."""
    return measure_of(measure).show(value)


def ranks_lists(measure: str) -> bool:
    """Whether scores are of recommenders' lists: their measures are named with a cutoff, such as ndcg@10."""
    return "@" in measure
