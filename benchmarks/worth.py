"""Where weighing helps and where it does not: clients of unequal worth, every rule, with intervals and Holm's test.

    python -m benchmarks.worth --data digits --seeds 10 --out worth-digits.json
    python -m benchmarks.worth --table worth-digits.json worth-mnist.json > benchmarks/results/worth.md

Each scenario is one comparison: the same clients, cohorts and first models for every rule. What counts is the accuracy
on clean rows that only report, mean of the last five rounds, held against FedAvg seed by seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard import UserError
from steelyard.api import runnable
from steelyard.base.measures import estimate
from steelyard.experiment.loading import build
from steelyard.experiment.rules import with_rules
from steelyard.report.statistics import holm, paired_p, verdict

BIG = {"pick": "biggest", "count": 6}
SOME = {"pick": "random", "count": 6}
SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "clean, IID": {},
    "clean, Dirichlet 0.3": {"partition": {"scheme": "dirichlet", "alpha": 0.3}},
    "labels flipped in pairs, 6 biggest": {"flaws": [{"kind": "labels-flipped", "how": "pairs", **BIG}]},
    "labels flipped in pairs, 6 at random": {"flaws": [{"kind": "labels-flipped", "how": "pairs", **SOME}]},
    "labels flipped evenly, 6 biggest": {"flaws": [{"kind": "labels-flipped", "how": "uniform", **BIG}]},
    "half the labels flipped evenly, 6 biggest": {
        "flaws": [{"kind": "labels-flipped", "how": "uniform", "amount": 0.5, **BIG}]
    },
    "half the classes missing, 6 biggest": {"flaws": [{"kind": "classes-missing", "amount": 0.5, **BIG}]},
    "the same half of the classes missing, 6 biggest": {
        "flaws": [{"kind": "classes-missing", "classes": "first half", **BIG}]
    },
    "noisy, 6 biggest": {"flaws": [{"kind": "noisy", "amount": 1.0, **BIG}]},
    "blurred, 6 biggest": {"flaws": [{"kind": "blurred", "amount": 1.5, **BIG}]},
    "half the pixels missing, 6 biggest": {"flaws": [{"kind": "missing", "amount": 0.5, **BIG}]},
    "rows repeated 10 times, 6 biggest": {"flaws": [{"kind": "rows-repeated", "amount": 10, **BIG}]},
    "few steps, 6 biggest": {"flaws": [{"kind": "few-steps", "amount": 0.05, **BIG}]},
    "stale by 5 rounds, 6 biggest": {"flaws": [{"kind": "stale", "amount": 5, **BIG}]},
    "own model, 6 biggest": {"flaws": [{"kind": "own-model", **BIG}]},
    "free riders that claim size, 6 at random": {
        "flaws": [{"kind": "free-rider", **SOME}, {"kind": "claims-size", "amount": 10, "pick": "same"}]
    },
}
WITHOUT_ROWS = ("EQ", "DS>LD>MD", "LD>DS>MD/max", "LE", "AG", "AG>LE>DS/max")
WITH_ROWS = ("VP", "power(VP)^3", "adafed", "VP>LD>DS/max", "GA", "fitted(fedavg)", "fitted(EQ)", "server-only")
BASE: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "data": {"source": "digits"},
        "model": {"name": "mlp", "hidden": [64]},
        "rounds": {"count": 20},
        "partition": {"server_fraction": 0.25, "server_weighs": 40},
    },
    "mnist": {
        "data": {"source": "mnist"},
        "model": {"name": "mlp", "hidden": [64]},
        "rounds": {"count": 20},
        "partition": {"server_fraction": 0.9, "server_weighs": 40},
    },
    "unipen62": {
        "data": {"source": "npz", "path": "unipen62/unipen62_28x28.npz", "classes": 62},
        "model": {"name": "mlp", "hidden": [128]},
        "rounds": {"count": 30},
        "partition": {"server_fraction": 0.25, "server_weighs": 124},
    },
}


CLASSES = {"digits": 10, "mnist": 10, "unipen62": 62}


def _named_classes(flaw: Mapping[str, Any], classes: int) -> dict[str, Any]:
    return {**flaw, "classes": list(range(classes // 2))} if "classes" in flaw else dict(flaw)


def description(data: str, scenario: Mapping[str, Any], seed: int, engine: str, device: str) -> dict[str, Any]:
    """Put the experiment of one scenario together as a document: 20 clients of uneven size, half of them a round."""
    base = BASE[data]
    partition = {"scheme": "iid", "clients": 20, "size_spread": 0.8, "minimum": 10, "test_fraction": 0.1}
    return {
        "name": "worth",
        "seed": seed,
        "data": base["data"],
        "partition": partition
        | {"server": "fraction", "server_report": "apart"}
        | dict(base["partition"])
        | dict(scenario.get("partition", {})),
        "flaws": [_named_classes(flaw, CLASSES[data]) for flaw in scenario.get("flaws", [])],
        "model": base["model"],
        "training": {"learning_rate": 0.1, "epochs": 3, "batch_size": 10},
        "rounds": {"fraction": 0.5, "last": 5, **base["rounds"]},
        "compute": {"engine": engine, "device": device},
        "store": {"checkpoint_every": 1000},
    }


def measure(data: str, scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one scenario with every rule and seed; returns accuracies by rule, one per seed, and the weight of flawed."""
    document = description(data, SCENARIOS[scenario], options.seed, options.engine, options.device)
    if options.rounds is not None:
        document["rounds"]["count"] = options.rounds
    described = with_rules(build(document), ["fedavg", *options.rules])
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = runnable(described).compare(["recipe"], options.seeds, Path(folder) / "run")
        rules = {rule.rule: rule.figures for rule in result.comparison.rules}
        late = {rule: list(figures["server_accuracy_late"].values) for rule, figures in rules.items()}
        flawed = {rule: found["flawed_weight"].mean for rule, found in rules.items() if "flawed_weight" in found}
    return {"scenario": scenario, "late": late, "flawed": flawed, "seconds": time.perf_counter() - begun}


def judged(late: Mapping[str, Sequence[float]]) -> dict[str, tuple[str, str]]:
    """Return for each rule its gain over FedAvg in points with a 95 % interval, and the verdict after Holm."""
    rules = [rule for rule in late if rule != "fedavg"]
    gains = {rule: [100 * (a - b) for a, b in zip(late[rule], late["fedavg"], strict=True)] for rule in rules}
    adjusted = holm([paired_p(gains[rule]) for rule in rules])
    found: dict[str, tuple[str, str]] = {}
    for rule, p in zip(rules, adjusted, strict=True):
        gain = estimate(gains[rule])
        mark = {"better": "**", "worse": "_"}.get(verdict(gain.mean, p), "")
        found[rule] = (f"{mark}{gain.mean:+.1f} ± {gain.half:.1f}{mark}".replace("-", "−"), verdict(gain.mean, p))
    return found


def joined(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the parts of one data set together, scenarios in their order."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        known = found.setdefault(str(result["data"]), {**result, "scenarios": []})
        known["scenarios"] = [*known["scenarios"], *result["scenarios"]]
    names = list(SCENARIOS)
    for result in found.values():
        result["scenarios"].sort(key=lambda row: names.index(row["scenario"]))
    return list(found.values())


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Write the tables of some results as Markdown: a table per data set, a line per scenario, a column per rule."""
    parts: list[str] = []
    for result in joined(results):
        rules = [rule for rule in result["scenarios"][0]["late"] if rule != "fedavg"]
        parts += [f"### {result['data']} ({result['seeds']} seeds, {result['machine']})", ""]
        parts += ["| scenario | fedavg (%) | " + " | ".join(rules) + " |"]
        parts += ["|---" * (len(rules) + 2) + "|"]
        for row in result["scenarios"]:
            base = estimate([100 * value for value in row["late"]["fedavg"]])
            cells = judged(row["late"])
            found = [cells[rule][0] if rule in cells else "–" for rule in rules]
            parts.append(f"| {row['scenario']} | {base.mean:.1f} ± {base.half:.1f} | " + " | ".join(found) + " |")
        wins = {rule: [judged(row["late"]).get(rule, ("", ""))[1] for row in result["scenarios"]] for rule in rules}
        counts = [f"{wins[rule].count('better')} / {wins[rule].count('worse')}" for rule in rules]
        parts += ["| **better / worse** | | " + " | ".join(counts) + " |", ""]
    return "\n".join(parts)


def main() -> None:
    """Run the scenarios asked for, or write the tables of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=sorted(BASE), default="digits")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--rounds", type=int, help="in place of the data set's own number")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rules", nargs="*", default=[*WITHOUT_ROWS, *WITH_ROWS], help="what stands beside fedavg")
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    parser.add_argument(
        "--part", default="0/1", help="I/N: every N-th scenario from the I-th on, to share the work out"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="*", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in options.table]))
        return
    scenarios: list[dict[str, Any]] = []
    first, step = (int(part) for part in options.part.split("/"))
    for scenario in options.only[first::step]:
        try:
            found = measure(options.data, scenario, options)
        except UserError as error:
            sys.exit(f"{scenario}: {error}")
        scenarios.append(found)
        gains = {rule: cell[0] for rule, cell in judged(found["late"]).items()}
        print(f"{scenario} ({found['seconds']:.0f} s): {gains}", file=sys.stderr, flush=True)
        document = {"data": options.data, "seeds": options.seeds, "first_seed": options.seed, "scenarios": scenarios}
        if options.out is not None:
            options.out.write_text(json.dumps({**document, "machine": platform.machine()}), encoding="utf-8")
    if options.out is None:
        print(table([{**document, "machine": platform.machine()}]))


if __name__ == "__main__":
    main()
