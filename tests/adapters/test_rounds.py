"""One round of somebody else's federation: mixed types, buffers, differences, and models that lie on the disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused

from steelyard.adapters.arrays import Spill
from steelyard.adapters.rounds import Reply, ServerRows, WeighedRounds
from steelyard.base.settings import LARGEST_REAL
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import MOST_SAMPLES
from steelyard.weighing.rule import WeighingSettings

SENT: dict[str, Any] = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)}


def reply(client: str, value: float, samples: float = 10, measures: Mapping[str, float] | None = None) -> Reply:
    return Reply(client, {name: np.full_like(array, value) for name, array in SENT.items()}, samples, measures or {})


def test_scores_and_metrics_go_by_the_weights_and_only_what_everybody_says_is_averaged() -> None:
    found = combined("DS", reply("a", 1.0, 10, {"other": 1.0}), reply("b", 2.0, 30))
    assert (found.scores, found.samples) == ({"a": 0.25, "b": 0.75}, {"a": 10, "b": 30})
    assert found.measures == {"a": {"DS": 10}, "b": {"DS": 30}}
    means = found.means({"a": {"x": 1.0, "y": 5.0}, "b": {"y": 1.0, "x": 2.0, "z": 1.0}})
    assert means == pytest.approx({"x": 1.75, "y": 2.0})
    assert found.means({"a": {"x": 1.0, "y": math.nan}, "b": {"x": math.inf, "y": math.nan}}) == {"x": 1.0}


def combined(rule: str, *replies: Reply, **options: Any) -> Any:
    return WeighedRounds(rule, **options).combine(SENT, replies)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"w": np.full((2, 3), np.inf, np.float32)}, "model holds NaN or infinity"),
        ({"b": np.zeros(3, np.float32)}, "array b has shape (3,), and (2,) was sent"),
        ({"b": np.zeros(2, np.int64)}, "array b is of type int64, and float32 was sent"),
        ({"b": np.array([object(), 1])}, "array b is of type object"),
        ({"x": np.zeros(1)}, "array x was not sent"),
        ({"b": None}, "array b is missing"),
        ({"samples": 0.0}, "samples = 0; allowed: 1 to"),
        ({"samples": 2.0 * MOST_SAMPLES}, "samples = 2e+12"),
        ({"q": None}, "criterion q is missing"),
        ({"q": -1.0}, "criterion q"),
        ({"q": 1.1 * LARGEST_REAL}, "criterion q = 1.1e+30; allowed: 0 to 1e+30"),
    ],
)
def test_a_reply_that_cannot_be_weighed_is_left_out_with_its_reason(changed: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {**reply("b", 1.0).arrays, "samples": 10.0, "q": 1.0, **changed}
    samples, q = given.pop("samples"), given.pop("q")
    arrays = {name: array for name, array in given.items() if array is not None}
    bad = Reply("b", arrays, samples, {} if q is None else {"q": q})
    others = [reply(name, value, 10, {"q": 1.0}) for name, value in (("a", 1.0), ("c", 3.0))]
    found = combined("q>DS", others[0], bad, others[1], metrics=["q"])
    assert found.arrays["w"][0, 0] == pytest.approx(2.0)
    assert list(found.reasons) == ["b"]
    assert found.reasons["b"].startswith(reason)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("is_change", [False, True])
def test_negative_variances_of_batch_norm_leave_their_client_out(is_change: bool) -> None:
    sent = {"bn.running_var": np.full(3, 0.5, np.float32)}
    collected = WeighedRounds("DS").begin(sent)
    for client, variance in (("a", 0.2), ("b", -0.1), ("c", 0.0)):
        arrays = {"bn.running_var": np.array([1.0, variance, 1.0], np.float32) - (sent["bn.running_var"] * is_change)}
        collected.add(Reply(client, arrays, 10, is_change=is_change))
    assert collected.combine().reasons == {"b": "array bn.running_var holds negative variances"}


def test_what_overflows_is_no_number() -> None:
    sent = {"w": np.full(2, -3e38, np.float32)}
    found = WeighedRounds(WeighingSettings(criteria=("DS",))).combine(
        sent, [Reply("a", {"w": -sent["w"]}, 1.0), Reply("b", sent, 1.0)]
    )
    assert (found.weights, found.reasons) == ({"b": 1.0}, {"a": "model holds NaN or infinity"})


def test_what_lies_at_a_border_is_taken_and_reasons_are_short() -> None:
    most = [reply(name, 1.0, MOST_SAMPLES, {"q": LARGEST_REAL}) for name in "ab"]
    assert combined("q>DS", *most, metrics=["q"]).weights == {"a": 0.5, "b": 0.5}
    assert combined("DS", most[0], most[1], most[0]).reasons == {"a": "answered twice"}
    weighing = WeighedRounds("DS")
    assert weighing.memory == {}
    collected = weighing.begin(SENT)
    collected.refuse("z", "x\n" * 999)
    assert len(collected.reasons["z"]) == 500
    assert collected.reasons["z"].isprintable()
    found = weighing.combine(SENT, [reply("b", np.nan)], {"a": "no reply came"})
    assert (found.arrays, found.weights, found.measures, found.reasons["a"]) == (None, {}, {}, "no reply came")
    assert weighing.combine(SENT, []).measures == {}
    keeping = WeighedRounds(WeighingSettings(criteria=("LD",), when_zero="keep"))
    kept = keeping.combine(SENT, [reply(name, 1.0, 10, {"LD": 0.0}) for name in "ab"])
    assert (kept.arrays, kept.weights, kept.reasons) == (None, {}, {})
    assert weighing.round == 2
    weighing.go_on(-1, {})
    assert weighing.round == 0
    weighing.go_on(7, {"AG": 1.0})
    assert (weighing.round, weighing.memory) == (7, {"AG": 1.0})
    asked = [(each.asked, each.needs_samples) for each in (weighing, WeighedRounds("LD>MD"))]
    assert asked == [([], True), (["LD"], False)]


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
    weighing = WeighedRounds("VP", ServerRows(watched := normed(), x.double(), labels))
    found = weighing.combine(sent, [Reply("good", sent, 10.0), Reply("wrong", wrong, 10.0)])
    assert found.measures["good"]["VP"] == 1.0
    assert found.measures["wrong"]["VP"] < 0.5
    assert watched.training, "the network is as it was"


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ("VP>DS", ("VP", "no rows were given")),
        ("online(DS>MD)", ("online(DS>MD)", "steers training itself")),
        ("server-only", ("server-only", "steers training itself")),
        ("fltrust(EQ)", ("fltrust(EQ)", "trains at the server")),
        (" ", ("rule", "' '")),
        ("owa(DS,MD;1,2,3)", ("rule: quantifier",)),
        ("LB>DS", ("LB", "losses before training")),
        ("nvflare-adaptive", ("nvflare-adaptive", "label counts")),
        ("shapfed", ("shapfed", "layers")),
        ("fedce", ("fedce", "clients test")),
        ("NOWHERE>DS", ("rule: ", "'NOWHERE'")),
        ({"plugins": "own.py"}, ("plugins: got 'own.py'",)),
        ({"metrics": [7]}, ("metrics: got 7",)),
    ],
)
def test_rules_that_cannot_be_used_here_are_refused(rule: str | dict[str, Any], parts: tuple[str, ...]) -> None:
    given: dict[str, Any] = {"rule": rule} if isinstance(rule, str) else {"rule": "DS", **rule}
    assert_refused(lambda: WeighedRounds(**given), *parts)


def test_criteria_of_ones_own_are_loaded_and_rows_are_only_tested_on(tmp_path: Path) -> None:
    own = "from steelyard import client_criterion\n\n@client_criterion('MINE')\ndef mine(data): return 1.0\n"
    (tmp_path / "mine.py").write_text(own)
    assert WeighedRounds("MINE>DS", plugins=[str(tmp_path / "mine.py")]).asked == ["MINE"]
    rows = ServerRows(torch.nn.Linear(2, 2), [[1.0, 2.0]], [0])
    assert_refused(lambda: WeighedRounds("fedlaw", rows), "fedlaw", "only tests on them")
    # What is recommended goes by how models do where there are rows, else by the track record.
    assert [WeighedRounds("guarded", given).rule.names for given in (rows, None)] == [("VP",), ("TR",)]


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

    def trained(i: int) -> dict[str, Any]:
        moved = {n: (v + numbers.normal(size=v.shape)).astype(v.dtype) for n, v in sent.items() if v.dtype.kind == "f"}
        return {**moved, "seen": sent["seen"] + 2 * i + 1, "mask": np.array([True, i > 0, False])}

    return sent, [Reply(f"c{i}", trained(i), 10.0 * (i + 1)) for i in range(clients)]


@pytest.mark.parametrize("rule", ["DS", "MD>DS/max", "AG", "median(DS)", "multi-krum(EQ)", "clip(DS)"])
def test_updates_are_weighed_alike_in_any_order_in_blocks_and_as_changes(
    rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent, replies = cohort()
    before = {name: array.copy() for name, array in sent.items()}
    found: list[Any] = [WeighedRounds(rule).combine(sent, replies)]
    monkeypatch.setattr("steelyard.messages.payloads.AT_ONCE", {"cpu": 500})
    found.append(WeighedRounds(rule).combine(sent, list(reversed(replies))))
    changes = [replace(r, arrays=changed(r.arrays, sent), is_change=True) for r in replies]
    found.append(WeighedRounds(rule).combine(sent, changes))
    for other in found[1:]:
        assert other.weights == pytest.approx(found[0].weights, abs=1e-6)
        assert list(other.arrays) == list(sent)
        for name, array in found[0].arrays.items():
            assert other.arrays[name].dtype == sent[name].dtype
            np.testing.assert_allclose(other.arrays[name], array, rtol=2e-3 if name == "half" else 1e-5, atol=1e-5)
    for name, array in before.items():
        assert (sent[name] == array).all(), name
    if rule == "DS":
        # 2⁶⁰ + 1, 3, 5, ... by 10, 20, 30, ... rows: float64 has no room for any of them.
        seen = found[0].arrays["seen"]
        assert (seen, seen.shape) == (2**60 + round(sum((2 * i + 1) * (i + 1) for i in range(5)) / 15), ())
        assert found[0].arrays["mask"].tolist() == [True, True, False]
    assert_refused(lambda: WeighedRounds("DS").begin(sent, tmp_path / "missing"), "folder", tmp_path / "missing")


def changed(arrays: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """What a client changed, in float64: half precision has no room for a difference."""
    return {
        name: array.astype(np.int64) - sent[name] if array.dtype.kind in "ib" else array.astype(np.float64) - sent[name]
        for name, array in arrays.items()
    }


def test_a_round_may_come_to_the_change_of_the_model() -> None:
    collected = WeighedRounds("DS").begin(sent := {"w": np.full(2, 5.0), "n": np.array(3)})
    for name, value in (("a", 6.0), ("b", 8.0)):
        assert collected.add(Reply(name, {"w": np.full(2, value), "n": np.array(7)}, 1.0)) == ""
    found: Any = collected.combine(as_change=True).arrays
    assert (found["w"].tolist(), found["n"].tolist(), sent["w"].tolist()) == ([2.0, 2.0], 4, [5.0, 5.0])
    odd = {"odd": np.zeros(2, np.complex64)}
    assert_refused(lambda: WeighedRounds("DS").combine(odd, [Reply("a", odd, 1.0)]), "odd", "complex64")


def test_updates_in_a_file_are_weighed_as_others(tmp_path: Path) -> None:
    rows = np.arange(30.0).reshape(3, 10)
    rows[2, 4] = np.nan
    spill = Spill(10, np.dtype(np.float32), tmp_path)
    for row in rows:
        spill.add([row[:7], row[7:]])
    assert list(tmp_path.iterdir()) == []  # The file has no name.
    models = spill.models([2, 0, 1])
    assert models.finite().tolist() == [False, True, True]
    ((_, block),) = models.blocks()
    np.testing.assert_array_equal(block.numpy(), rows[[2, 0, 1]].astype(np.float32))
    kept = models.select([1, 2])
    assert kept.divergence(torch.ones(10)) == pytest.approx(np.linalg.norm(rows[:2] - 1, axis=1), rel=1e-6)
    mixed = kept.combine(torch.zeros(10), np.array([[0.5, 0.5], [1.0, 0.0]]))
    assert mixed.numpy() == pytest.approx(np.stack([rows[:2].mean(axis=0), rows[0]]), rel=1e-6)
    tested = models.tested(lambda given: ServerTest(given[:, 3].double().numpy(), np.zeros((1, 0))))
    assert tested.accuracy.tolist() == [23.0, 3.0, 13.0]
    assert_refused(lambda: Spill(1, np.dtype(np.float32), tmp_path / "none"), "folder", str(tmp_path / "none"))


def test_a_policy_of_others_steps_and_remembers_inside_another_framework() -> None:
    """CGSV's weights do not sum to 1: the model goes on from the one that was sent, and counters are averaged."""
    start = np.array([0.5, -1.0, 0.25], np.float32)
    changes = np.array([[0.3, 0, 0], [0, 0.4, 0], [0.2, 0.1, 0]], np.float32)
    replies = [Reply(n, {"w": start + c, "seen": np.array(8)}, 10.0) for n, c in zip("abc", changes, strict=True)]
    weighing, sent = WeighedRounds("cgsv(length=0.5)"), {"w": start, "seen": np.array(4)}
    first: Any
    first, second = weighing.combine(sent, replies), weighing.combine(sent, replies)
    step = sum(0.5 / 3 * change / np.linalg.norm(change) for change in changes)
    assert first.arrays["w"] == pytest.approx(start + step, abs=1e-5)
    assert first.arrays["seen"] == 8
    # By now who pulls as the whole does is known: c, which lies between the others, has gained.
    assert second.weights["c"] > first.weights["c"]


@pytest.mark.parametrize(
    ("features", "labels", "parts"),
    [
        ([[1.0, 2.0]], [0, 1], ("1 features", "2 labels")),
        (1.0, 0, ("0 features", "0 labels")),
        ([[1.0, 2.0]], ["cat"], ("rows: labels cannot be",)),
        ([["cat", "dog"]], [0], ("rows: features cannot be",)),
        ([[1.0, float("nan")]], [0], ("rows: features", "NaN")),
        ([[1.0, 2.0]], [-1], ("labels", -1)),
        ([[1.0, 2.0]] * 3, [0, 2, 1], ("class 2", "0 to 1")),
        ([[1.0]], [0], ("cannot look at them", "1x1")),
        ([[[1.0, 2.0]]], [0], ("the network makes [1, 1, 2] of 1 rows",)),
    ],
)
def test_rows_that_cannot_be_tested_on_are_refused_when_they_are_given(
    features: Any, labels: Any, parts: tuple[Any, ...]
) -> None:
    assert_refused(lambda: ServerRows(torch.nn.Linear(2, 2), features, labels), "rows", *parts)


def test_rows_need_the_clients_network() -> None:
    small, large = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2)
    for mine, sent, what in (
        ("net", {}, "rows: network: got 'net'"),
        (small, state(large), "rows: clients send 'bias' too"),
        (large, state(small), "rows: the network has 'bias'"),
    ):
        assert_refused(lambda m=mine, s=sent: by_rows(m, [[1.0, 2.0]], [1], s), "rows", what)
    # One output tells two classes apart.
    sent = {"weight": np.ones((1, 2), np.float32), "bias": np.zeros(1, np.float32)}
    rows = np.array([[9.0, 9.0], [-9.0, -9.0]]), [1, 0]
    # Of each class one row of two, all right: odds of (1 + ½)/(0 + ½) twice.
    for rule, expected in (("VP", 1.0), ("VD", 9.0)):
        assert by_rows(torch.nn.Linear(2, 1), *rows, sent, rule) == pytest.approx(expected)


def by_rows(network: Any, features: Any, labels: Any, sent: Mapping[str, Any], rule: str = "VP") -> float:
    """Weigh one client by its score on the server's rows; return it."""
    weighing = WeighedRounds(rule, ServerRows(network, features, labels))
    return weighing.combine(sent, [Reply("a", sent, 1.0)]).measures["a"][rule]
