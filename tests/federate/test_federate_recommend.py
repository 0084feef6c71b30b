"""FPL across machines: a node per user, her vector in the node's state, the same table as in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.flower.flower_fakes import FakeGrid, assert_taken_back
from tests.federate.small_experiment import node
from tests.runs.contents import models

from steelyard.clients.flower.wire import pack, unpack_all
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.client_app import NodeStates
from steelyard.federate.server_app import federate
from steelyard.recommend.sparse import SparseRows
from steelyard.recommend.wire import SparseCodec
from steelyard.runs.history import History


def interactions(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    lines = ["user\titem\trating\ttime"]
    for user in range(5):
        for time, item in enumerate(rng.permutation(30)[: 10 + user]):
            lines.append(f"u{user}\ti{item:02d}\t1\t{time}")
    file = tmp_path / "likes.tsv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_five_users_on_five_nodes_equal_the_simulation(tmp_path: Path):
    made = {
        "kind": "recommend",
        "name": "five-users",
        "seed": 2,
        "interactions": {"path": str(interactions(tmp_path))},
        "fpl": {"mode": "custom", "triples": 6, "factors": 4, "pi": 0.5},
        "rounds": {"count": 4, "fraction": 0.6},
        "weighing": {"criteria": ["DS", "LD"], "score": "mean"},
    }

    run(build(made), out=tmp_path / "simulated")
    config = {"experiment": experiment_text(build({**made, "federate": {"nodes": 5}})), "out": str(tmp_path / "run")}
    nodes = {70 - i: node({"client": f"u{i}"}, config) for i in range(5)}
    federate(FakeGrid(nodes), config, "1")  # type: ignore[arg-type]
    ours, theirs = models(tmp_path / "simulated"), models(tmp_path / "run")
    for name in ours:
        # The server adds the rows of single users, the simulation those of all: float32 sums in another order.
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    here, there = History(tmp_path / "simulated"), History(tmp_path / "run")
    np.testing.assert_allclose(here.evaluations["score"], there.evaluations["score"], atol=1e-9)
    asked = set(there.clients["client"])
    for number, made_node in nodes.items():
        kept = made_node.context.state
        if f"u{70 - number}" in asked:
            # Her vector is there, one row, and nobody else's.
            newest = NodeStates(kept, "1", "mean(DS,LD)", 2).before(99)
            (vectors,) = [tensor for key, tensor in newest.items() if key.startswith("vectors/")]
            assert vectors.shape == (1, 4)
        else:
            assert not kept


CODEC = SparseCodec(rate=0.1, width=3, most=2)


def read(arrays: dict[str, Any], clients: int) -> SparseRows:
    return CODEC.unpack(unpack_all(pack(arrays), CODEC.shapes(clients, 15)), clients, 15)


def arrays(owners: list[int], rows: list[int], values: Any = None) -> dict[str, Any]:
    filled = np.ones((len(rows), 3)) if values is None else values
    return {"owners": np.asarray(owners, "<i4"), "rows": np.asarray(rows, "<i4"), "values": filled.astype("<f4")}


def test_sparse_rows_survive_the_wire_and_join_in_order():
    rows = SparseRows(2, np.array([0, 0, 1], np.int32), np.array([3, 3, 1], np.int32), np.ones((3, 3), np.float32), 9.0)
    got = read(CODEC.pack(rows), 2)
    assert (got.owners.tolist(), got.rows.tolist(), got.values[0].tolist()) == ([0, 1], [3, 1], [2, 2, 2])
    assert got.rate == 0.1  # The server's own, not the sender's.
    joined: Any = CODEC.join([got, read(arrays([0], [4]), 1)], [2, 0, 1])
    assert (joined.clients, joined.owners.tolist(), joined.rows.tolist()) == (3, [0, 1, 2], [4, 3, 1])


@pytest.mark.parametrize(
    ("owners", "rows", "reason"),
    [
        ([0, 2], [1, 1], "array owners: 0 to 2; allowed: 0 to 1"),
        ([0], [5], "array rows: 5 to 5; allowed: 0 to 4"),
        ([0, 0], [1, 1], "array rows: not ascending"),
        ([0, 0, 0], [1, 2, 3], "array rows: 3 rows of one user; allowed: at most 2"),
        ([0, 0], [1], "array rows: shape"),
    ],
)
def test_impossible_rows_are_refused(owners: list[int], rows: list[int], reason: str):
    sent = arrays(owners, rows, np.ones((len(owners), 3)))
    assert_taken_back(lambda: read(sent, 2), reason)


def test_a_value_that_is_not_finite_leaves_out_its_user():
    values = np.ones((2, 3))
    values[1, 2] = np.nan
    assert read(arrays([0, 1], [1, 1], values), 2).finite().tolist() == [True, False]
