"""The benchmark's promise: an epoch of pFPL+ in at most three epochs of implicit's BPR, under a gigabyte."""

import json
import subprocess
import sys

import pytest
from tests.recommend.test_golden_lists import shared
from tests.warm import ROOT, command_environment


@pytest.mark.slow
def test_benchmark_keeps_its_promise():
    pytest.importorskip("implicit")
    shared("movielens_1m/ratings.dat.gz")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recommend", "--format", "json", "--repeats", "3"],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["ratio"]["implicit"] <= 3
    assert found["memory_mb"] < 1000
    assert found["triples"] >= 1_000_000
