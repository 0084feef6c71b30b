"""What a node makes of an experiment from a server: no code, no path, no kind that its owner did not agree to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.clients.node import NodeConfig
from steelyard.errors import UserError
from steelyard.experiment.node_rules import agreed, public_error, public_reason
from steelyard.usercode import NotAllowed, only


def document(**sections: Any) -> dict[str, Any]:
    return {
        "name": "hospitals",
        "data": {"source": "npz", "path": "own.npz", "classes": 2},
        "partition": {"scheme": "iid", "clients": 2, "minimum": 2, "test": "local"},
        "model": {"name": "logistic"},
        **sections,
    }


def config(tmp_path: Path, **more: Any) -> NodeConfig:
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(20, 3)).astype("f4"), y=np.arange(20) % 2)
    return NodeConfig.read({"client": "a", "data": str(tmp_path / "mine.npz"), **more})


def build(sections: dict[str, Any], node: NodeConfig) -> Any:
    """As the client app does it: the experiment becomes a model, under the rules of the node."""
    with only(None if node.trusts else node.allow):
        (update,) = agreed(sections, node).on_node(node).clients.names(0)
        return update


@pytest.mark.parametrize("code", ["os:system", "subprocess:call", "/usr/lib/python3.11/os.py:system", "mine.py:net"])
def test_a_model_that_the_server_names_is_not_run(tmp_path: Path, code: str):
    node = config(tmp_path)
    sections = document(model={"name": code, "arguments": {"command": f"touch {tmp_path}/owned"}})
    with only(node.allow), pytest.raises(NotAllowed, match=r"model.name: '.*' is not run here"):
        agreed(sections, node).on_node(node).clients.train([_task()])
    assert not (tmp_path / "owned").exists()


def test_a_table_of_facts_that_the_server_names_is_not_even_opened(tmp_path: Path):
    """Reading the settings reads that table, so it must be refused before; who opens this one waits for ever."""
    os.mkfifo(tmp_path / "patients.csv")
    with pytest.raises(NotAllowed, match=r"^facts\.path: a server may not name a file of this node"):
        agreed(document(facts={"path": str(tmp_path / "patients.csv")}), config(tmp_path))


def test_a_trace_of_who_is_there_that_the_server_names_is_not_even_opened(tmp_path: Path):
    secret = tmp_path / "secret.csv"
    secret.write_text("client,from,to\nalice,1,2\n")
    with pytest.raises(NotAllowed, match=r"rounds\.select\.path: a server may not name a file of this node"):
        build({"rounds": {"select": {"path": str(secret)}}}, config(tmp_path))


def _task() -> Any:
    import torch

    from steelyard.messages import Task

    return Task("f", 0, 1, ("a",), torch.zeros(8))


def test_a_loss_and_a_plugin_that_the_server_names_are_not_loaded(tmp_path: Path):
    (tmp_path / "spy.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w').write('x')\n")
    node = config(tmp_path)
    spy = str(tmp_path / "spy.py")
    with only(node.allow), pytest.raises(UserError, match=r"is not run here; allowed: what is built in"):
        agreed(document(weighing={"criteria": ["DS"], "plugins": [spy]}), node).on_node(node)
    with only(node.allow), pytest.raises(NotAllowed, match=r"training.loss: '.*/spy.*' is not run here"):
        agreed(document(training={"loss": f"{spy}:loss"}), node).on_node(node).clients.train([_task()])
    assert not (tmp_path / "owned").exists()


def test_what_the_owner_allows_by_name_is_run(tmp_path: Path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef network(feature_shape, outputs):\n"
        "    return nn.Linear(feature_shape[0], outputs)\n"
    )
    code = f"{tmp_path / 'net.py'}:network"
    node = config(tmp_path, allow=[code])
    assert build(document(model={"name": code}), node) == "a"
    other = f"{tmp_path / 'net.py'}:nn.Linear"
    with only(node.allow), pytest.raises(NotAllowed, match="is not run here"):
        agreed(document(model={"name": other}), node).on_node(node).clients.train([_task()])


def test_code_of_the_same_name_is_the_nodes_own_file(tmp_path: Path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef network(feature_shape, outputs):\n"
        "    return nn.Linear(feature_shape[0], outputs)\n"
    )
    code = f"{tmp_path / 'net.py'}:network"
    node = config(tmp_path, allow=[code])
    for theirs in ("/home/server/net.py:network", "steelyard_app.code.net:network"):
        with only(node.allow):
            assert agreed(document(model={"name": theirs}), node).model.name == code  # type: ignore[attr-defined]
    with only(node.allow), pytest.raises(NotAllowed, match="is not run here"):
        agreed(document(model={"name": "/home/server/net.py:spy"}), node).on_node(node).clients.train([_task()])


def test_data_come_from_the_nodes_own_config_alone(tmp_path: Path):
    node = config(tmp_path)
    assert agreed(document(), node).data.path == tmp_path / "mine.npz"  # type: ignore[attr-defined]
    bare = NodeConfig.read({"client": "a"})
    secret = document(data={"source": "npz", "path": "/etc/passwd"})
    with pytest.raises(NotAllowed, match=r"data.path: a server may not name a file of this node; allowed: `data` in"):
        agreed(secret, bare)
    table = {"source": "images", "path": "x", "attributes": "/etc/passwd"}
    with pytest.raises(NotAllowed, match=r"data.attributes: a server may not name a file"):
        agreed(document(data=table, model={"name": "cnn"}), node)
    included = {"source": "csv", "path": "included/../../../secret.csv", "labels": "y", "classes": 2}
    with pytest.raises(NotAllowed, match=r"data.path: a server may not"):
        agreed(document(data=included), bare)


def noisy(noise: float, rounds: int = 10) -> dict[str, Any]:
    return document(
        privacy={"criteria": "public", "local": {"clip": 1.0, "noise": noise}},
        rounds={"count": rounds, "fraction": 1.0},
    )


def test_a_node_that_requires_noise_takes_part_in_no_experiment_without_it(tmp_path: Path):
    node = config(tmp_path, require="local")
    with pytest.raises(NotAllowed, match=r"privacy\.local: missing, but this node's owner requires it"):
        agreed(document(), node)
    central = {"central": {"clip": 1.0, "noise": 1.0, "references": {"DS": 10.0}}}
    with pytest.raises(NotAllowed, match=r"privacy\.local: missing"):
        agreed(document(privacy=central, weighing={"max_shares": 2.0}), node)
    assert agreed(noisy(1e-3), node).privacy is not None  # how much noise is another demand


def test_a_node_reckons_for_itself_what_the_noise_tells(tmp_path: Path):
    """Four rounds with noise 2 are one with noise 1: ε = 4.3772 at δ = 1e-5."""
    node = config(tmp_path, require="local", epsilon=4.38, state=str(tmp_path))
    assert agreed(noisy(2.0, rounds=4), node).privacy is not None
    with pytest.raises(NotAllowed, match=r"spends epsilon 4\.9.* over 5 rounds, and this node allows 4\.38"):
        agreed(noisy(2.0, rounds=5), node)
    # A criterion with noise is a release of its own: five instead of four.
    charged = noisy(2.0, rounds=4)
    charged["privacy"] |= {"criteria": "charged", "criteria_noise": 4.0, "criteria_bounds": {"DS": 100.0}}
    with pytest.raises(NotAllowed, match=r"spends epsilon 4\.9"):
        agreed(charged, node)
    # Rules side by side ask for an update each: two in two rounds are four releases, in three they are six.
    assert agreed({**noisy(2.0, rounds=2), "beside": {"EQ": {"criteria": ["EQ"]}}}, node).privacy is not None
    with pytest.raises(NotAllowed, match=r"spends epsilon 5\.\d+ at delta 1e-05 over 3 rounds of 2 rules, and"):
        agreed({**noisy(2.0, rounds=3), "beside": {"EQ": {"criteria": ["EQ"]}}}, node)
    # A δ of the server's own choice changes nothing.
    loose = noisy(2.0, rounds=5)
    loose["privacy"]["budget"] = {"delta": 0.5}
    with pytest.raises(NotAllowed, match=r"spends epsilon 4\.9"):
        agreed(loose, node)


def test_the_kind_is_the_agreed_one(tmp_path: Path):
    with pytest.raises(NotAllowed, match=r"kind: got 'recommend'; this node takes part in 'learning' only"):
        agreed({"kind": "recommend", "interactions": {"path": "/etc/passwd"}}, config(tmp_path))


def test_a_node_that_trusts_does_what_the_experiment_says(tmp_path: Path):
    node = config(tmp_path, allow="*")
    assert str(agreed(document(), node).data.path) == "own.npz"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("could not convert string to float: 'Ada Lovelace, HIV positive'"), "ValueError"),
        (UserError("data.labels: got 'Ada Lovelace'; allowed: numbers"), "UserError: data.labels"),
        (UserError("/srv/secret.csv: line 1: root:x:0:0"), "UserError"),
        (UserError("node config client: no client 'a' in this experiment"), "UserError: node config client"),
        (json.JSONDecodeError("Expecting value", "secret text", 0), "JSONDecodeError"),
        (NotAllowed("model.name: 'os:system' is not run here"), "NotAllowed: model.name: 'os:system' is not run here"),
    ],
)
def test_an_error_goes_back_as_class_and_field(error: Exception, words: str):
    assert public_error(error) == words


def test_a_clients_reason_ends_with_the_class_of_the_error():
    assert public_reason("criterion FT failed: ValueError: 'Ada Lovelace'") == "criterion FT failed: ValueError"
    assert public_reason("no training samples") == "no training samples"
