"""The choice of `guarded`: candidates against every attack, on several data, by the worst case; in pieces.

    python -m benchmarks.guarded out --stage digits --part 0/4 --seconds 480
    python -m benchmarks.guarded benchmarks/results/guarded --table

A cell is one attack on one kind of federation. In it all candidates train with all seeds as one cohort, 40 rounds, and
are read after 15 (early) and 40 (converged). Each part has a file of its own, OUT/STAGE-PART.jsonl, one line for each
rule of a cell; the same call goes on where it stopped, and a cell that any file in OUT holds is not run again.
`--rules` names others in place of the candidates, with spaces between. Stages: `digits` and `mnist` take all
candidates, `unipen62` the best of what `--table` shows, `cost` is for tries of what rules cost where nobody is hostile.
`final` has seeds that no choice has seen: they are opened for one set of rules, and then for no other unless
`--open-again`, which the page must say. It runs every attack with the first share and number of rows; with the others
only those that take the most (`--few`), unless `--whole` asks for all. `--table` prints what OUT holds: the worst case
of every rule over all data, in points of accuracy, from the least to the most below the plain mean.

Stage `roles` has colluders with roles on digits, `last` the same on four data sets with seeds of its own, opened like
those of `final`. `--clients` takes other cohorts (4, one hostile: `--shares 0.25`), `--held` server rows of which a
tenth have a wrong label (`wrong`) or that lack two classes (`lacking`). `--alone` leaves out the cells that nobody
attacks. `benchmarks/guarded.sh OUT SECONDS` shares the stage `last` out among a machine's cores and its GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import typer

from benchmarks.kit import Kept, share, start, table, whole_numbers, words
from steelyard.base import randomness
from steelyard.data.dataset import Population
from steelyard.data.partition import share_out
from steelyard.experiment.loading import build
from steelyard.experiment.parts import Parts, assembled, federations_of
from steelyard.experiment.rules import with_rules
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import RoundRecord, States
from steelyard.studies.attack import CLEAN, attack_names, under_attack

EARLY, CONVERGED = 15, 40
CANDIDATES = (
    "EQ",
    "median(EQ)",
    "trimmed-mean(TR;mix)",
    "fltrust(EQ)",
    "clip(RD)",
    "median(RD)",
    "trimmed-mean(RD)",
    "spectral(RD)",
    "spectral(capped(RD;max_shares=1.5))",
)
"""Words of `--rules`, the last one is what `guarded` is; EQ is the plain mean, against which the cost of a defence is
told. Of these `median(EQ)` and those with TR need no rows at the server. Rules that were tried here and removed since
stand in the recorded results."""

DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "data": {"source": "digits"},
        "partition": {"server": "fraction", "server_fraction": 0.3},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"learning_rate": 0.1, "epochs": 3, "batch_size": 10},
    },
    "mnist": {
        "data": {"source": "mnist"},
        "partition": {"server": "held-out", "samples": 500},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"learning_rate": 0.1, "epochs": 3, "batch_size": 25},
    },
    "unipen62": {
        "data": {"source": "npz", "path": "unipen62/unipen62_28x28.npz", "classes": 62},
        "partition": {"server": "fraction", "server_fraction": 0.2, "samples": 600},
        "model": {"name": "mlp", "hidden": [128]},
        "training": {"learning_rate": 0.1, "epochs": 3, "batch_size": 20},
    },
    "cifar10": {
        "data": {"source": "npz", "path": "cifar10/cifar10.npz", "features": "x", "labels": "y", "held_out": "test"},
        "partition": {"server": "held-out", "samples": 500},
        "model": {"name": "lenet"},
        "training": {"learning_rate": 0.05, "epochs": 3, "batch_size": 25},
    },
}
STAGES: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "digits": (("digits",), (1, 2, 3)),
    "mnist": (("mnist",), (11, 12, 13)),
    "cost": (("digits",), (31, 32)),
    "unipen62": (("unipen62",), (21, 22, 23, 24, 25)),
    "final": (("digits", "mnist", "unipen62"), (301, 302, 303, 304, 305)),
    "roles": (("digits",), (41, 42, 43)),
    "last": (("digits", "mnist", "unipen62", "cifar10"), (401, 402, 403)),
}
"""By stage: the data and the seeds."""
PLAIN = "EQ"
FINAL = (PLAIN, "guarded")
"""The rules of the final stage; the plain mean takes part where nobody is hostile, to tell what the others cost."""
FEW = "adaptive+inflation,ipm+inflation,scaled-reversal+inflation,backdoor-boosted+inflation"
"""What the final stage runs with further shares and rows."""
OPENED = "opened.json"
"""Which rules have seen the final seeds; it goes with the lines into `benchmarks/results/guarded`."""
RESULTS = Path(__file__).parent / "results" / "guarded"


@dataclass(frozen=True)
class Cell:
    """One attack on one kind of federation."""

    stage: str
    data: str
    scheme: str
    rows: int
    share: float
    attack: str
    clients: int = 20
    held: str = "right"
    """What the server's rows are like."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Cell:
        """Return the cell of a line; those of older runs have all fields but the last two."""
        return cls(**{name: line[name] for name in cls.__dataclass_fields__ if name in line})


def cells(
    stage: str, attacks: Sequence[str], shares: Sequence[float], rows: Sequence[int], few: Sequence[str] | None = None
) -> Iterator[Cell]:
    """Return the cells of a stage, the most wanted first: each number of rows begins without hostile clients.

    With `few`, only the first share and number of rows meet all attacks; the others meet these, one after another.
    """
    kinds = [(name, scheme) for name in STAGES[stage][0] for scheme in ("iid", "dirichlet")]
    if few is None:
        settings = [(share, held, attacks) for held in rows for share in shares]
    else:
        settings = [(shares[0], rows[0], attacks), *((share, rows[0], few) for share in shares[1:])]
        settings += [(shares[0], held, few) for held in rows[1:]]
    known: set[int] = set()
    for part, held, against in settings:
        if held not in known:
            known.add(held)
            yield from (Cell(stage, *kind, held, 0.0, CLEAN) for kind in kinds)
        yield from (Cell(stage, *kind, held, part, attack) for attack in against for kind in kinds)


def opened(folder: Path, seeds: Sequence[int], rules: Sequence[str], again: bool) -> None:
    """Note that these rules see the final seeds; refuse where others have seen them, unless `again`.

    Whoever looks at several sets of rules and keeps the best has chosen by these seeds, and they flatter the choice.
    """
    mine = sorted(set(rules) - {PLAIN})
    seen: list[list[str]] = []
    for path in (*sorted(RESULTS.rglob(OPENED)), folder / OPENED):
        kept = json.loads(path.read_text()) if path.is_file() else {}
        seen += kept["rules"] if kept.get("seeds") == list(seeds) else []
    known = any(set(mine) <= set(each) for each in seen)
    if seen and not known and not again:
        print(
            f"--rules: got {', '.join(mine)}, but seeds {seeds[0]} to {seeds[-1]} were opened for {', '.join(seen[0])}"
            "; allowed: those, or --open-again, which the page must say",
            file=sys.stderr,
        )
        sys.exit(2)
    if not known or not (folder / OPENED).is_file():
        kept = {"seeds": list(seeds), "rules": seen if known else [*seen, mine]}
        # Several parts begin at once and write the same.
        part = folder / f"{OPENED}.{os.getpid()}"
        part.write_text(json.dumps(kept) + "\n")
        part.replace(folder / OPENED)


class Collector:
    """Takes the rounds: accuracy on the rows that only report, how often a backdoor works, alarms; writes nothing."""

    def __init__(self) -> None:
        self.accuracy: dict[str, dict[int, float]] = {}
        self.backdoor: dict[str, float] = {}
        self.alarms: dict[str, dict[str, list[bool]]] = {}
        self.recall: dict[str, list[float]] = {}
        """Of each class, by the last model."""

    def commit(self, round: int, records: Sequence[RoundRecord], states: States, *_: object, last: bool) -> None:
        """Note what is wanted of a round."""
        for record in records:
            name = record.federation
            if record.server_accuracy is not None:
                self.accuracy.setdefault(name, {})[round] = record.server_accuracy
            if record.evaluations is not None and (found := worked(record)) is not None:
                self.backdoor[name] = found
            if record.updates is not None and record.weighing is not None and "TR" in record.weighing.criteria:
                flags = record.weighing.raw[:, record.weighing.criteria.index("TR")] == 0
                for client, flag in zip(record.updates.clients, flags.tolist(), strict=True):
                    self.alarms.setdefault(name, {}).setdefault(client, []).append(flag)


def worked(record: RoundRecord) -> float | None:
    """Return how often what an attack aims at is taken for its class, over all such test rows; None without any."""
    tests = record.evaluations
    assert tests is not None
    rates, rows = tests.metrics.get("backdoor"), tests.metrics.get("backdoor_rows")
    return None if rates is None or rows is None or not rows.sum() else float(np.average(rates, weights=rows))


def experiment(cell: Cell) -> dict[str, Any]:
    """Return the experiment of a cell without its hostile clients."""
    given = {name: dict(section) for name, section in DATA[cell.data].items()}
    partition = {
        "clients": cell.clients,
        "scheme": cell.scheme,
        "minimum": 5,
        "test_fraction": 0.1,
        **given["partition"],
    }
    partition |= {"server_report": "apart", "server_weighs": cell.rows}
    partition |= {"alpha": 0.5} if cell.scheme == "dirichlet" else {}
    rounds = {"count": CONVERGED, "fraction": 1.0, "evaluate_every": CONVERGED}
    return {**given, "name": "guarded", "partition": partition, "rounds": rounds}


def wrongly_labelled(*arguments: Any) -> Population:
    """Share out data; a tenth of the rows on which the server weighs have the label of the next class."""
    found = share_out(*arguments)
    chance = randomness.generator(arguments[2], purpose="benchmarks/guarded/wrong")
    wrong = chance.permutation(found.server)[: round(0.1 * len(found.server))]
    data = found.dataset.append(wrong, found.dataset.features[torch.from_numpy(wrong)])
    labels = data.labels.clone()
    labels[len(found.dataset) :] = (labels[len(found.dataset) :] + 1) % data.classes
    added = np.arange(len(found.dataset), len(data))
    server = np.concatenate([np.setdiff1d(found.server, wrong), added])
    return replace(found, dataset=replace(data, labels=labels), server=server)


def lacking(*arguments: Any) -> Population:
    """Share out data; the rows on which the server weighs lack classes 2 and 3."""
    found = share_out(*arguments)
    return replace(found, server=found.server[~np.isin(found.dataset.labels.numpy()[found.server], (2, 3))])


HELD = {"right": share_out, "wrong": wrongly_labelled, "lacking": lacking}
"""By `Cell.held`: how data are shared out."""


def run_cell(
    cell: Cell, rules: Sequence[str], seeds: Sequence[int], compute: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Run a cell and return a line for each rule."""
    described = with_rules(build({**experiment(cell), "compute": dict(compute)}), list(rules))
    described = under_attack(described, cell.attack, cell.share)
    with patch("steelyard.experiment.simulation.share_out", HELD[cell.held]):
        clients, server = assembled(described, None, None)
        for seed in seeds:
            clients.names(seed)
    try:
        described = described.for_clients(min(len(clients.names(seed)) for seed in seeds))
        federations = federations_of(described, seeds, described.criteria())
        parts = Parts.of(described, clients, server, federations)
        found = Collector()
        states = run_rounds(federations, {}, clients, server, parts.plan, found)  # type: ignore[arg-type]
        for federation in federations:
            tested = server.report(federation.seed, states[federation.name].parameters[None])
            assert tested.by_class is not None
            found.recall[federation.name] = tested.by_class["recall"][0].round(3).tolist()
        hostile = json.loads(clients.describe().get("flaws", "{}"))
    finally:
        clients.close()
    lines: list[dict[str, Any]] = []
    for rule in described.rules():
        mine = [federation for federation in federations if federation.rule_name == rule]
        lines.append(asdict(cell) | {"rule": rule, "seeds": list(seeds)} | line(found, mine, hostile))
    return lines


def line(found: Collector, mine: Sequence[Any], hostile: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of one rule, by seed: accuracy early and at the end (each the mean of three rounds), how
    often a backdoor worked, and the share of rounds in which honest and hostile clients were under alarm.
    """
    curves = [found.accuracy[federation.name] for federation in mine]
    kept: dict[str, Any] = {
        name: [round(float(np.mean([curve.get(r, 0.0) for r in range(at - 2, at + 1)])), 4) for curve in curves]
        for name, at in (("early", EARLY), ("converged", CONVERGED))
    }
    kept["recall"] = [found.recall[federation.name] for federation in mine]
    doors = [round(found.backdoor[f.name], 4) for f in mine if f.name in found.backdoor]
    kept |= {"backdoor": doors} if doors else {}
    alarms: list[list[float]] = []
    for federation in mine:
        bad = set(hostile.get(str(federation.seed), ()))
        flags = found.alarms.get(federation.name)
        if flags:
            groups = [[f for c, each in flags.items() if (c in bad) is who for f in each] for who in (False, True)]
            alarms.append([round(float(np.mean(group)), 4) if group else 0.0 for group in groups])
    return kept | ({"alarms": alarms} if alarms else {})


def worst(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the worst case of each rule as a table; gains and losses are paired by seed, and means over seeds."""
    setting = ["stage", "data", "scheme", "rows", "clients", "held"]
    long = pd.DataFrame(
        {
            **{name: asdict(Cell.of(each))[name] for name in (*setting, "share", "attack")},
            "rule": each["rule"],
            "time": time,
            "seed": seed,
            "reached": x,
        }
        for each in lines
        for time in ("early", "converged")
        for seed, x in zip(each["seeds"], each[time], strict=True)
    )
    clean = long[long["attack"] == CLEAN].drop(columns=["attack", "share"])
    clean = clean.drop_duplicates([*setting, "rule", "time", "seed"], keep="last")
    itself = clean.rename(columns={"reached": "itself"})
    mean = clean[clean["rule"] == PLAIN].drop(columns="rule").rename(columns={"reached": "mean"})
    long = long.merge(itself, how="left").merge(mean, how="left")
    long["lost"], long["below"] = 100 * (long["itself"] - long["reached"]), 100 * (long["mean"] - long["reached"])
    cells: Any = long.groupby([*setting, "share", "attack", "rule", "time"], as_index=False)[["lost", "below"]].mean()
    rows: list[dict[str, Any]] = []
    for rule, mine in cells.groupby("rule"):
        attacked = mine[mine["attack"] != CLEAN]
        if attacked.empty:  # the plain mean where only the others were attacked
            continue
        row = {"rule": f"`{rule}`", "clean cost": mine[mine["attack"] == CLEAN]["below"].max()}
        for (scheme, part), group in attacked.dropna(subset="lost").groupby(["scheme", "share"]):
            most = group.loc[group["lost"].idxmax()]
            attack = most["attack"].removesuffix("+inflation")
            row[f"{scheme}, {part:.0%}"] = f"{most['lost']:.1f} ({attack}, {most['time']}, {most['data']})"
        here = [each for each in lines if each["rule"] == rule]
        doors = [(each["share"], float(np.mean(each["backdoor"]))) for each in here if each.get("backdoor")]
        row |= {f"backdoor, {part:.0%}": f"{max(v for p, v in doors if p == part):.0%}" for part, _ in sorted(doors)}
        alarms = [np.mean([honest for honest, _ in each["alarms"]]) for each in here if "alarms" in each]
        row |= {"false alarms": f"{max(alarms):.1%}"} if alarms else {}
        row["below"] = attacked[attacked["share"] == 0.2]["below"].max()
        row |= recalls(here)
        rows.append(row | {"cells": sum(each["attack"] != CLEAN for each in here)})
    names = sorted({name for row in rows for name in row}, key=lambda name: (_place(name), name))
    return table(sorted(rows, key=lambda row: row["below"]), {name: name for name in names})


def recalls(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return by how much `class-flip` lowers the recall of its class (1) under one rule, and the least of any class
    where nobody is hostile; means over seeds, in points.
    """
    kept = {Cell.of(each): np.mean(each["recall"], axis=0) for each in lines if "recall" in each}
    clean = {replace(cell, share=0.0, attack=""): found for cell, found in kept.items() if cell.attack == CLEAN}
    lost = [
        clean[before][1] - found[1]
        for cell, found in kept.items()
        if cell.attack.startswith("class-flip") and (before := replace(cell, share=0.0, attack="")) in clean
    ]
    found = {"recall of a class": f"{100 * min(each.min() for each in clean.values()):.0f}"} if clean else {}
    return found | ({"recall lost": f"{100 * max(lost):.1f}"} if lost else {})


def _place(column: str) -> int:
    """Return where a column stands: the rule and its cost first, then losses, backdoors, alarms, and what was met."""
    order = ("rule", "clean cost", "below", "iid", "dirichlet", "backdoor", "recall", "false alarms", "cells")
    return next(at for at, begin in enumerate(order) if column.startswith(begin))


def main(
    out: Path,
    stage: Literal["digits", "mnist", "cost", "unipen62", "final", "roles", "last"] = "digits",
    part: str = "0/1",
    seconds: float = 86_400.0,
    attacks: str = "",
    few: str = FEW,
    whole: bool = False,
    open_again: bool = False,
    shares: str = "0.2,0.1,0.3",
    rows: str = "",
    only: str = "",
    clients: int = 20,
    held: Literal["right", "wrong", "lacking"] = "right",
    seeds: int = 0,
    rules: str = "",
    memory: float = 0.0,
    device: str = "auto",
    alone: bool = False,
    show: Annotated[bool, typer.Option("--table")] = False,
) -> None:
    """Run the cells that are missing, or print what there is."""
    kept = Kept(out / f"{stage}-{part.replace('/', 'of')}.jsonl", *sorted(out.glob("*.jsonl")))
    if show:
        print(worst(kept.lines))
        return
    out.mkdir(parents=True, exist_ok=True)
    final, some = stage in ("final", "last"), STAGES[stage][1][: seeds or None]
    chosen = rules.split() or list(FINAL if final else CANDIDATES)
    if final:
        opened(out, STAGES[stage][1], chosen, open_again)
    numbers = whole_numbers(rows or ("60,20,200" if final else "60"))
    met = attack_names([attacks or "all"], adaptive=final and not attacks)
    others = attack_names([few]) if final and not whole else None
    every = cells(stage, met, [float(text) for text in words(shares)], numbers, others)
    kinds = words(only) or list(STAGES[stage][0])
    every = [each for each in every if each.data in kinds and not (alone and each.attack == CLEAN)]
    wanted = share([replace(cell, clients=clients, held=held) for cell in every], part)
    done = {Cell.of(each) for each in kept.lines}
    begun, longest = time.monotonic(), 0.0
    for cell in [cell for cell in wanted if cell not in done]:
        started = time.monotonic()
        if started - begun + 1.2 * longest > seconds:
            print("time is up; the same call goes on", flush=True)
            sys.exit(3)
        mine = [rule for rule in chosen if not final or cell.attack == CLEAN or rule != PLAIN]
        compute = {"device": device, "threads": torch.get_num_threads()}
        kept.add(*run_cell(cell, mine, some, compute | ({"memory_gb": memory} if memory else {})))
        longest = max(longest, time.monotonic() - started)
        print(*asdict(cell).values(), f"{time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    start(main)
