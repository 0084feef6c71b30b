"""The choice of `guarded`: candidates against every attack, on several data, by the worst case; in pieces.

    python -m benchmarks.guarded out --stage digits --part 1/4 --seconds 480

A cell is one attack on one kind of federation. In it all candidates train with all seeds as one cohort, 40 rounds, and
are read after 15 (early) and 40 (converged). Each part has a file of its own, OUT/STAGE-PART.jsonl, one line for each
rule of a cell; the same call goes on where it stopped, and a cell that any file in OUT holds is not run again.
Stages: `digits` and `mnist` take all candidates, or the best so many of what OUT holds (`--best`), `unipen62` the best
three; `cost` is for tries of what rules cost where nobody is hostile. `final` has seeds that no choice has seen: they
are opened for one set of rules, and then for no other. It runs every attack with the first share and number of rows;
with the others only those that take the most (`--few`), unless `--whole` asks for all. `--table` prints what OUT holds,
worst cases first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import guarded_page, guarded_tables
from benchmarks.guarded_tables import PLAIN
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
    guarded_page.GUARDED,
)
"""Words of `--rules`; EQ is the plain mean, against which the cost of a defence is told. Of these `median(EQ)` and
those with TR need no rows at the server. Rules that were tried here and removed since stand in the recorded results."""

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
}
STAGES: Mapping[str, tuple[tuple[str, ...], tuple[int, ...], int]] = {
    "digits": (("digits",), (1, 2, 3), 0),
    "mnist": (("mnist",), (11, 12, 13), 0),
    "cost": (("digits",), (31, 32), 0),
    "unipen62": (("unipen62",), (21, 22, 23, 24, 25), 3),
    "final": (("digits", "mnist", "unipen62"), (301, 302, 303, 304, 305), 0),
}
"""By stage: the data, the seeds, and how many of the best candidates of what was run before take part (0: all)."""

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

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others."""
        return tuple(asdict(self).values())


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
    for share, held, against in settings:
        if held not in known:
            known.add(held)
            yield from (Cell(stage, *kind, held, 0.0, CLEAN) for kind in kinds)
        yield from (Cell(stage, *kind, held, share, attack) for attack in against for kind in kinds)


def opened(folder: Path, seeds: Sequence[int], rules: Sequence[str], again: bool) -> None:
    """Note that these rules see the final seeds; refuse where others have seen them, unless `again`.

    Whoever looks at several sets of rules and keeps the best has chosen by these seeds, and they flatter the choice.
    """
    mine = sorted(set(rules) - {PLAIN})
    seen: list[list[str]] = []
    for path in (RESULTS / OPENED, folder / OPENED):
        seen += json.loads(path.read_text())["rules"] if path.is_file() else []
    if seen and mine not in seen and not again:
        print(
            f"--rules: got {', '.join(mine)}, but seeds {seeds[0]} to {seeds[-1]} were opened for {', '.join(seen[0])}"
            "; allowed: those, or --open-again, which the page must say",
            file=sys.stderr,
        )
        sys.exit(2)
    if mine not in seen or not (folder / OPENED).is_file():
        kept = {"seeds": list(STAGES["final"][1]), "rules": seen if mine in seen else [*seen, mine]}
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
    partition = {"clients": 20, "scheme": cell.scheme, "minimum": 5, "test_fraction": 0.1, **given["partition"]}
    partition |= {"server_report": "apart", "server_weighs": cell.rows}
    partition |= {"alpha": 0.5} if cell.scheme == "dirichlet" else {}
    rounds = {"count": CONVERGED, "fraction": 1.0, "evaluate_every": CONVERGED}
    return {**given, "name": "guarded", "partition": partition, "rounds": rounds}


def run_cell(
    cell: Cell, rules: Sequence[str], seeds: Sequence[int], compute: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Run a cell and return a line for each rule."""
    described = with_rules(build({**experiment(cell), "compute": dict(compute)}), list(rules))
    described = under_attack(described, cell.attack, cell.share)
    clients, server = assembled(described, None, None)
    try:
        described = described.for_clients(min(len(clients.names(seed)) for seed in seeds))
        federations = federations_of(described, seeds, described.criteria())
        parts = Parts.of(described, clients, server, federations)
        found = Collector()
        run_rounds(federations, {}, clients, server, parts.plan, found)  # type: ignore[arg-type]
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


def read(folder: Path) -> list[dict[str, Any]]:
    """Return all lines that a folder holds."""
    return [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]


def main() -> None:
    """Read the options and run the cells that are missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--stage", choices=list(STAGES), default="digits")
    parser.add_argument("--part", default="1/1", help="which share of the cells, such as 2/4")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="begin no cell that would end later")
    parser.add_argument("--attacks", help="as for steelyard attack; default all, in the final stage --adaptive too")
    parser.add_argument("--few", default=FEW, help="final: the attacks with further shares and rows")
    parser.add_argument("--whole", action="store_true", help="final: all attacks with every share and number of rows")
    parser.add_argument("--open-again", action="store_true", help="final: rules that did not see the seeds at first")
    parser.add_argument("--worst", type=int, help="only so many of the attacks that OUT holds, the worst for the rules")
    parser.add_argument("--shares", default="0.2,0.1,0.3")
    parser.add_argument("--rows", help="rows at the server, with commas; default 60, in the final stage 60,20,200")
    parser.add_argument("--seeds", type=int, default=0, help="only the first so many of the stage's seeds")
    parser.add_argument("--best", type=int, help="only so many of the candidates, by what OUT holds")
    parser.add_argument("--rules", help="these rules in place of the candidates, with spaces between")
    parser.add_argument("--memory", type=float, help="compute.memory_gb, where processes share a GPU")
    parser.add_argument("--table", action="store_true", help="run nothing, print what OUT holds")
    parser.add_argument("--page", type=Path, help="run nothing, write attacks.md and its picture into this folder")
    parser.add_argument("--machine", default="not said", help="on what it was run, for the page")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    known = read(options.out)
    if options.table:
        print(guarded_tables.text(known))
        return
    if options.page is not None:
        guarded_page.write(known, options.page, options.machine)
        return
    _, seeds, best = STAGES[options.stage]
    final = options.stage == "final"
    best = best if options.best is None else options.best
    seeds = seeds[: options.seeds] if options.seeds else seeds
    rules = options.rules.split() if options.rules else list(FINAL if final else CANDIDATES)
    # The last stages are chosen for by what went before them, so that their own seeds choose nothing.
    before = [each for each in known if options.stage in ("digits", "mnist") or each["stage"] != options.stage]
    rules = guarded_tables.best(before, rules, best) if best else rules
    if final:
        opened(options.out, seeds, rules, options.open_again)
    number, of = map(int, options.part.split("/"))
    shares = [float(text) for text in options.shares.split(",")]
    rows = [int(text) for text in (options.rows or ("60,20,200" if final else "60")).split(",")]
    attacks = attack_names([options.attacks or "all"], adaptive=final and options.attacks is None)
    attacks = guarded_tables.worst_attacks(before, rules, options.worst) if options.worst else attacks
    few = attack_names([options.few]) if final and not options.whole else None
    wanted = list(cells(options.stage, attacks, shares, rows, few))[number - 1 :: of]
    done = {tuple(each[name] for name in Cell.__dataclass_fields__) for each in known}
    compute = {} if options.memory is None else {"memory_gb": options.memory}
    begun, longest = time.monotonic(), 0.0
    path = options.out / f"{options.stage}-{number}of{of}.jsonl"
    for cell in [cell for cell in wanted if cell.key not in done]:
        started = time.monotonic()
        if started - begun + 1.2 * longest > options.seconds:
            print("time is up; the same call goes on", flush=True)
            sys.exit(3)
        mine = [rule for rule in rules if not final or cell.attack == CLEAN or rule != PLAIN]
        lines = run_cell(cell, mine, seeds, compute)
        with path.open("a") as out:
            out.write("".join(json.dumps(each) + "\n" for each in lines))
        longest = max(longest, time.monotonic() - started)
        print(*cell.key, f"{time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
