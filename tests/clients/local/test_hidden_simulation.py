"""A simulation whose clients hide their updates: the same models as in the open, through the same loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import SMALL, assert_refused, changed
from tests.stopping import stopped_and_resumed

from steelyard.clients.local.hidden_simulation import HiddenSimulation, WeightedSteps
from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.messages import Task
from steelyard.privacy.fixed_point import FixedPoint, Grid
from steelyard.privacy.hidden import BeyondBound, HiddenUpdates
from steelyard.privacy.secure_client import SecureClient
from steelyard.privacy.settings import AggregationSettings
from steelyard.rounds.soundness import Exploded
from steelyard.runs.reader import History
from steelyard.runs.store import Store
from steelyard.update_payloads import DenseModels

SECURE: dict[str, Any] = {"aggregation": {"kind": "secure"}}
OPEN = changed(
    SMALL,
    seed=3,
    partition={"clients": 8},
    training={"batch_size": 40},
    weighing={"criteria": ["DS", "LD"], "normalise": "max"},
)
HIDDEN = changed(OPEN, privacy=SECURE)
SPARED = {**OPEN["partition"], "server": "fraction"}


def models(folder: Path) -> torch.Tensor:
    store = Store(folder)
    try:
        return next(iter(store.resume().states.values())).parameters
    finally:
        store.close()


def test_a_run_with_hidden_updates_gives_the_model_of_one_without(tmp_path: Path):
    run(build(OPEN), out=tmp_path / "open")
    run(build(HIDDEN), out=tmp_path / "hidden")
    run(build({**OPEN, "privacy": {"aggregation": {"bits": 64}}}), out=tmp_path / "wide")
    plain = models(tmp_path / "open")
    # Eight roundings to 2^-23 in each of two rounds, and the second round trains from the first one's model.
    torch.testing.assert_close(models(tmp_path / "hidden"), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(models(tmp_path / "wide"), plain, rtol=0, atol=2e-6)
    here, there = History(tmp_path / "open"), History(tmp_path / "hidden")
    assert here.clients["weight"].tolist() == there.clients["weight"].tolist()
    assert there.info["aggregation"] == "secure"
    # 650 numbers of 4 bytes, keys, key shares of 82 bytes for seven, and eight shares of 33.
    assert set(there.clients["bytes"]) == {650 * 4 + 96 + 7 * 82 + 8 * 33}


def absent(**stages: str):
    return lambda stage, round: frozenset(f"client-{number.zfill(3)}" for number in stages.get(stage, "").split())


def hidden(settings: AggregationSettings | None = None, **stages: str) -> tuple[HiddenSimulation, Task]:
    clients, server = build(HIDDEN).assemble()
    assert isinstance(clients, HiddenSimulation)
    fresh = HiddenSimulation(clients.clients, settings or AggregationSettings(), absent(**stages))
    return fresh, Task("f", 3, 1, tuple(fresh.names(3)), server.initial(3))


@pytest.mark.parametrize(
    "stages", [{}, {"share": "1 4"}, {"mask": "0 7"}, {"open": "2 3"}, {"share": "1", "mask": "2"},
               {"mask": "5", "open": "6"}]
)  # fmt: skip
def test_the_weighted_mean_of_those_who_stayed_whoever_drops_out(stages: dict[str, str]):
    clients, task = hidden(**stages)
    (answer,) = clients.train([task])
    assert isinstance(answer.payload, HiddenUpdates)
    (plain,) = clients.clients.train([task])
    assert isinstance(plain.payload, DenseModels)
    weights = np.arange(1.0, 9.0)[[plain.clients.index(name) for name in answer.clients]]
    weights /= weights.sum()
    model = answer.payload.aggregate(task.parameters, weights)
    gone = absent(**stages)
    stayed = [row for row, name in enumerate(plain.clients) if name not in gone("share", 1) | gone("mask", 1)]
    assert answer.payload.summed is not None
    assert answer.payload.summed.clients == tuple(plain.clients[row] for row in stayed)
    wanted = np.arange(1.0, 9.0)[stayed] / np.arange(1.0, 9.0)[stayed].sum()
    expected = plain.payload.select(stayed).combine(task.parameters, wanted)
    torch.testing.assert_close(model, expected, rtol=0, atol=2e-6)
    told = [failure.client for failure in (*answer.failures, *answer.payload.summed.dropped)]
    assert sorted(told) == sorted(gone("share", 1) | gone("mask", 1))


def test_a_client_that_cannot_write_its_update_down_says_so_and_stays_away():
    settings = AggregationSettings(bound=0.05)
    clients, task = hidden(settings)
    (plain,) = clients.clients.train([task])
    assert isinstance(plain.payload, DenseModels)
    largest = (plain.payload.models - task.parameters).abs().amax(dim=1)
    over = [name for name, size in zip(plain.clients, largest.tolist(), strict=True) if size > 0.05]
    (answer,) = HiddenSimulation(clients.clients, AggregationSettings(bound=float(largest.max()) - 1e-6)).train([task])
    assert [failure.client for failure in answer.failures] == [plain.clients[int(largest.argmax())]]
    assert "privacy.aggregation.bound" in answer.failures[0].reason
    assert over  # the digits do move by more than 0.05


KINDS = [{"kind": "secure"}, {"kind": "paillier", "key_bits": 2048}, {"kind": "ckks"}]


def send_too_much(monkeypatch: pytest.MonkeyPatch, client: str, by: float) -> None:
    """Let one client of a simulation send more than it may: no program of its own holds a hostile one to the bound."""
    honest = WeightedSteps.of

    def of(self: WeightedSteps, clients: Any, weights: Any, begin: int, end: int) -> Any:
        steps = honest(self, clients, weights, begin, end)
        steps[[name == client for name in clients]] += by
        return steps

    def encode(self: FixedPoint, values: Any) -> Any:
        return np.rint(values * 2.0**self.places).astype(np.int64).astype(self.dtype)

    monkeypatch.setattr(WeightedSteps, "of", of)
    monkeypatch.setattr(FixedPoint, "encode", encode)
    monkeypatch.setattr(Grid, "onto", lambda self, values: np.rint(values * 2.0**self.places) * 2.0**-self.places)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_of_small_weight_cannot_move_the_model_beyond_the_bound(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    clients, task = hidden(AggregationSettings.model_validate(kind))
    by = 100.0 if kind["kind"] == "ckks" else 200.0  # CKKS cannot write more than about bound times the cohort
    send_too_much(monkeypatch, "client-003", by)
    (answer,) = clients.train([task])
    weights = np.array([0.99 / 7] * 8)
    weights[3] = 0.01
    with pytest.raises(BeyondBound, match=r"moves a parameter by [12]0\d, .*at most 16 .*client-000, .*client-003,"):
        answer.payload.aggregate(task.parameters, weights)  # type: ignore[attr-defined]


def test_a_run_ends_before_such_a_round_and_keeps_the_model_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    experiment = build({**OPEN, "privacy": SECURE, "store": {"checkpoint_every": 1}})
    run(build({**OPEN, "privacy": SECURE, "rounds": {"count": 1, "fraction": 1.0}}), out=tmp_path / "one")

    def turn(round: int, _: Any) -> None:
        if round == 1:
            send_too_much(monkeypatch, "client-003", -200.0)

    with pytest.raises(Exploded, match=r"^round 2 of .*: the hidden sum of 8 clients .* the model before"):
        run(experiment, out=tmp_path / "two", progress=turn)
    assert torch.equal(models(tmp_path / "one"), models(tmp_path / "two"))


def test_a_client_whose_key_shares_cannot_be_read_is_left_out_and_the_others_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    honest = SecureClient.share

    def share(self: SecureClient, cohort: Any) -> dict[str, bytes]:
        shares = honest(self, cohort)
        return {name: bytes(len(text)) for name, text in shares.items()} if self.name == "client-002" else shares

    monkeypatch.setattr(SecureClient, "share", share)
    experiment = build(HIDDEN)
    run(experiment, out=tmp_path / "spoiled")
    monkeypatch.undo()
    run_with(experiment, tmp_path / "dropped", mask="2")
    # With the weights that were given: the same sum as if it had dropped out after they were, up to rounding.
    torch.testing.assert_close(models(tmp_path / "spoiled"), models(tmp_path / "dropped"), rtol=0, atol=1e-5)
    there = History(tmp_path / "spoiled").clients
    left = there[there["failure"].notna()]
    assert set(left["client"]) == {"client-002"}
    said = "left out: sent key shares that client-000, client-001, client-003, client-004, client-005 and 2 more cannot"
    assert set(left["failure"]) == {f"{said} read"}
    # Keys and key shares of both tries are counted: eight clients in the first, seven in the second.
    once = 650 * 4 + 96 + 6 * 82 + 7 * 33
    assert set(there[there["failure"].isna()]["bytes"]) == {once + 96 + 7 * 82}


def test_noise_of_the_devices_comes_first_and_then_the_masks(tmp_path: Path):
    noise = {"local": {"clip": 1.0, "noise": 0.01}, "criteria": "public"}
    # Without seeds noise is never the same twice; what can be compared is how far it moves the model.
    run(build({**OPEN, "privacy": {**SECURE, **noise}}), out=tmp_path / "both")
    run(build(OPEN), out=tmp_path / "open")
    distance = (models(tmp_path / "both") - models(tmp_path / "open")).abs().mean()
    assert 1e-4 < distance < 1.0
    history = History(tmp_path / "both")
    assert history.info["aggregation"] == "secure"
    assert history.clients["failure"].isna().all()


@pytest.mark.parametrize("kind", [{"kind": "paillier", "key_bits": 2048}, {"kind": "ckks"}])
def test_encrypted_updates_give_the_model_of_open_ones_and_whoever_drops_out_is_missing(kind: dict[str, Any]):
    settings = AggregationSettings.model_validate(kind)
    clients, task = hidden(settings, mask="2 5")
    (answer,) = clients.train([task])
    (plain,) = clients.clients.train([task])
    assert isinstance(answer.payload, HiddenUpdates)
    assert isinstance(plain.payload, DenseModels)
    model = answer.payload.aggregate(task.parameters, np.full(8, 1 / 8))
    stayed = [0, 1, 3, 4, 6, 7]
    expected = plain.payload.select(stayed).combine(task.parameters, np.full(6, 1 / 6))
    torch.testing.assert_close(model, expected, rtol=0, atol=2e-6)
    assert answer.payload.summed is not None
    sent = set(answer.payload.summed.bytes_sent.values())
    # 650 numbers in eleven ciphertexts of 63 slots and 512 bytes, or in one of CKKS.
    assert sent == {11 * 512} if settings.kind == "paillier" else max(sent) < 140_000
    few, again = hidden(settings, mask="0 1 2 3 4 5")
    (left,) = few.train([again])
    with pytest.raises(UserError, match=r"2 of 2 clients have a weight, .*allowed: at least 3"):
        left.payload.aggregate(again.parameters, np.full(8, 1 / 8))  # type: ignore[attr-defined]


EVEN = [1 / 8] * 8


@pytest.mark.parametrize(
    ("stages", "weights", "said"),
    [
        # Of eight clients six must stay.
        *((stages, EVEN, ("round 1 of f", "5 of 8", "it takes 6"))
          for stages in ({"share": "0 1 2"}, {"mask": "0 1 2"}, {"open": "0 1 2"}, {"share": "0", "mask": "3 4"})),
        ({}, [0.6, *[0.4 / 7] * 7], ("largest_weight", "client-000", 0.6, "weighing.max_weight")),
        # The first client drops out with its weight after all agreed to the weights.
        ({"mask": "0"}, [0.4, 0.4, 0.05, 0.05, 0.05, 0.05, 0, 0], ("largest_weight", "client-001", 0.667)),
        ({"mask": "0"}, [0.4, 0.3, 0.3, 0, 0, 0, 0, 0], ("2 of 7 clients have a weight", "stays hidden")),
    ],
)  # fmt: skip
def test_a_sum_that_too_few_stand_behind_is_not_opened(
    stages: dict[str, str], weights: list[float], said: tuple[object, ...]
):
    clients, task = hidden(**stages)
    (answer,) = clients.train([task])
    given = np.array(weights)[: len(answer.clients)]
    assert_refused(lambda: answer.payload.aggregate(task.parameters, given), *said)  # type: ignore[attr-defined]


def run_with(experiment: Any, out: Path, **stages: str) -> History:
    clients, server = experiment.assemble()
    assert isinstance(clients, HiddenSimulation)
    dropping = HiddenSimulation(clients.clients, clients.settings, absent(**stages))
    run(experiment, out=out, assemble=lambda: (dropping, server))
    return History(out)


def test_the_record_names_who_dropped_out_and_the_weights_of_the_rest(tmp_path: Path):
    clients = run_with(build(HIDDEN), tmp_path / "run", mask="2", share="5").clients
    first = clients[clients["round"] == 1]
    weighed, left = first[first["failure"].isna()], first[~first["failure"].isna()]
    assert sorted(weighed["client"]) == [f"client-{n:03d}" for n in (0, 1, 3, 4, 6, 7)]
    assert weighed["weight"].sum() == pytest.approx(1.0)
    reasons = dict(zip(left["client"], left["failure"], strict=True))
    assert reasons == {"client-002": "dropped out before its update arrived", "client-005": "dropped out"}
    all_needed = build(changed(HIDDEN, rounds={"min_clients": 8}))
    assert_refused(lambda: run_with(all_needed, tmp_path / "few", mask="2"), "rounds.min_clients = 8", "7 of 8")


def test_fresh_keys_change_no_bit_of_the_model_also_on_resume(tmp_path: Path):
    experiment = build(changed(HIDDEN, store={"checkpoint_every": 1}))
    run(experiment, out=tmp_path / "one")
    stopped_and_resumed(experiment, tmp_path / "two", after=1)
    assert torch.equal(models(tmp_path / "one"), models(tmp_path / "two"))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"weighing": {"criteria": ["DS", "MD"]}}, ("MD", "single models")),
        ({"weighing": {"criteria": ["VP"]}, "partition": SPARED}, ("VP", "single models", "privacy.aggregation")),
        ({"weighing": {"fit": {"steps": 2}}, "partition": SPARED}, ("weighing.fit", "single models")),
        ({"weighing": {"defence": {"rule": "median"}}}, ("median", "single updates")),
        ({"weighing": {"criteria": ["DS", "LD"], "adjust": {}}}, ("one more equation",)),
    ],
)
def test_what_cannot_be_combined_is_refused_before_any_data_is_read(sections: dict[str, Any], said: tuple[object, ...]):
    assert_refused(lambda: build({**HIDDEN, **sections}), *said)
    build({**HIDDEN, "beside": {"alone": {"trained_by": "server"}}, "partition": SPARED})  # a control without clients
