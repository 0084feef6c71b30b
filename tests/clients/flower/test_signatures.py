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

from flwr.app import RecordDict
from tests.clients.flower.flower_fakes import changed_answer
from tests.runs.signed_runs import a_key

from steelyard.algorithms.settings import algorithm_table
from steelyard.clients.flower.tasks import (
    Expected,
    Signer,
    pack_parameters,
    read_task,
    read_updates,
    write_task,
    write_updates,
)
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Task, Updates
from steelyard.proof.signing import SigningKey, digest_of_task
from steelyard.proof.statements import stated

RUN = "12"
TASK = Task("DS", 3, 4, ("a", "b"), torch.tensor([1.0, 2.0, 3.0]))
MODELS = torch.tensor([[1.0, 2.5, 3.0], [0.5, 2.0, 3.5]])


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return a_key(tmp_path_factory.mktemp("key") / "node")


def answered(key: SigningKey, run: str = RUN, clients: tuple[str, ...] = TASK.clients) -> RecordDict:
    """The answer of an honest node, which knows the task as it was sent to it."""
    received, header = read_task(write_task(TASK, clients, 9.0, pack_parameters(TASK), run))
    count = len(clients)
    updates = Updates(
        *("DS", 4, clients, np.array([3, 1])[:count], {}, np.ones(count), DenseModels(MODELS[:count].clone())),
    )
    signed = stated(key, header.run, received, digest_of_task(received, header.algorithm), updates)
    assert signed is not None
    return write_updates(replace(updates, signed=(signed,)))


def read(records: RecordDict, key: SigningKey, task: Task = TASK) -> Updates:
    signer = Signer(RUN, digest_of_task(task, algorithm_table(task.algorithm)), key.line)
    return read_updates(records, task, task.clients, Expected(), signer=signer)


def changed(records: RecordDict, **fields: Any) -> RecordDict:
    signed = json.loads(str(records.config_records["form"]["json"]))["signed"]
    new = {name: signed[name] | value if isinstance(value, dict) else value for name, value in fields.items()}
    return changed_answer(records, signed=signed | new)


def test_an_honest_answer_is_taken_with_its_signatures(key: SigningKey) -> None:
    found = read(answered(key), key)
    assert found.clients == ("a", "b")
    (signed,) = found.signed
    assert (signed.key, signed.digests.keys(), signed.salts.keys()) == (key.line, {"a", "b"}, {"a", "b"})
    # A round that is repeated gives the same digests and salts, so that a resumed run has the same head.
    (again,) = read(answered(key), key).signed
    assert (again.digests, again.salts) == (signed.digests, signed.salts)
    assert signed.salts["a"] != signed.salts["b"]


def test_answers_have_one_size_whatever_the_length_of_their_signatures(key: SigningKey) -> None:
    """The size of an answer is recorded, and a run that was resumed must have the same record."""
    read_again = [read(answered(key), key) for _ in range(24)]
    assert len({len(found.signed[0].signature) for found in read_again}) > 1
    assert len({tuple(found.bytes_sent) for found in read_again if found.bytes_sent is not None}) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"digests": {"a": "00" * 32}}, "does not hold by the key that its node has registered"),
        ({"before": "00" * 32}, "does not hold by the key that its node has registered"),
        ({"signature": "00"}, "does not hold by the key that its node has registered"),
        ({"signature": "zz"}, "not hexadecimal digits"),
        ({"digests": {"a": "00"}}, "its digests have [1, 32] bytes and its salts [16]"),
        ({"salts": {"a": "00"}}, "its digests have [32] bytes and its salts [1, 16]"),
        ({"digests": {"c": "00" * 32}}, "names a client that the answer does not"),
    ],
)
def test_a_signature_that_does_not_hold_leaves_all_of_its_node_out(key: SigningKey, fields: Any, words: str) -> None:
    found = read(changed(answered(key), **fields), key)
    assert (found.clients, found.signed) == ((), ())
    assert {failure.reason for failure in found.failures} == {f"signature: {words}"}


def test_an_update_that_is_not_the_one_that_was_signed_leaves_its_client_out(key: SigningKey) -> None:
    found = read(changed(answered(key), salts={"a": "00" * 16}), key)
    assert found.clients == ("b",)
    assert [(failure.client, failure.reason) for failure in found.failures] == [
        ("a", "signature: its digest is not that of the update that came")
    ]
    assert found.signed[0].digests.keys() == {"a", "b"}, "what was signed stays whole, to be checked later"


def test_a_client_that_the_signature_does_not_name_is_left_out(key: SigningKey) -> None:
    signed = json.loads(str(answered(key, clients=("a",)).config_records["form"]["json"]))["signed"]
    found = read(changed_answer(answered(key), signed=signed), key)
    assert found.clients == ("a",)
    assert [failure.reason for failure in found.failures] == ["signature: does not name it"]


def test_a_signature_of_another_key_run_or_task_does_not_hold(key: SigningKey, tmp_path: Path) -> None:
    other = a_key(tmp_path / "other")
    moved = replace(TASK, parameters=TASK.parameters + 1)
    for records, task in ((answered(other), TASK), (answered(key, "13"), TASK), (answered(key), moved)):
        found = read(records, key, task)
        assert found.clients == ()
        assert {failure.reason for failure in found.failures} == {
            "signature: does not hold by the key that its node has registered"
        }
