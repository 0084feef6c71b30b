"""A simulation whose clients hide their updates: the same models as in the open, through the same loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import SMALL, assert_refused, changed
from tests.runs.contents import models
from tests.stopping import stopped_and_resumed

from steelyard.clients.local.hidden_simulation import Hide
from steelyard.clients.protocol import SendingClients
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.messages.updates import Task, Updates
from steelyard.privacy.hidden import HiddenUpdates
from steelyard.privacy.secure import SecureClient
from steelyard.privacy.settings import AggregationSettings
from steelyard.runs.history import History

SECURE: dict[str, Any] = {"aggregation": {"kind": "secure"}}
OPEN = changed(
    SMALL,
    seed=3,
    partition={"clients": 8},
    training={"batch_size": 40},
    weighing={"criteria": ["DS", "LD"], "normalise": "max"},
)
HIDDEN = changed(OPEN, privacy=SECURE)
NAME = "DS>LD/max"
SPARED = {**OPEN["partition"], "server": "fraction"}


def test_a_run_with_hidden_updates_gives_the_model_of_one_without(tmp_path: Path):
    run(build(OPEN), out=tmp_path / "open")
    run(build(HIDDEN), out=tmp_path / "hidden")
    # Eight roundings to 2^-23 in each of two rounds, and the second round trains from the first one's model.
    torch.testing.assert_close(models(tmp_path / "hidden")[NAME], models(tmp_path / "open")[NAME], rtol=0, atol=1e-5)
    here, there = History(tmp_path / "open"), History(tmp_path / "hidden")
    assert here.clients["weight"].tolist() == there.clients["weight"].tolist()
    assert there.info["aggregation"] == "secure"
    # 650 numbers of 4 bytes, keys, key shares of 82 bytes for seven, and eight shares of 33.
    assert set(there.clients["bytes"]) == {650 * 4 + 96 + 7 * 82 + 8 * 33}


def absent(**stages: str):
    return lambda stage, round: frozenset(f"client-{number.zfill(3)}" for number in stages.get(stage, "").split())


def hidden(settings: AggregationSettings | None = None, **stages: str) -> tuple[SendingClients, Task]:
    clients, server = build(HIDDEN).assemble()
    assert isinstance(clients, SendingClients)
    fresh = SendingClients(clients.clients, [Hide(settings or AggregationSettings(), absent(**stages))])
    return fresh, Task("f", 3, 1, tuple(fresh.names(3)), server.initial(3))


def both(settings: AggregationSettings | None = None, **stages: str) -> tuple[Updates, Updates, Task]:
    """What clients send hidden and what they would have sent openly."""
    clients, task = hidden(settings, **stages)
    return clients.train([task])[0], clients.clients.train([task])[0], task


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({}, {}),
        ({}, {"share": "1 4"}),
        ({}, {"open": "2 3"}),
        ({}, {"mask": "5", "open": "6"}),
        ({"bits": 64}, {"share": "1", "mask": "2"}),
        ({"kind": "ckks"}, {"mask": "2 5"}),
    ],
)
def test_the_weighted_mean_of_those_who_stayed_whoever_drops_out(settings: dict[str, Any], stages: dict[str, str]):
    answer, plain, task = both(AggregationSettings.model_validate(settings), **stages)
    assert isinstance(answer.payload, HiddenUpdates)
    gone = absent(**stages)
    stayed = [row for row, name in enumerate(plain.clients) if name not in gone("share", 1) | gone("mask", 1)]
    weights = np.arange(1.0, 9.0)[[plain.clients.index(name) for name in answer.clients]]
    model = answer.payload.aggregate(task.parameters, weights / weights.sum())
    wanted = np.arange(1.0, 9.0)[stayed] / np.arange(1.0, 9.0)[stayed].sum()
    expected = plain.payload.select(stayed).combine(task.parameters, wanted)
    torch.testing.assert_close(model, expected, rtol=0, atol=2e-6)
    summed = answer.payload.summed
    assert summed is not None
    assert summed.clients == tuple(plain.clients[row] for row in stayed)
    told = [failure.client for failure in (*answer.failures, *summed.dropped)]
    assert sorted(told) == sorted(gone("share", 1) | gone("mask", 1))
    # 650 numbers in one ciphertext of CKKS.
    assert settings.get("kind") != "ckks" or max(summed.bytes_sent.values()) <= 140_000


def test_a_client_that_cannot_write_its_update_down_says_so_and_stays_away():
    _, plain, task = both()
    largest = (plain.payload.models - task.parameters).abs().amax(dim=1)  # type: ignore[attr-defined]
    answer, _, _ = both(AggregationSettings(bound=float(largest.max()) - 1e-6))
    assert [failure.client for failure in answer.failures] == [plain.clients[int(largest.argmax())]]
    assert "privacy.aggregation.bound" in answer.failures[0].reason


def test_a_client_whose_key_shares_cannot_be_read_is_left_out_and_the_others_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    honest = SecureClient.share

    def share(self: SecureClient, cohort: Any) -> dict[str, bytes]:
        shares = honest(self, cohort)
        return {name: bytes(len(text)) for name, text in shares.items()} if self.name == "client-002" else shares

    monkeypatch.setattr(SecureClient, "share", share)
    run(build(HIDDEN), out=tmp_path / "spoiled")
    there = History(tmp_path / "spoiled").clients
    left = there[there["failure"].notna()]
    assert set(left["client"]) == {"client-002"}
    assert all("sent key shares that client-000, " in reason for reason in left["failure"])
    # Keys and key shares of both tries are counted: eight clients in the first, seven in the second.
    once = 650 * 4 + 96 + 6 * 82 + 7 * 33
    assert set(there[there["failure"].isna()]["bytes"]) == {once + 96 + 7 * 82}


EVEN = [1 / 8] * 8


@pytest.mark.parametrize(
    ("settings", "stages", "weights", "said"),
    [
        # Of eight clients six must stay.
        *(({}, stages, EVEN, ("round 1 of f", "5 of 8", "it takes 6"))
          for stages in ({"share": "0 1 2"}, {"mask": "0 1 2"}, {"open": "0 1 2"}, {"share": "0", "mask": "3 4"})),
        # The first client drops out with its weight after all agreed to the weights.
        ({}, {"mask": "0"}, [0.4, 0.4, 0.05, 0.05, 0.05, 0.05, 0, 0], ("largest_weight", "client-001", 0.667)),
        ({}, {"mask": "0"}, [0.4, 0.3, 0.3, 0, 0, 0, 0, 0], ("2 of 7 clients have a weight", "stays hidden")),
        ({"kind": "ckks"}, {"mask": "0 1 2 3 4 5"}, EVEN, ("2 of 2 clients have a weight", "at least 3")),
    ],
)  # fmt: skip
def test_a_sum_that_too_few_stand_behind_is_not_opened(
    settings: dict[str, Any], stages: dict[str, str], weights: list[float], said: tuple[object, ...]
):
    answer, _, task = both(AggregationSettings.model_validate(settings), **stages)
    given = np.array(weights)[: len(answer.clients)]
    assert_refused(lambda: answer.payload.aggregate(task.parameters, given), *said)  # type: ignore[attr-defined]


def test_fresh_keys_change_no_bit_of_the_model_also_on_resume(tmp_path: Path):
    experiment = build(changed(HIDDEN, store={"checkpoint_every": 1}))
    run(experiment, out=tmp_path / "one")
    stopped_and_resumed(experiment, tmp_path / "two", after=1)
    assert torch.equal(models(tmp_path / "one")[NAME], models(tmp_path / "two")[NAME])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"weighing": {"criteria": ["DS", "MD"]}}, ("MD", "single models")),
        ({"weighing": {"criteria": ["VP"]}, "partition": SPARED}, ("VP", "single models", "privacy.aggregation")),
        ({"weighing": {"defence": {"rule": "median"}}}, ("median", "single updates")),
        ({"weighing": {"criteria": ["DS", "LD"], "adjust": {}}}, ("one more equation",)),
    ],
)
def test_what_cannot_be_combined_is_refused_before_any_data_is_read(sections: dict[str, Any], said: tuple[object, ...]):
    assert_refused(lambda: build({**HIDDEN, **sections}), *said)
    build({**HIDDEN, "beside": {"alone": {"trained_by": "server"}}, "partition": SPARED})  # a control without clients
