"""Criteria of one's own that give what cannot be: a client is left out with its reason, a server's stops the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.runs.reader import History

CLIENT = """
from steelyard import client_criterion
@client_criterion("ODD")
def odd(local):
    if local.client == "client-000":
        return float("nan")
    if local.client == "client-001":
        return -1.0
    return local.missing if local.client == "client-002" else 1.0
"""
SERVER = """
import numpy as np
from steelyard import server_criterion
rounds = []
@server_criterion("ODD", needs_models=False)
def odd(view):
    rounds.append(1)
    return np.where(np.array(view.clients) == "client-001", float("nan") if len(rounds) > 1 else 1.0, 1.0)
"""
EXPERIMENT = """
name = "odd"
[partition]
clients = 5
[model]
name = "logistic"
[rounds]
count = 3
fraction = 1.0
[weighing]
criteria = ["ODD", "DS"]
plugins = ["odd.py"]
"""


def test_clients_that_cannot_measure_are_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "clients.py").write_text(CLIENT)
    document = {
        "partition": {"clients": 5},
        "model": {"name": "logistic"},
        "rounds": {"count": 2, "fraction": 1.0},
        "weighing": {"criteria": ["ODD", "DS"], "plugins": [str(tmp_path / "clients.py")]},
    }
    history = History(run(build(document), out=tmp_path / "run"))
    last = history.clients[history.clients["round"] == 2].set_index("client")
    assert last["failure"].dropna().to_dict() == {
        "client-000": "criterion ODD = nan; allowed: 0 to any finite number",
        "client-001": "criterion ODD = -1.0; allowed: 0 to any finite number",
        "client-002": "criterion ODD failed: AttributeError: 'LocalData' object has no attribute 'missing'",
    }
    assert last["weight"].dropna().sum() == pytest.approx(1)
    assert history.rounds["answered"].tolist() == [0, 2, 2]


def test_a_server_s_criterion_that_is_nan_stops_the_run_with_one_line(
    tmp_path: Path, steelyard: Callable[..., CompletedProcess[str]]
) -> None:
    (tmp_path / "odd.py").write_text(SERVER)
    (tmp_path / "odd.toml").write_text(EXPERIMENT)
    done = steelyard("run", tmp_path / "odd.toml", "--trust", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]  # after the progress of the round before
    assert line.startswith("steelyard: round 2 of ODD>DS: criterion ODD: measured nan on the server for client-001; ")
    assert line.endswith("; allowed: a number >= 0 for each client")
    history = History(tmp_path / "run")
    assert history.info["status"] == "stopped"
    assert history.rounds["round"].tolist() == [0, 1]


def test_a_server_s_criterion_cannot_write_into_what_it_looks_at(tmp_path: Path) -> None:
    (tmp_path / "writing.py").write_text(
        "from steelyard import server_criterion\n@server_criterion('WRI', needs_models=False)\n"
        "def writing(view):\n    view.samples[:] = 0\n    return view.samples\n"
    )
    document = {
        "partition": {"clients": 5},
        "model": {"name": "logistic"},
        "rounds": {"count": 1, "fraction": 1.0},
        "weighing": {"criteria": ["WRI", "DS"], "plugins": [str(tmp_path / "writing.py")]},
    }
    with pytest.raises(UserError, match=r"criterion WRI: fails on the server: ValueError: assignment .* is read-only"):
        run(build(document), out=tmp_path / "run")
