"""Robust rules, caps and hostile clients across nodes: the same models as in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federate.small_experiment import weights
from tests.federate.test_federate_apps import described, grid_of

from steelyard.clients.node import NodeConfig
from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate.server_app import federate
from steelyard.runs.reader import History

EQUAL: dict[str, Any] = {"criteria": ["EQ"]}
RULES: dict[str, Any] = {
    "plain": EQUAL,
    "median": {**EQUAL, "defence": {"rule": "median"}},
    "trimmed": {**EQUAL, "defence": {"rule": "trimmed-mean", "mix": True}},
    "krum": {**EQUAL, "defence": {"rule": "multi-krum"}},
    "geometric": {**EQUAL, "defence": {"rule": "geometric-median"}},
    "clip": {**EQUAL, "defence": {"rule": "clip", "smooth": 0.5}},
    "trust": {**EQUAL, "defence": {"rule": "fltrust"}},
    "guarded": {"criteria": ["VP"], "score": "power", "max_shares": 2.0, "defence": {"rule": "centred-clip"}},
}


def test_robust_rules_work_over_flower_as_in_the_simulation(tmp_path: Path) -> None:
    document = described(
        partition={"server": "fraction", "server_fraction": 0.2},
        rounds={"count": 2, "fraction": 1.0},
        flaws=[
            {"kind": "reversed", "amount": 10, "clients": ["client-001"]},
            {"kind": "backdoor", "clients": ["client-002"]},
            {"kind": "claims-size", "amount": 50, "clients": ["client-002"]},
        ],
        beside=RULES,
    )
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    ours, theirs = weights(tmp_path / "simulated"), weights(tmp_path / "federated")
    assert set(ours) == set(theirs) == {"LD>DS>MD", *RULES}
    for name in ours:
        # A simulation may train clients in a stack and a node trains them singly: float32 sums in another order.
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    # Each rule made a model of its own, so that none of them can have been left out.
    models = list(theirs.values())
    assert all(not torch.equal(a, b) for index, a in enumerate(models) for b in models[:index])
    there = History(tmp_path / "federated")
    largest = there.clients.groupby("rule")["weight"].max()
    assert largest["guarded"] <= 2 / 6 + 1e-12
    evaluations = [History(tmp_path / name).evaluations for name in ("simulated", "federated")]
    np.testing.assert_allclose(*(frame["backdoor"] for frame in evaluations), atol=1e-9)


@pytest.mark.parametrize("kind", ["alie", "ipm", "min-max"])
def test_attacks_that_see_all_updates_are_refused_on_a_node(kind: str) -> None:
    seeing = build(described(flaws=[{"kind": kind, "clients": ["client-001"]}]))
    with pytest.raises(UserError, match=f"got kind '{kind}', whose clients see the updates of all others"):
        seeing.on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 2}))
