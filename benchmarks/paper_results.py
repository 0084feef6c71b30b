"""Run the papers' experiments and keep their tables: what docs/results is made from.

    python benchmarks/paper_results.py results --parts mnist-noniid,mnist-iid --seconds 300

Each part is one `steelyard compare`, printed before it runs. A part that outlasts its time is stopped as a user would
stop it; its table is then made of the rounds that it finished, and says so. One JSON file per part comes out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FAST = ("--set", "compute.precision=tf32")
ORDERS = "DS,MD>DS>LD,online(MD>DS>LD)"
PARTS: dict[str, tuple[str, ...]] = {
    "mnist-noniid": ("mnist-noniid", "--seeds", "3", "--set", "rounds.count=300", *FAST),
    "mnist-iid": ("mnist-iid", "--seeds", "3", "--set", "rounds.count=300", *FAST),
    "unipen62": ("unipen62", "--seeds", "3", "--rules", ORDERS, "--set", "rounds.count=100", *FAST),
    "celeba": ("celeba", "--seeds", "3", *FAST),
    "adafed-1": ("adafed-1", "--seeds", "5"),
    "adafed-2": ("adafed-2", "--seeds", "5"),
    "adafed-3": ("adafed-3", "--seeds", "5"),
    "adafed-regression": ("adafed-regression", "--seeds", "10", "--set", "compute.device=cpu"),
}


def run_part(name: str, out: Path, seconds: float, extra: list[str]) -> dict[str, object]:
    """Run one part, stop it when its time is up, and write its table."""
    folder = Path(tempfile.mkdtemp(prefix="steelyard-results-")) / name
    command = ["steelyard", "compare", *PARTS[name], *extra, "--format", "json"]
    print(f"{name}: {' '.join(command)}", flush=True)
    begun = time.perf_counter()
    call = [sys.executable, "-m", *command, "--out", str(folder)]
    with (out / "log.txt").open("a") as log:
        process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGINT)
            process.wait(timeout=60)
    taken = time.perf_counter() - begun
    table = subprocess.run(
        [sys.executable, "-m", "steelyard", "table", str(folder), "--format", "json"], capture_output=True, text=True
    )
    told: dict[str, object] = {"part": name, "command": " ".join(command), "seconds": round(taken, 1)}
    if table.returncode:
        return {**told, "error": table.stderr.strip()[-500:]}
    document = json.loads(table.stdout)
    (out / f"{name}.json").write_text(json.dumps({**told, **document}))
    return {**told, "rounds": document["rounds"], "status": document["status"]}


def main() -> None:
    """Read the options, run the parts, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for one JSON file per part")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--seconds", default="600", help="time limit of each part, or one per part, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at the same time")
    parser.add_argument("--set", action="append", default=[], help="further changes, as for steelyard compare")
    options = parser.parse_args()
    names = options.parts.split(",")
    limits = [float(part) for part in options.seconds.split(",")]
    limits = limits * len(names) if len(limits) == 1 else limits
    options.out.mkdir(parents=True, exist_ok=True)
    extra = [word for change in options.set for word in ("--set", change)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for told in pool.map(lambda name, seconds: run_part(name, options.out, seconds, extra), names, limits):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
