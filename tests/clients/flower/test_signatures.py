"""A node signs what its clients send; the server takes nothing whose signature does not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict
from tests.runs.signed_runs import a_key

from steelyard.algorithms.settings import algorithm_table
from steelyard.clients.flower.signatures import Signer
from steelyard.clients.flower.tasks import Expected, pack_parameters, read_task, read_updates, write_task, write_updates
from steelyard.messages import DenseModels, Task, Updates
from steelyard.signing import SigningKey, digest_of_task, signed_updates

RUN = "12"
TASK = Task("DS", 3, 4, ("a", "b"), torch.tensor([1.0, 2.0, 3.0]))
MODELS = torch.tensor([[1.0, 2.5, 3.0], [0.5, 2.0, 3.5]])


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return a_key(tmp_path_factory.mktemp("key") / "node")


def answered(key: SigningKey, run: str = RUN, task: Task = TASK) -> RecordDict:
    """The answer of an honest node, which knows the task as it was sent to it."""
    received, header = read_task(write_task(task, task.clients, 9.0, pack_parameters(task), run))
    updates = Updates(
        *("DS", 4, ("a", "b"), np.array([3, 1]), {}, np.array([0.5, 0.25]), DenseModels(MODELS.clone())),
    )
    signed = signed_updates(key, header.run, received, digest_of_task(received, header.algorithm), updates)
    return write_updates(replace(updates, signed=signed))


def read(records: RecordDict, key: SigningKey, task: Task = TASK) -> Updates:
    signer = Signer(RUN, digest_of_task(task, algorithm_table(task.algorithm)), key.line)
    return read_updates(records, task, task.clients, Expected(), signer=signer)


def changed(records: RecordDict, **fields: Any) -> RecordDict:
    form = json.loads(str(records["form"]["json"]))  # type: ignore[index]
    form["signed"][0] |= fields
    return RecordDict({"form": ConfigRecord({"json": json.dumps(form)}), "arrays": records["arrays"]})


def test_an_honest_answer_is_taken_with_its_signatures(key: SigningKey) -> None:
    found = read(answered(key), key)
    assert found.clients == ("a", "b")
    assert found.signed.keys() == {"a", "b"}
    assert {one.key for one in found.signed.values()} == {key.line}
    # A round that is repeated gives the same digests and salts, so that a resumed run has the same head.
    again = read(answered(key), key)
    assert [(one.digest, one.salt) for one in again.signed.values()] == [
        (one.digest, one.salt) for one in found.signed.values()
    ]
    assert found.signed["a"].salt != found.signed["b"].salt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"digest": "00" * 32}, "its digest is not that of the update that came"),
        ({"salt": "00" * 16}, "its digest is not that of the update that came"),
        ({"signature": "00"}, "does not hold by the key that its node has registered"),
        ({"signature": "zz"}, "not hexadecimal digits"),
        ({"digest": "00"}, "its digest has 1 bytes and its salt 16"),
    ],
)
def test_a_signature_that_does_not_hold_leaves_its_client_out(key: SigningKey, fields: Any, words: str) -> None:
    found = read(changed(answered(key), **fields), key)
    assert found.clients == ("b",)
    assert [(failure.client, failure.reason) for failure in found.failures] == [("a", f"signature: {words}")]
    assert found.select([0], []).signed.keys() == {"b"}


def test_a_signature_of_another_key_run_or_task_does_not_hold(key: SigningKey, tmp_path: Path) -> None:
    other = a_key(tmp_path / "other")
    moved = replace(TASK, parameters=TASK.parameters + 1)
    for records, task in ((answered(other), TASK), (answered(key, "13"), TASK), (answered(key), moved)):
        found = read(records, key, task)
        assert found.clients == ()
        assert {failure.reason for failure in found.failures} == {
            "signature: does not hold by the key that its node has registered"
        }


def test_without_a_register_signatures_are_not_looked_at(key: SigningKey) -> None:
    found = read_updates(changed(answered(key), signature="00"), TASK, TASK.clients, Expected())
    assert (found.clients, found.signed) == (("a", "b"), {})
