"""One round of somebody else's federation: mixed types, buffers, differences, and models that lie on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.adapters.rounds import Reply, WeighedRounds
from steelyard.adapters.server_rows import ServerRows
from steelyard.errors import UserError


def normed() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


def state(network: torch.nn.Module) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in network.state_dict().items()}


def test_whole_numbers_between_the_weights_do_not_shift_what_is_tested() -> None:
    """Batch norm's counter lies between two layers; the model on the server's rows is still the client's own."""
    network, x = normed(), torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    network.eval()
    with torch.no_grad():
        labels = network(x).argmax(1)
    sent = state(network)
    wrong = {**sent, "2.weight": -sent["2.weight"], "2.bias": -sent["2.bias"]}
    weighing = WeighedRounds("VP", ServerRows(normed(), x, labels))
    found = weighing.combine(sent, [Reply("good", sent, 10.0), Reply("wrong", wrong, 10.0)])
    assert found.measures["good"]["VP"] == 1.0
    assert found.measures["wrong"]["VP"] < 0.5


@pytest.mark.parametrize("kind", [np.complex64, "U3", object])
def test_arrays_that_cannot_be_summed_are_refused_by_name(kind: Any) -> None:
    sent = {"w": np.zeros(2, np.float32), "odd": np.zeros(2).astype(kind)}
    with pytest.raises(UserError, match="odd") as error:
        WeighedRounds("DS").combine(sent, [Reply("a", sent, 1.0)])
    assert "\n" not in str(error.value)


def cohort(clients: int = 5) -> tuple[dict[str, Any], list[Reply]]:
    """A model of mixed types, and what clients made of it."""
    numbers = np.random.default_rng(3)
    sent = {
        "w": numbers.normal(size=(40, 30)).astype(np.float32),
        "seen": np.array(2**60, np.int64),
        "half": numbers.normal(size=300).astype(np.float16),
        "mask": np.array([True, False, True]),
        "wide": numbers.normal(size=7),
    }
    replies = [
        Reply(
            f"c{i}",
            {
                **{
                    name: (sent[name] + numbers.normal(size=sent[name].shape)).astype(sent[name].dtype)
                    for name in ("w", "half", "wide")
                },
                "seen": np.array(2**60 + 2 * i + 1, np.int64),
                "mask": np.array([True, i > 0, False]),
            },
            10.0 * (i + 1),
        )
        for i in range(clients)
    ]
    return sent, replies


@pytest.mark.parametrize(
    "rule", ["DS", "MD>DS/max", "AG", "median(DS)", "multi-krum(EQ)", "clip(DS)", "capped(DS;max_shares=1.2)"]
)
def test_updates_on_the_disk_are_weighed_as_those_in_memory(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, replies = cohort()
    before = {name: array.copy() for name, array in sent.items()}
    found = [WeighedRounds(rule).combine(sent, replies)]
    monkeypatch.setattr("steelyard.adapters.rounds.MEMORY", 0)
    monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": 500})
    found.append(WeighedRounds(rule).combine(sent, list(reversed(replies))))
    changes = [replace(r, arrays=changed(r.arrays, sent), is_change=True) for r in replies]
    found.append(WeighedRounds(rule).combine(sent, changes))
    for other in found[1:]:
        assert other.weights == pytest.approx(found[0].weights, abs=1e-6)
        assert found[0].arrays is not None
        assert other.arrays is not None
        assert list(other.arrays) == list(sent)
        for name, array in found[0].arrays.items():
            assert other.arrays[name].dtype == sent[name].dtype
            np.testing.assert_allclose(other.arrays[name], array, rtol=2e-3 if name == "half" else 1e-5, atol=1e-5)
    for name, array in before.items():
        assert (sent[name] == array).all(), name


def changed(arrays: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """What a client changed, in float64: half precision has no room for a difference."""
    return {
        name: array.astype(np.int64) - sent[name] if array.dtype.kind in "ib" else array.astype(np.float64) - sent[name]
        for name, array in arrays.items()
    }


def test_whole_numbers_are_averaged_without_loss() -> None:
    """2⁶⁰ + 1, 3, 5, ... by 10, 20, 30, ... rows: float64 has no room for any of them."""
    sent, replies = cohort(3)
    found = WeighedRounds("DS").combine(sent, replies)
    assert found.arrays is not None
    assert found.arrays["seen"] == 2**60 + round((1 * 10 + 3 * 20 + 5 * 30) / 60)
    assert found.arrays["mask"].tolist() == [True, True, False]
    assert found.arrays["seen"].shape == ()


def test_no_room_for_a_large_update_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, replies = cohort(1)
    monkeypatch.setattr("steelyard.adapters.rounds.MEMORY", 0)
    collected = WeighedRounds("DS").begin(sent, tmp_path / "missing")
    with pytest.raises(UserError, match=r"folder: an update of .* cannot be put into") as error:
        collected.add(replies[0])
    assert "\n" not in str(error.value)


def test_who_answers_twice_is_left_out() -> None:
    sent, replies = cohort(3)
    found = WeighedRounds("DS").combine(sent, [*replies, replies[0]])
    assert found.reasons == {"c0": "answered twice"}
    assert set(found.weights) == {"c1", "c2"}


def test_a_policy_of_others_steps_and_remembers_inside_another_framework() -> None:
    """CGSV's weights do not sum to 1: the model goes on from the one that was sent, and counters are averaged."""
    start = np.array([0.5, -1.0, 0.25], np.float32)
    models = [start + np.array(change, np.float32) for change in ([0.3, 0, 0], [0, 0.4, 0], [0.2, 0.1, 0])]
    sent = {"w": start, "seen": np.array(4)}
    replies = [Reply(name, {"w": model, "seen": np.array(8)}, 10.0) for name, model in zip("abc", models, strict=True)]
    weighing = WeighedRounds("cgsv(length=0.5)")
    first, second = weighing.combine(sent, replies), weighing.combine(sent, replies)
    assert first.arrays is not None
    assert second.arrays is not None
    step = sum(0.5 / 3 * (model - start) / np.linalg.norm(model - start) for model in models)
    assert first.arrays["w"] == pytest.approx(start + step, abs=1e-5)
    assert first.arrays["seen"] == 8
    assert sum(first.weights.values()) > 1.1
    # By now who pulls as the whole does is known: c, which lies between the others, has gained.
    assert second.weights["c"] > first.weights["c"]


@pytest.mark.parametrize(
    ("features", "labels", "line"),
    [
        ([[1.0, 2.0]], [0, 1], "rows: 1 features and 2 labels; allowed: as many of both, and at least one"),
        ([], [], "rows: 0 features and 0 labels; allowed: as many of both, and at least one"),
        ([["a", "b"]], [0], "rows: features cannot be made a tensor"),
        ([[1.0, 2.0]], ["cat"], "rows: labels cannot be made a tensor"),
        ([[1.0, float("nan")]], [0], "rows: features hold NaN or infinity; allowed: finite numbers"),
        ([[1.0, 2.0]], [-1], "rows: labels hold -1; allowed: classes 0, 1, 2, ..."),
        ([[1.0, 2.0]], [0.5], "rows: labels hold 0.5; allowed: classes 0, 1, 2, ..."),
        ([[1.0, 2.0]], [5], "rows: labels hold class 5, and the network tells 2 classes apart; allowed: 0 to 1"),
        ([[1.0]], [0], "rows: the network cannot look at them"),
    ],
)
def test_rows_that_cannot_be_tested_on_are_refused(features: Any, labels: Any, line: str) -> None:
    network = torch.nn.Linear(2, 2)
    sent = {name: value.numpy() for name, value in network.state_dict().items()}
    with pytest.raises(UserError) as found:
        WeighedRounds("VP", ServerRows(network, features, labels)).combine(sent, [Reply("a", sent, 1.0)])
    assert str(found.value).startswith(line)


def test_rows_need_a_network() -> None:
    with pytest.raises(UserError, match=r"^rows: network: got 'net'; allowed: a torch.nn.Module"):
        ServerRows("net", [[1.0]], [0])  # type: ignore[arg-type]
