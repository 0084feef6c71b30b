"""The papers' image experiments and all rules beside each other, part by part.

Each part is one `steelyard compare`, then `steelyard table` and `report`; those with every rule begin with "rivals".
Parts that begin with "power" have the few rules of `benchmarks.contrasts` and ten seeds; "celeba-rate-first"
and "celeba-rate" are sweeps on validation rows, the second one over the best rates of the first.

    python -m benchmarks.papers results --parts mnist-noniid,mnist-iid --seconds 300

Every command is printed before it runs. A part that outlasts its time is stopped as by Ctrl-C; the same call goes on
where it stopped. OUT/NAME is the run, OUT/NAME.md its tables, OUT/NAME.html its report; with --figures each figure is a
file in OUT/figures-NAME.
"""

from __future__ import annotations

import argparse
import csv
import signal
import subprocess
import sys
from itertools import permutations
from pathlib import Path

from steelyard.weighing import policy as catalogue

TF32 = ("--set", "compute.precision=tf32")
BF16 = ("--set", "compute.precision=bfloat16")
ON_GPU = ("--set", "compute.engine=stacked", "--set", "store.checkpoint_every=50", "--set", "store.clients_every=50")
AUTHORS = ("--set", "model.name=cnn-mnist-authors")
CRITERIA = ("DS", "LD", "MD")
ORDERS = [">".join(order) for order in permutations(CRITERIA)]
FIFTEEN = ",".join([*CRITERIA, *ORDERS, *(f"online({order})" for order in ORDERS)])
"""Paper 003's Table 1: three single criteria, six fixed orders, online adjustment from each of the six."""
NAMED = {
    "mnist-noniid": "DS,LD,MD>LD>DS,online-apart(DS>LD>MD)",
    "celeba": "DS,CB,DS>CB>IS,online-apart(DS>CB>IS)",
    "unipen62": "DS,LD,MD>DS>LD,online-apart(MD>DS>LD)",
}
"""What is tested with ten seeds, named before: the baseline, then the single criterion, the order and the online
adjustment that the papers' text or tables praise most. About half of the clients choose its order, others report."""
FACES = {
    "a": "DS,CB,IS,DS>CB>IS,DS>IS>CB",
    "b": "CB>DS>IS,CB>IS>DS,IS>DS>CB,IS>CB>DS,online(DS>CB>IS)",
}


RATE, FIRST, SECOND = "training.learning_rate", "celeba-rate-first", "celeba-rate"
PERSONAL = "fedavg,local-only,fine-tuned,ditto,apfl,fedrep,fedala,fedfomo"


def parts() -> dict[str, tuple[str, ...]]:
    """Return the arguments of `steelyard compare` for each part."""
    found: dict[str, tuple[str, ...]] = {}
    for name, rounds in (("mnist-noniid", 300), ("mnist-iid", 100)):
        usual = (name, "--seeds", "3", "--set", f"rounds.count={rounds}", "--set", "compute.memory_gb=40")
        found[name] = (*usual, *ON_GPU, *BF16)
        found[f"{name}-authors"] = (*usual, *AUTHORS, *ON_GPU, *BF16)
    # Seeds, and half of the rules, apart: the models of all cohorts of a round must fit a third of the memory of a run,
    # or they go to the memory of the host, which takes fifty times as long.
    for seed in (1, 2, 3):
        one = ("--set", f"seed={seed}", *ON_GPU)
        found[f"unipen62-seed{seed}"] = ("unipen62", "--rules", FIFTEEN, "--set", "compute.memory_gb=37", *one, *BF16)
        for half, rules in FACES.items():
            faces = ("celeba", "--rules", rules, "--set", "compute.memory_gb=55", *one, *TF32)
            found[f"celeba-seed{seed}-{half}"] = faces
    for number in (1, 2, 3):
        five = (f"adafed-{number}", "--seeds", "5", "--set", "compute.memory_gb=16", *ON_GPU, *BF16)
        adam = ("--set", "training.optimiser=adam", "--set", "training.learning_rate=0.001")
        found |= {f"adafed-{number}": five, f"adafed-{number}-adam": (*five, *adam)}
    # Every rule of docs/algorithms once, which needs all clients in every round and rows at the server. Clients test on
    # rows with labels of their own, since some keep models of their own; those train batch by batch, so they run apart.
    # So many rounds fit nine minutes of an H200.
    changes = (
        "rounds.fraction=1", "rounds.evaluate_every=1", "partition.clients=20", "partition.test_labels=client",
        "partition.test_order=mixed", "partition.server=fraction", "partition.server_report=apart",
        "partition.server_weighs=200", "training.batch_size=20", "training.epochs=1", "compute.memory_gb=45",
        "compute.engine=stacked", "store.checkpoint_every=20", "store.clients_every=20",
    )  # fmt: skip
    for name, rules, rounds in (
        ("weights", ",".join(("fedavg", "SV", *catalogue.known())), 16),
        ("personal", PERSONAL, 4),
    ):
        words = ("mnist-noniid", "--rules", rules, "--seeds", "5", "--set", f"rounds.count={rounds}")
        found[f"rivals-mnist-{name}"] = (*words, *(word for change in changes for word in ("--set", change)), *TF32)
    # By accuracy, not by rounds to a target: nearly all people have one validation face, and a model that never sees
    # a smile has it right for half of them, so that every rate is there after one or two rounds.
    # Two stages: every rate for 20 rounds with one seed, then the best three for 60 rounds with three seeds, which are
    # one run a rate: the models of three seeds need more than 40 GB.
    rate = ("sweep", "celeba", "--rules", "DS", "--validation", "0.2", "--measure", "score", *ON_GPU, *TF32)
    for stage, seeds, rounds in ((FIRST, 1, 20), (SECOND, 3, 60)):
        at_once = ("--jobs", str(4 // seeds), "--set", f"rounds.count={rounds}", "--set", "compute.memory_gb=12")
        found[stage] = (*rate, "--seeds", str(seeds), *at_once)
    found[FIRST] += ("--over", f"{RATE}=0.0125,0.025,0.05,0.1,0.2,0.4,0.8,1.6")
    return (
        found
        | power_parts()
        | {
            "rivals-quickstart": ("quickstart", "--rules", "all"),
            "adafed-regression": ("adafed-regression", "--seeds", "10", "--set", "compute.device=cpu"),
            "quickstart": ("quickstart", "--rules", "DS,LD", "--seeds", "2"),
        }
    )


def power_parts() -> dict[str, tuple[str, ...]]:
    """Return the parts with ten seeds in TF32, and one seed of each in float32 beside."""
    found: dict[str, tuple[str, ...]] = {}

    def add(name: str, first: int, seeds: int, *words: str) -> None:
        one = ("--seeds", str(seeds), "--set", f"seed={first}", *ON_GPU)
        precision = () if name.endswith("float32") else TF32
        found[f"power-{name}"] = (*words, *one, *precision)

    # Half of MNIST's devices are at 90 % in round 24 and all rules end alike: 120 rounds show what 300 would. Rules on
    # UNIPEN-62 lie furthest apart early (a point after 100 rounds, 0.4 after 417), so 200 rounds see more than 400.
    plans = {"mnist-noniid": ("120", "40", 5), "celeba": ("100", "42", 1), "unipen62": ("200", "14", 1)}
    for name, (rounds, memory, at_once) in plans.items():
        limits = ("--set", f"rounds.count={rounds}", "--set", f"compute.memory_gb={memory}")
        words = (name, "--rules", NAMED[name], *limits)
        for first in range(1, 11, at_once):
            add(f"{name}-{first}", first, at_once, *words)
        add(f"{name}-float32", 1, 1, *words)
    for number in (1, 2, 3):
        words = (f"adafed-{number}", "--set", "compute.memory_gb=16")
        for first in (1, 4, 7, 10):
            add(f"adafed-{number}-{first}", first, 3 if first < 10 else 1, *words)
        add(f"adafed-{number}-float32", 1, 1, *words)
    return found


def steelyard(words: list[str], seconds: float | None = None, into: Path | None = None) -> bool:
    """Run a command of ours, stop it when its time is up, and return whether it ended well."""
    print("steelyard", *words, f"> {into}" if into else "", flush=True)
    out = into.open("w") if into else subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-m", "steelyard", *words], stdout=out) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            return False


def best_rates(out: Path, count: int = 3) -> str:
    """Return the best points of the search's first stage, as the second one is told them."""
    path = out / FIRST / "results.csv"
    if not path.is_file():
        sys.exit(f"{path}: not there; run the part {FIRST} before {SECOND}")
    with path.open(encoding="utf-8") as file:
        best = [row[RATE] for row in csv.DictReader(file)][:count]
    return f"{RATE}={','.join(sorted(best, key=float))}"


def run_part(
    name: str, arguments: tuple[str, ...], out: Path, seconds: float, *, figures: bool = False, plain: bool = False
) -> bool:
    """Run a part or go on with it, then write its tables and its report, unless it is to be plain."""
    folder = out / name
    if name == SECOND:
        arguments = (*arguments, "--over", best_rates(out))
    if arguments[0] == "sweep":
        # The same command goes on where it was stopped.
        return steelyard([*arguments, "--out", str(folder)], seconds, out / f"{name}.md")
    begun = (folder / "run.sqlite").is_file()
    ended = steelyard(["resume", str(folder)] if begun else ["compare", *arguments, "--out", str(folder)], seconds)
    if plain or not (folder / "run.sqlite").is_file():
        return ended
    tables = steelyard(["table", str(folder), "--format", "markdown"], into=out / f"{name}.md")
    drawn = ["--figures", str(out / f"figures-{name}")] if figures else []
    return steelyard(["report", str(folder), "--out", str(out / f"{name}.html"), *drawn]) and tables and ended


def main() -> None:
    """Read the options and run the parts."""
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--parts", default=",".join(known), help="which parts, with commas")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="time limit of each part")
    parser.add_argument("--figures", action="store_true", help="also write each figure as a file")
    parser.add_argument("--plain", action="store_true", help="the runs alone: no tables, no reports")
    parser.add_argument("--set", action="append", default=[], help="further changes, as for steelyard compare")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--parts: got {', '.join(unknown)}; allowed: {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    more = tuple(word for change in options.set for word in ("--set", change))
    drawn = {"figures": options.figures, "plain": options.plain}
    ended = [run_part(name, (*known[name], *more), options.out, options.seconds, **drawn) for name in names]
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
