"""What another kind of processor changes: `python -m benchmarks.processors [--seeds 3] [--scenes clean,hospitals]`.

Settings of the environment give this processor other kernels. Each setting is first shown to change the bits of a
product or a convolution. Then the part that `steelyard arena --check` trains anew (FedAvg by itself) is trained under
each, in every scene of the suite `small`, and the table says by how many of the server's test samples its accuracy is
off. `APART` in `steelyard.studies.checking` is twice the largest, at least 2; the exit code is 1 where twice a
difference is beyond it.
`--settings` prints the settings alone, a line each, for `.ci/other-processor`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from steelyard.base.processor import digest_of_kernels
from steelyard.studies.archive import Replayed, SceneFigures
from steelyard.studies.arena import plan
from steelyard.studies.candidate import read_candidates
from steelyard.studies.checking import APART
from steelyard.studies.suite import load_suite

MKLDNN = "STEELYARD_TEST_MKLDNN"
"""For this script and the tests: "off" has torch do without oneDNN, for which it has no variable of its own."""
X86 = (
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {MKLDNN: "off"},
)
ARM = (
    {"OPENBLAS_CORETYPE": "ARMV8"},
    {MKLDNN: "off"},
    {"OPENBLAS_CORETYPE": "ARMV8", MKLDNN: "off"},
    {"ATEN_CPU_CAPABILITY": "default"},
)
"""Which of them change anything depends on the processor: those that do not are named and left out."""
LEAST = 3
"""So many settings with other bits, or the check has shown too little."""


THREADS = ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"})


def settings() -> tuple[dict[str, str], ...]:
    """Return what may change kernels here."""
    return X86 if platform.machine().lower() in {"x86_64", "amd64"} else ARM


def child(words: list[str], environment: Mapping[str, str]) -> str:
    """Run this module in a process with other kernels; return what it prints."""
    command = [sys.executable, "-m", "benchmarks.processors", *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def changing() -> list[dict[str, str]]:
    """Return the settings that change the bits of a product or a convolution here."""
    plain = child(["--kernels"], THREADS[0])
    found: list[dict[str, str]] = []
    for one in [THREADS[1], *settings()]:
        other = child(["--kernels"], {**THREADS[0], **one})
        words = "changes the bits" if other != plain else "changes nothing here"
        print(f"{written(one)}: {words} ({other.strip()}; plain: {plain.strip()})", file=sys.stderr)
        found += [one] if other != plain else []
    if len(found) < LEAST:
        sys.exit(f"only {len(found)} settings change anything on this processor; {LEAST} are needed")
    return found


def written(environment: Mapping[str, str]) -> str:
    """Return a setting as a shell takes it."""
    return " ".join(f"{name}={value}" for name, value in environment.items())


def trained(scenes: list[str], seeds: int) -> list[dict[str, object]]:
    """Train the part in each scene and with each seed in this process."""
    suite = load_suite("small")
    (candidate,) = read_candidates("LD", None, suite, lambda _: True)
    found: list[dict[str, object]] = []
    for scene in scenes or suite.scenes:
        for seed in suite.report[:seeds]:
            arena = plan(suite, candidate, scenes=[scene], seeds=len(suite.report))
            one = arena.model_copy(update={"seeds": (seed,)})
            with tempfile.TemporaryDirectory() as folder:
                done = one.replay({scene: SceneFigures(values={suite.baseline: (0.5,)})}, Path(folder))
            assert done is not None
            found.append(done.model_dump())
    return found


def main() -> None:
    """Print the table of differences, and end with 1 where one is beyond what `--check` allows."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--scenes", default="")
    arguments.add_argument("--settings", action="store_true", help="print the settings that change kernels here")
    arguments.add_argument("--kernels", action="store_true", help="print what the kernels give")
    arguments.add_argument("--here", action="store_true", help="train in this process and print JSON")
    chosen = arguments.parse_args()
    scenes = [name for name in chosen.scenes.split(",") if name]
    if os.environ.get(MKLDNN) == "off":
        torch.backends.mkldnn.enabled = False  # type: ignore[attr-defined]
    if chosen.kernels:
        print(torch.backends.cpu.get_cpu_capability(), digest_of_kernels(torch.get_num_threads()))
    elif chosen.here:
        print(json.dumps(trained(scenes, chosen.seeds)))
    elif chosen.settings:
        print("\n".join(written(one) for one in changing()))
    else:
        sys.exit(compared(["--here", "--seeds", str(chosen.seeds), "--scenes", chosen.scenes]))


def compared(words: list[str]) -> int:
    """Print by how many samples each setting's accuracies are off; return 1 where one is beyond the bound."""
    plain = [Replayed(**one) for one in json.loads(child(words, THREADS[0]))]
    largest = 0.0
    for one in changing():
        others = [Replayed(**each) for each in json.loads(child(words, {**THREADS[0], **one}))]
        apart = [was.apart(now) for was, now in zip(plain, others, strict=True)]
        bits = sum(was.model != now.model for was, now in zip(plain, others, strict=True))
        most = max(range(len(apart)), key=apart.__getitem__)
        largest = max(largest, apart[most])
        print(
            f"{written(one)}: {bits} of {len(apart)} models have other bits; at most {apart[most]:.1f} of "
            f"{plain[most].samples} samples apart ({plain[most].scene}, seed {plain[most].seed})"
        )
    print(f"largest: {largest:.1f} samples; steelyard arena --check allows {APART}")
    return int(2 * largest > APART)


if __name__ == "__main__":
    main()
