"""FPL over Flower without a network: five users, one node each, vectors in the nodes' own states."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runs.contents import models

pytest.importorskip("flwr")

from tests.clients.flower.flower_fakes import FakeGrid
from tests.experiment.test_nodes import hosted
from tests.federate.small_experiment import node
from tests.kit import assert_refused

from steelyard.base.usercode import NotAllowed
from steelyard.clients.node import NodeConfig
from steelyard.experiment.loading import build
from steelyard.experiment.node_rules import check_own
from steelyard.experiment.running import run
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.server_app import federate
from steelyard.messages.updates import Question, Task
from steelyard.report.recommender import open_run
from steelyard.runs.history import History

NAMES = ["ada", "ben", "cleo", "dan", "eve"]


@pytest.fixture
def five(tmp_path: Path) -> dict[str, Any]:
    random = np.random.default_rng(4)
    rows = [
        f"{name}\tx{item}\t{1000 + time}"
        for name in NAMES
        for time, item in enumerate(random.choice(20, size=10, replace=False))
    ]
    (tmp_path / "five.tsv").write_text("user\titem\ttime\n" + "\n".join(rows) + "\n")
    for name in NAMES:
        own = [row for row in rows if row.startswith(name)]
        (tmp_path / f"{name}.tsv").write_text("user\titem\ttime\n" + "\n".join(own) + "\n")
    (tmp_path / "catalogue.tsv").write_text("item\n" + "\n".join(f"x{i}" for i in range(20)) + "\n")
    return {
        "kind": "recommend",
        "name": "five",
        "seed": 2,
        "interactions": {"path": str(tmp_path / "five.tsv"), "catalogue": str(tmp_path / "catalogue.tsv")},
        "fpl": {"mode": "custom", "triples": 6, "factors": 4, "learning_rate": 0.2, "pi": 0.5},
        "rounds": {"count": 5, "fraction": 0.6},
        "weighing": {"criteria": ["DS", "MD"], "score": "mean"},
        "beside": {"sum": {"criteria": ["EQ"]}},
        "federate": {"nodes": 5, "timeout": 60.0},
    }


def test_five_users_on_five_nodes_equal_the_simulation(five, tmp_path: Path):
    run(build(five), out=tmp_path / "simulated")
    # The server and the nodes are told of a file that none of them has: each reads her own rows only.
    away = {**five, "interactions": {**five["interactions"], "path": "nowhere.tsv"}}
    config = {"experiment": experiment_text(build(away)), "set": "", "out": str(tmp_path / "federated")}
    configs = [{"client": name, "data": str(tmp_path / f"{name}.tsv")} for name in NAMES]
    grid = FakeGrid({70 + i: node(own, config, fresh=True) for i, own in enumerate(configs)})
    federate(grid, config, "9")  # type: ignore[arg-type]
    here, there = models(tmp_path / "simulated"), models(tmp_path / "federated")
    assert set(here) == set(there) == {"mean(DS,MD)", "sum"}
    for name in here:
        # The server adds the rows of single users, the simulation those of all: float32 sums in another order.
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-5)
    first, second = History(tmp_path / "simulated"), History(tmp_path / "federated")
    np.testing.assert_allclose(first.clients["weight"], second.clients["weight"], rtol=1e-5)
    np.testing.assert_allclose(first.evaluations["score"], second.evaluations["score"], atol=1e-6)
    # Vectors are on the nodes: each holds her own and nobody else's, and the run's checkpoint holds none.
    simulated = open_run(tmp_path / "simulated").clients.snapshot()
    for name, made in zip(NAMES, grid.nodes.values(), strict=True):
        state = made.context.state  # type: ignore[attr-defined]
        kept = [record for key, record in state.items() if key.startswith("steelyard/sum/") and key[-1].isdigit()]
        if kept:
            mine = simulated["vectors/sum"].numpy()[[NAMES.index(name)]]
            # Float32 vectors, moved by the tables compared above.
            np.testing.assert_allclose(kept[-1]["vectors/sum"].numpy(), mine, rtol=1e-4, atol=1e-5)
    assert not any("vectors" in key for key in second.last_checkpoint()[1])
    assert_refused(lambda: open_run(tmp_path / "federated"), "they stay on their nodes")


def test_a_node_with_its_own_rows_needs_a_public_catalogue(five, tmp_path: Path):
    del five["interactions"]["catalogue"]
    own = NodeConfig.read({"client": "ada", "data": str(tmp_path / "ada.tsv")})
    assert_refused(lambda: build(five).on_node(own), "interactions.catalogue")


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, Any]:
    """A user with a file of her own, 24 of 40 items: 20 train and 4 test, unless the owner's file splits otherwise."""
    items = np.random.default_rng(5).permutation(40)[:24]
    rows = [f"ada\tx{item}\t{1000 + time}\tkrefeld" for time, item in enumerate(items)]
    (tmp_path / "mine.tsv").write_text("user\titem\ttime\ttown\n" + "\n".join(rows) + "\n")
    (tmp_path / "catalogue.tsv").write_text("item\n" + "\n".join(f"x{i}" for i in range(40)) + "\n")
    return {
        "kind": "recommend",
        "name": "guarded",
        "interactions": {"path": "theirs.tsv", "catalogue": "theirs.tsv"},
        "fpl": {"mode": "custom", "triples": 12, "factors": 4},
        "rounds": {"count": 1, "fraction": 1.0},
    }


def own_node(tmp_path: Path, **more: Any) -> NodeConfig:
    files = {"data": str(tmp_path / "mine.tsv"), "catalogue": str(tmp_path / "catalogue.tsv")}
    own = NodeConfig.read({"client": "ada", "kind": "recommend", **files, **more})
    check_own(own)
    return own


def test_a_users_own_rows_are_split_and_counted_as_her_file_says(guarded: dict[str, Any], tmp_path: Path):
    made = hosted(own_node(tmp_path), guarded)
    table = torch.zeros(40 * 5)
    (updates,) = made.clients.train([Task("f", 1, 1, ("ada",), table)])
    (tests,) = made.clients.evaluate([Question("f", 1, 1, table[None])])
    assert (updates.samples.tolist(), tests.clients) == ([20], ())
    with pytest.raises(NotAllowed, match=r"^min-rows: no user here has as many training items"):
        hosted(own_node(tmp_path, **{"min-rows": 21}), {**guarded, "fpl": {**guarded["fpl"], "triples": 21}})
    halved = {"path": str(tmp_path / "mine.tsv"), "share": 0.5}
    own = own_node(tmp_path, data=halved)
    made = hosted(own, {**guarded, "interactions": {**guarded["interactions"], "share": 0.5}})
    (tests,) = made.clients.evaluate([Question("f", 1, 1, table[None])])
    assert tests.clients == ("ada",)


@pytest.mark.parametrize(
    ("section", "fields", "line"),
    [
        ("interactions", {"columns": {"user": "town"}}, "interactions.columns: "),
        ("interactions", {"share": 0.21}, "interactions.share: got 0.21"),
        ("interactions", {"split_seed": 43, "split": "random"}, "interactions.split: got 'random'"),
        ("interactions", {"validation": 0.1}, "interactions.validation: got 0.1"),
        ("ranking", {"threshold": 1.0}, "ranking.threshold: "),
        ("fpl", {"triples": 1}, "fpl.triples: "),
    ],
)
def test_a_server_chooses_none_of_her_rows(
    guarded: dict[str, Any], tmp_path: Path, section: str, fields: dict[str, Any], line: str
):
    document = {**guarded, section: {**guarded.get(section, {}), **fields}}
    with pytest.raises(NotAllowed) as caught:
        hosted(own_node(tmp_path), document)
    assert str(caught.value).startswith(line)


def test_users_of_a_file_are_named_where_the_nodes_file_says_so(guarded: dict[str, Any], tmp_path: Path):
    part = {"partition-id": 0, "num-partitions": 1}
    files = {"data": str(tmp_path / "mine.tsv"), "catalogue": str(tmp_path / "catalogue.tsv"), "kind": "recommend"}
    assert_refused(lambda: check_own(NodeConfig.read({**part, **files})), "data.columns", "partition-id")
    columns = {"user": "user"}
    own = NodeConfig.read({**part, **files, "data": {"path": files["data"], "columns": columns}})
    check_own(own)
    guarded["interactions"]["columns"] = columns
    assert hosted(own, guarded).names == ("ada",)
