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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attack_tables import GUARDED, HONEST, LYING, MARK, SETTINGS, mean, page, read
from steelyard.api import runnable
from steelyard.experiment.attacking import CLEAN, under_attack
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.loading import build
from steelyard.report.hostile import outcome

RULES = (
    *("fedavg", "EQ", "clip(EQ)", "median(EQ)", "trimmed-mean(EQ)", "multi-krum(EQ)", "centred-clip(EQ)"),
    *("geometric-median(EQ)", "fltrust(EQ)", "power(VP)^3", "clip(power(VP)^3)", GUARDED),
)


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
    at = sys.argv.index("--workers")
    given = [*sys.argv[1:at], *sys.argv[at + 2 :]]
    command = [sys.executable, "-m", "benchmarks.attacks", *given]
    started = [subprocess.Popen([*command, "--part", f"{index}/{options.workers}"]) for index in range(options.workers)]
    return max(process.wait() for process in started)


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
