"""What hostile clients do under each rule: MNIST, 10 and 100 clients, IID and Dirichlet 0.5, 10, 20 and 30 % hostile.

    python -m benchmarks.attacks --stage 1 --out attacks --workers 8 --budget 540
    python -m benchmarks.attacks --table attacks --page docs/results/attacks.md

A cell is one comparison: one setting, one attack, one share of hostile clients; all rules and seeds train in one stack.
Each cell is written as a JSON file when it is done, and one that is there already is not run again, so that a run that
was cut off goes on where it stopped. Stages, the most wanted first: 1 without hostile clients and 20 % that also lie, 2
the same with 10 and 30 %, 3 hostile clients that do not lie. What counts is the accuracy on MNIST test rows that only
report, mean of the last five rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.api import runnable
from steelyard.experiment.attacking import ATTACKS, CLEAN, INFLATION, under_attack
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.loading import build
from steelyard.report.hostile import outcome
from steelyard.report.statistics import estimate

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "10 clients, IID": {"clients": 10, "scheme": "iid"},
    "10 clients, Dirichlet 0.5": {"clients": 10, "scheme": "dirichlet", "alpha": 0.5},
    "100 clients, IID": {"clients": 100, "scheme": "iid"},
    "100 clients, Dirichlet 0.5": {"clients": 100, "scheme": "dirichlet", "alpha": 0.5},
}
GUARDED = "guarded"
Cells = Mapping[tuple[str, str, float], Mapping[str, Any]]
"""What was measured, by setting, attack and share."""
RULES = (
    *("fedavg", "EQ", "clip(EQ)", "median(EQ)", "trimmed-mean(EQ)", "multi-krum(EQ)", "centred-clip(EQ)"),
    *("geometric-median(EQ)", "fltrust(EQ)", "power(VP)^3", "clip(power(VP)^3)", GUARDED),
)
LYING = [name if name == INFLATION else f"{name}+{INFLATION}" for name in ATTACKS]
HONEST = [name for name in ATTACKS if name != INFLATION]
ALLOWED = {"iid": 3.0, "dirichlet": 6.0}
"""Points of accuracy that the recommended rule may lose at 20 % hostile and lying."""


def cells(stage: int, settings: Sequence[str]) -> list[tuple[str, str, float]]:
    """Return the cells of a stage: setting, attack and share."""
    if stage == 1:
        wanted = [(CLEAN, 0.0), *((attack, 0.2) for attack in LYING)]
    elif stage == 2:
        wanted = [(attack, share) for share in (0.3, 0.1) for attack in LYING]
    else:
        wanted = [(attack, share) for share in (0.2, 0.3, 0.1) for attack in HONEST]
    return [(setting, attack, share) for attack, share in wanted for setting in settings]


def document(setting: str, options: argparse.Namespace) -> dict[str, Any]:
    """Put the experiment of one setting together: 500 rows a client, all clients every round, 100 rows that weigh."""
    data, server = {"source": "mnist"}, {"server": "held-out", "server_weighs": 100}
    rows: dict[str, Any] = {"samples": 500}
    if options.data == "digits":
        data, rows = {"source": "digits"}, {}
        server = {"server": "fraction", "server_fraction": 0.3, "server_weighs": 40}
    return {
        "name": "attacks",
        "seed": options.seed,
        "data": data,
        "partition": {"test_fraction": 0.1, "minimum": 5, **rows, "server_report": "apart", **server}
        | dict(SETTINGS[setting]),
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"learning_rate": 0.1, "epochs": 3, "batch_size": 25 if options.data == "mnist" else 10},
        "rounds": {"count": options.rounds, "fraction": 1.0, "last": 5, "evaluate_every": 5},
        "compute": {"engine": options.engine, "device": options.device, "precision": options.precision}
        | ({} if options.memory_gb is None else {"memory_gb": options.memory_gb}),
        "store": {"checkpoint_every": 1000},
    }


def file_of(folder: Path, setting: str, attack: str, share: float) -> Path:
    """Return the file of a cell."""
    return folder / f"{setting.replace(', ', '_').replace(' ', '-')}_{attack}_{share:g}.json"


def measure(setting: str, attack: str, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one cell and return what each rule made of it."""
    described = with_rules(build(document(setting, options)), options.rules)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = runnable(under_attack(described, attack, share)).compare(
            ["recipe"], options.seeds, Path(folder) / "run"
        )
        found = outcome(result.folder, described.rounds)
    seconds = time.perf_counter() - begun
    return {"setting": setting, "attack": attack, "share": share, "seeds": options.seeds, "data": options.data} | {
        "rounds": options.rounds,
        "rules": found,
        "seconds": seconds,
    }


def work(options: argparse.Namespace) -> None:
    """Do every N-th cell of a stage from the I-th on; stop when the next would end after the budget."""
    first, step = (int(part) for part in options.part.split("/"))
    begun, longest = time.perf_counter(), 0.0
    options.out.mkdir(parents=True, exist_ok=True)
    for setting, attack, share in cells(options.stage, options.settings)[first::step]:
        path = file_of(options.out, setting, attack, share)
        if path.exists() or (options.only and attack not in options.only):
            continue
        if time.perf_counter() - begun + longest > options.budget:
            print(f"worker {first}: the budget ends before {path.name}", file=sys.stderr, flush=True)
            return
        found = measure(setting, attack, share, options)
        longest = max(longest, found["seconds"])
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.rename(path)
        shown = " ".join(f"{rule} {100 * mean(row['accuracy']):.1f}" for rule, row in found["rules"].items())
        print(f"{path.stem} ({found['seconds']:.0f} s): {shown}", file=sys.stderr, flush=True)


def share_out(options: argparse.Namespace) -> int:
    """Start the workers, each a process of its own on the same device, and wait for all of them."""
    given = [argument for argument in sys.argv[1:] if argument != "--workers"]
    at = sys.argv.index("--workers")
    given.remove(sys.argv[at + 1])
    command = [sys.executable, "-m", "benchmarks.attacks", *given]
    started = [subprocess.Popen([*command, "--part", f"{index}/{options.workers}"]) for index in range(options.workers)]
    return max(process.wait() for process in started)


# ---------------------------------------------------------------- the page


def mean(values: Sequence[float]) -> float:
    """Return the mean over seeds."""
    return math.fsum(values) / len(values)


def read(folder: Path) -> dict[tuple[str, str, float], dict[str, Any]]:
    """Return all cells that are there."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {(cell["setting"], cell["attack"], cell["share"]): cell for cell in found}


def lost(known: Cells, key: tuple[str, str, float], rule: str) -> float:
    """Return how many points a rule lost to an attack, against itself without hostile clients, over the seeds."""
    clean = known[key[0], CLEAN, 0.0]["rules"][rule]["accuracy"]
    return 100 * (mean(clean) - mean(known[key]["rules"][rule]["accuracy"]))


def target_table(known: Cells) -> list[str]:
    """Write what the recommended rule loses to every attack at 20 % hostile and lying, setting by setting."""
    settings = [name for name in SETTINGS if (name, CLEAN, 0.0) in known]
    lines = ["| attack | " + " | ".join(settings) + " |", "|---" * (len(settings) + 1) + "|"]
    clean = [estimate([100 * v for v in known[name, CLEAN, 0.0]["rules"][GUARDED]["accuracy"]]) for name in settings]
    lines.append("| without hostile clients (%) | " + " | ".join(f"{e.mean:.1f} ± {e.half:.1f}" for e in clean) + " |")
    worst: dict[str, float] = {}
    for attack in LYING:
        cells_: list[str] = []
        for name in settings:
            key = (name, attack, 0.2)
            if key not in known:
                cells_.append("–")
                continue
            points = lost(known, key, GUARDED)
            worst[name] = max(worst.get(name, -math.inf), points)
            missed = points > ALLOWED[SETTINGS[name]["scheme"]]
            cells_.append(f"**{signed(-points)}**" if missed else signed(-points))
        lines.append(f"| {attack} | " + " | ".join(cells_) + " |")
    bounds = [f"{worst.get(name, math.nan):.1f} of {ALLOWED[SETTINGS[name]['scheme']]:g}" for name in settings]
    return [*lines, "| **most lost, of what may be** | " + " | ".join(bounds) + " |"]


def signed(points: float) -> str:
    """Write a difference in points with its sign."""
    return f"{points:+.1f}".replace("-", "−")


def rule_table(known: Cells, setting: str, share: float, lying: bool) -> list[str]:
    """Write accuracy under each rule for one setting and share, a line per attack; the best of a line in bold."""
    attacks = [attack for attack in (LYING if lying else HONEST) if (setting, attack, share) in known]
    if not attacks or (setting, CLEAN, 0.0) not in known:
        return []
    rules = list(known[setting, CLEAN, 0.0]["rules"])
    title = f"### {setting}, {share:.0%} hostile{' and lying' if lying else ''}"
    lines = [
        title,
        "",
        "| attack | " + " | ".join(f"`{rule}`" for rule in rules) + " |",
        "|---" * (len(rules) + 1) + "|",
    ]
    for attack in [CLEAN, *attacks]:
        row = known[setting, attack, 0.0 if attack == CLEAN else share]["rules"]
        values = {rule: mean(row[rule]["accuracy"]) for rule in rules if rule in row}
        best = max(values.values())
        shown = [f"{100 * values[rule]:.1f}" if rule in values else "–" for rule in rules]
        shown = [f"**{text}**" if values.get(rule) == best else text for rule, text in zip(rules, shown, strict=True)]
        lines.append(f"| {attack} | " + " | ".join(shown) + " |")
    door = f"backdoor+{INFLATION}" if lying else "backdoor"
    if door in attacks:
        row = known[setting, door, share]["rules"]
        rates = [
            f"{100 * mean(row[rule]['backdoor']):.0f}" if row.get(rule, {}).get("backdoor") else "–" for rule in rules
        ]
        lines.append("| *the backdoor works (%)* | " + " | ".join(rates) + " |")
    return [*lines, ""]


def weight_table(known: Cells) -> list[str]:
    """Write the weight that clients who only lie had at 20 %: all together, and the largest of one in any round."""
    lines = ["| setting | rule | weight of all liars | largest of one | cap |", "|---|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        cell = known.get((name, INFLATION, 0.2))
        for rule in ("fedavg", GUARDED) if cell else ():
            row = cell["rules"][rule] if cell else {}
            cap = f"{100 * 2 / setting['clients']:.1f} %" if rule == GUARDED else "none"
            together, one = 100 * row["weight"], 100 * row["largest"]
            lines.append(f"| {name} | `{rule}` | {together:.1f} % | {one:.1f} % | {cap} |")
    over = [
        f"{cell['setting']}, {cell['attack']}, {cell['share']:.0%}"
        for cell in known.values()
        if (cell["rules"][GUARDED]["largest"] or 0.0) > 2 / SETTINGS[cell["setting"]]["clients"] + 1e-9
    ]
    return [
        *lines,
        "",
        f"Cells in which a hostile client's weight under `guarded` was over the cap: {len(over)} of {len(known)}.",
    ]


def page(known: Cells) -> str:
    """Write all tables as Markdown."""
    seeds = sorted({cell["seeds"] for cell in known.values()})
    count = f"{len(known)} cells, {' or '.join(map(str, seeds))} seeds each"
    parts = [f"## The recommended rule at 20 % hostile and lying\n\nPoints of accuracy lost by `guarded` ({count}).\n"]
    parts += [*target_table(known), "", "## Weight of liars", "", *weight_table(known), ""]
    for lying, heading in ((True, "Hostile and lying"), (False, "Hostile, true in what they say")):
        tables = [
            line
            for share in (0.2, 0.1, 0.3)
            for setting in SETTINGS
            for line in rule_table(known, setting, share, lying)
        ]
        parts += [f"## {heading}: accuracy (%)", "", *tables] if tables else []
    return "\n".join(parts).rstrip() + "\n"


MARK = "<!-- written by benchmarks.attacks: what follows is replaced -->"


def main() -> None:
    """Run a stage, or write the page from what was run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--out", type=Path, default=Path("attacks"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--data", choices=("mnist", "digits"), default="mnist")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--memory-gb", type=float, help="of the device, for each worker")
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--only", nargs="*", default=[], help="attacks, if not all")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no cell is begun")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cells of a stage")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th cell from the I-th on")
    parser.add_argument("--table", type=Path, help="folder with cells: write their tables")
    parser.add_argument("--page", type=Path, help="with --table: the page whose generated part is replaced")
    options = parser.parse_args()
    if options.table:
        text = page(read(options.table))
        if options.page is None:
            print(text, end="")
            return
        written = options.page.read_text(encoding="utf-8").split(MARK)[0]
        options.page.write_text(f"{written}{MARK}\n\n{text}", encoding="utf-8")
    elif options.workers > 1:
        sys.exit(share_out(options))
    else:
        work(options)


if __name__ == "__main__":
    main()
