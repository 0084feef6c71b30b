"""Why SCAFFOLD ends at 10 % elsewhere: `python -m benchmarks.scaffold OUT [--rounds N] [--seeds N] [--device cuda]`.

FedAvg, SCAFFOLD, and SCAFFOLD with one step taken as other code takes it (variants.py), on CIFAR-10 (JPEG) with ten of
a hundred clients a round, with and without momentum at the clients. One `steelyard compare` for each cell.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steelyard.data.files import find

RULES = "fedavg,scaffold,scaffold-inside,scaffold-unshared,scaffold-both"
HERE = Path(__file__).parent


def pack(path: Path, every: int) -> None:
    """Write both parts of CIFAR-10 (JPEG), each `every`-th image, as one npz: images, labels, which are test rows."""
    folder = find(Path("cifar10_jpeg"), "CIFAR-10 re-encoded as JPEG: train.npz and test.npz")
    images: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.uint8]] = []
    for part in ("train", "test"):
        with np.load(folder / f"{part}.npz") as arrays:
            stored, begins = arrays["jpeg"].tobytes(), arrays["begins"].tolist()
            labels.append(arrays["labels"][::every])
        pairs = list(pairwise(begins))[::every]
        images += [np.asarray(Image.open(io.BytesIO(stored[begin:end])).convert("RGB")) for begin, end in pairs]
    test = np.repeat([False, True], [len(part) for part in labels])
    np.savez(path, x=np.stack(images), y=np.concatenate(labels), test=test)


def main() -> None:
    """Run every cell and print a line of JSON for each."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--rounds", type=int, default=200)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--every", type=int, default=1, help="take each so-manieth image, for a try")
    arguments.add_argument("--cells", default="0.5:0,0.5:0.9,0.1:0,0.1:0.9", help="alpha:momentum, with commas")
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not (chosen.out / "cifar10.npz").exists():
        pack(chosen.out / "cifar10.npz", chosen.every)
    for name in ("variants.py", "cifar10.toml"):
        shutil.copy(HERE / name, chosen.out)
    failed = False
    for cell in chosen.cells.split(","):
        alpha, momentum = cell.split(":")
        run = chosen.out / f"alpha-{alpha}-momentum-{momentum}"
        fields = {
            "partition.alpha": alpha,
            "training.momentum": momentum,
            "rounds.count": chosen.rounds,
            "compute.device": chosen.device,
        }
        settings = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
        command = [*("compare", str(chosen.out / "cifar10.toml"), "--rules", RULES, "--seeds", str(chosen.seeds))]
        command += [*settings, "--out", str(run), "--trust", "--quiet", "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "steelyard", *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(json.dumps({"alpha": alpha, "momentum": momentum, "failed": done.stderr.strip()}), flush=True)
            failed = True
            continue
        rules = json.loads(done.stdout)["rules"]
        found = {rule["rule"]: rule["figures"]["server_accuracy"]["values"] for rule in rules}
        print(json.dumps({"alpha": alpha, "momentum": momentum, "accuracy": found}), flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
