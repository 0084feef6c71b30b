"""An algorithm of the user's own that fails while clients train: one line, with its function and line."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from steelyard.algorithms.fedavg import FedAvg
from steelyard.errors import UserError
from steelyard.messages import Task
from steelyard.rounds.own_code import told_in_one_line, training_fault

OWN = """from steelyard import Algorithm, algorithm

@algorithm("own-train-falls")
class Falls(Algorithm):
    '''Falls in the first batch.'''
    by_hand = True

    def train(self, local):
        return helper(local), {}

def helper(local):
    return local.received / {}["nothing"]
"""


def test_a_train_that_raises_is_one_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = ["run", "quickstart", "--set", 'algorithm.plugins=["mine.py"]', "--set", "algorithm.name=own-train-falls"]
    command = [sys.executable, "-m", "steelyard", *words, "--trust", "--quiet", "--out", "out"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    told = "round 1: algorithm own-train-falls: helper (mine.py, line 12) fails: KeyError: 'nothing'"
    assert ended.stderr.strip() == f"steelyard: {told}"


def test_a_fault_of_ours_is_not_blamed_on_an_algorithm() -> None:
    task = Task("f", 0, 1, ("a",), torch.zeros(2), algorithm=FedAvg())
    with pytest.raises(KeyError), told_in_one_line(partial(training_fault, [task])):
        raise KeyError("ours")


def test_what_is_told_already_stays() -> None:
    with pytest.raises(UserError, match=r"^field: wrong$"), told_in_one_line(partial(training_fault, [])):
        raise UserError("field: wrong")
