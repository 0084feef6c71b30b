"""What enters the server: honest messages survive unchanged, every kind of fault is refused with its reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.flower.flower_fakes import evaluate, task, train

from steelyard.clients.flower import questions, tasks
from steelyard.clients.flower.arrays import pack, unpack
from steelyard.clients.flower.arrays import read as read_array
from steelyard.clients.flower.forms import Refused
from steelyard.messages import Failure, LossState, Question, Task, Updates
from steelyard.update_payloads import DenseModels

CRITERIA = {"DS": lambda value: None if math.isfinite(value) and 0 <= value <= 1000 else f"criterion DS = {value}"}
TASK = task("c1", "c2")


def update(**changes: Any) -> RecordDict:
    """An honest answer of c1 and c2 with some fields of its form replaced."""
    records = tasks.write_updates(train(TASK))
    form = json.loads(records.config_records["form"]["json"]) | changes  # type: ignore[arg-type]
    return RecordDict({"form": ConfigRecord({"json": json.dumps(form)}), "arrays": records.array_records["arrays"]})


def with_models(models: np.ndarray, key: str = "models") -> RecordDict:
    records = tasks.write_updates(train(TASK))
    return RecordDict({"form": records.config_records["form"], "arrays": pack({key: models})})


def read(records: RecordDict) -> Updates:
    return tasks.read_updates(records, TASK, TASK.clients, tasks.Expected(CRITERIA))


def test_task_survives_the_wire():
    loss = LossState("cross-entropy", (10.0, 1 / 1.1), None, 0.1 + 0.2)
    sent = replace(TASK, loss=loss)
    got, header = tasks.read_task(tasks.write_task(sent, ["c2"], 12.5, tasks.pack_parameters(sent), "r1", "{}"))
    run, seconds = header.run, header.seconds
    assert header.experiment == "{}"
    assert (got.federation, got.seed, got.round, got.clients) == ("fed", 7, 1, ("c2",))
    assert got.loss == loss
    assert torch.equal(got.parameters, sent.parameters)
    assert (run, seconds) == ("r1", 12.5)


def test_update_survives_the_wire():
    got = read(tasks.write_updates(train(TASK)))
    assert got.clients == ("c1", "c2")
    assert got.samples.tolist() == [10, 20]
    assert got.criteria["DS"].tolist() == [10.0, 20.0]
    assert got.losses.tolist() == [0.125, 0.25]
    assert isinstance(got.payload, DenseModels)
    assert got.payload.models.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert got.failures == ()
    assert got.bytes_sent is not None
    assert (got.bytes_sent > 12).all()


def test_the_bytes_of_an_answer_are_shared_out_among_its_clients():
    records = tasks.write_updates(train(TASK))
    form = str(records.config_records["form"]["json"])
    # Two models of three numbers of four bytes, after a header of 128 bytes.
    assert len(records.array_records["arrays"]["models"].data) == 128 + 2 * 3 * 4
    got = read(records)
    assert got.bytes_sent is not None
    assert got.bytes_sent.tolist() == [(len(form) + 152) // 2] * 2


@settings(max_examples=50)
@given(
    numbers=st.lists(st.floats(-(2.0**19), 2.0**19, width=32), min_size=3, max_size=3),
    criterion=st.floats(0, 1000),
    samples=st.integers(1, 10**12),
)
def test_numbers_survive_exactly(numbers: list[float], criterion: float, samples: int):
    asked = replace(TASK, clients=("c1",))
    payload = DenseModels(torch.tensor([numbers], dtype=torch.float32))
    answer = Updates("fed", 1, ("c1",), np.asarray([samples]), {"FT": np.asarray([criterion])}, np.ones(1), payload)
    got = tasks.read_updates(tasks.write_updates(answer), asked, ["c1"], tasks.Expected({"FT": CRITERIA["DS"]}))
    assert got.samples[0] == samples
    assert got.criteria["FT"][0] == criterion
    assert torch.equal(got.payload.select([0]).models, payload.models)  # type: ignore[attr-defined]


def test_a_client_that_failed_on_its_node_is_named_with_its_reason():
    answer = train(replace(TASK, clients=("c2",)))
    answer = replace(answer, failures=(Failure("c1", "disk\x1b[31m full\n" + "x" * 500),))
    got = read(tasks.write_updates(answer))
    assert got.clients == ("c2",)
    assert got.failures[0].client == "c1"
    assert got.failures[0].reason.startswith("disk [31m full xxx")
    assert len(got.failures[0].reason) == 300


def test_a_client_that_its_node_forgot_is_named():
    got = read(tasks.write_updates(train(replace(TASK, clients=("c2",)))))
    assert got.failures == (Failure("c1", "its node answered without it"),)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 2}, "round: got 2; allowed: 1"),
        ({"federation": "other"}, "federation: got 'other'; allowed: 'fed'"),
        ({"protocol": 99}, "protocol: got 99; allowed: 5"),
        ({"clients": ["c1", "c1"]}, "clients: c1 answered twice; allowed: one answer each"),
        ({"clients": ["c1", "mallory"]}, "clients: got mallory; allowed: only those asked, c1, c2"),
        ({"samples": [1]}, "samples: 1 values; allowed: 2"),
        ({"samples": [1.5, 2]}, "samples.0: Input should be a valid integer"),
        ({"samples": [True, 2]}, "samples.0: Input should be a valid integer"),
        ({"losses": [0.1, 0.2, 0.3]}, "losses: 3 values; allowed: 2"),
        ({"criteria": {"DS": [1.0]}}, "DS: 1 values; allowed: 2"),
        ({"criteria": {}}, "criteria: got none; allowed: exactly DS"),
        ({"criteria": {"DS": [1, 2], "XX": [1, 2]}}, "criteria: got DS, XX; allowed: exactly DS"),
        ({"criteria": {"DS": ["1", 2]}}, "criteria.DS.0: Input should be a valid number"),
        ({"criteria": {"DS": [1, 2], "samples": [1, 2]}}, "criteria: got DS, samples; allowed: exactly DS"),
        ({"criteria": {"DS": [1, 2], "losses": [1, 2]}}, "criteria: got DS, losses; allowed: exactly DS"),
        ({"criteria": {"DS": [1, 2], "count": [1, 2]}}, "criteria: got DS, count; allowed: exactly DS"),
        ({"criteria": {"DS": [1, 2], "samples": [1, 2]}, "samples": [1]}, "samples: 1 values; allowed: 2"),
        ({"payload": "pickle"}, "payload: got 'pickle'; allowed: dense"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"clients": None}, "clients: Input should be a valid array"),
        ({"failures": [{"client": "c1", "reason": "?"}]}, "clients: c1 answered twice"),
    ],
)
def test_a_wrong_form_is_refused(changes: dict[str, Any], reason: str):
    with pytest.raises(Refused) as caught:
        read(update(**changes))
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "client", "reason"),
    [
        ({"criteria": {"DS": [10.0, 1001.0]}}, "c2", "criterion DS = 1001.0"),
        ({"criteria": {"DS": [-0.5, 20.0]}}, "c1", "criterion DS = -0.5"),
        ({"criteria": {"DS": [float("nan"), 20.0]}}, "c1", "criterion DS = nan"),
        ({"criteria": {"DS": [10.0, float("inf")]}}, "c2", "criterion DS = inf"),
        ({"criteria": {"DS": [10**400, 20.0]}}, "c1", "criterion DS = inf"),
        ({"samples": [-1, 20]}, "c1", "samples = -1; allowed: 1 to"),
        ({"samples": [10, 10**30]}, "c2", "samples = 1000000000000000000000000000000; allowed: 1 to"),
        ({"losses": [float("nan"), 1.0]}, "c1", "loss = nan; allowed: a number of at most 1e+15"),
    ],
)
def test_a_wrong_number_leaves_out_only_its_client(changes: dict[str, Any], client: str, reason: str):
    got = read(update(**changes))
    assert got.clients == tuple({"c1", "c2"} - {client})
    assert [failure.client for failure in got.failures] == [client]
    assert got.failures[0].reason.startswith(reason)


def test_a_client_that_trained_on_nothing_is_left_out():
    got = read(update(samples=[0, 5], criteria={"DS": [0.0, 5.0]}, losses=[float("nan"), 1.0]))
    assert got.clients == ("c2",)
    assert got.failures == (Failure("c1", "samples = 0; allowed: 1 to 1000000000000"),)


def test_a_model_with_nan_or_infinity_leaves_out_only_its_client():
    for poison in (np.nan, np.inf, -np.inf):
        got = read(with_models(np.asarray([[0, 1, 2], [0, poison, 2]], dtype=np.float32)))
        assert got.clients == ("c1",)
        assert got.failures == (Failure("c2", "update: holds NaN or infinite numbers"),)


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        (np.zeros((2, 4), np.float32), "array models: shape (2, 4); allowed: (2, 3)"),
        (np.zeros((1, 3), np.float32), "array models: shape (1, 3); allowed: (2, 3)"),
        (np.zeros(6, np.float32), "array models: shape (6,); allowed: (2, 3)"),
        (np.zeros((2, 3), np.float64), "array models: dtype float64; allowed: float32"),
        (np.zeros((2, 3), np.int32), "array models: dtype int32; allowed: float32"),
        (np.zeros((2, 3), ">f4"), "array models: dtype >f4; allowed: float32"),
        (np.zeros((2, 3), "S8"), "array models: dtype |S8; allowed: float32"),
        (np.zeros((0,), np.float32), "array models: shape (0,); allowed: (2, 3)"),
    ],
)
def test_a_wrong_array_is_refused(models: np.ndarray, reason: str):
    with pytest.raises(Refused) as caught:
        read(with_models(models))
    assert str(caught.value) == reason


def test_a_wrong_key_is_refused():
    with pytest.raises(Refused, match="arrays: got weights; allowed: exactly models"):
        read(with_models(np.zeros((2, 3), np.float32), key="weights"))


def test_an_absurd_size_is_refused():
    with pytest.raises(Refused, match=r"size: 4000\d+ bytes; allowed: at most \d+"):
        read(with_models(np.zeros((1000, 1000), np.float32)))
    with pytest.raises(Refused, match="size: "):
        read(update(payload="x" * 200_000))


def test_records_of_another_make_are_refused():
    honest = tasks.write_updates(train(TASK))
    form, arrays = honest.config_records["form"], honest.array_records["arrays"]
    for records in (
        RecordDict(),
        RecordDict({"form": form}),
        RecordDict({"form": form, "arrays": arrays, "more": MetricRecord({"x": 1})}),
        RecordDict({"form": MetricRecord({"json": 1}), "arrays": arrays}),
        RecordDict({"form": ConfigRecord({"json": "{}", "y": 1}), "arrays": arrays}),
        RecordDict({"form": form, "arrays": ConfigRecord({"models": 1})}),
    ):
        with pytest.raises(Refused, match="records: "):
            read(records)
    for text in ("", "{", "[]", "null", "{}"):
        with pytest.raises(Refused):
            read(RecordDict({"form": ConfigRecord({"json": text}), "arrays": arrays}))
    with pytest.raises(Refused, match="form: got bytes"):
        read(RecordDict({"form": ConfigRecord({"json": b"{}"}), "arrays": arrays}))


def bomb(header: str) -> Array:
    """An array whose bytes begin with this header of NumPy's file format."""
    text = header.encode() + b"\n"
    return Array("float32", (2, 3), "numpy.ndarray", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (bomb("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"), "0 bytes of data; allowed: 24"),
        (bomb("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 3), }"), "shape"),
        (bomb("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }"), "holds Python objects"),
        (bomb("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }"), "Fortran order"),
        (bomb("__import__('os').system('true')"), "not an array file"),
        (bomb("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3), }"), "shape"),
        (bomb("{'descr': '<q9', 'fortran_order': False, 'shape': (2, 3), }"), "NumPy knows no type '<q9'"),
        (bomb("{'descr': '<f4', 'fortran_order': False, 'shape': (2 3), }"), "not an array file"),
        (Array("float32", (2, 3), "numpy.ndarray", b""), "not an array file"),
        (Array("float32", (2, 3), "numpy.ndarray", b"\x80\x04K\x01."), "not an array file"),
        (Array("float32", (2, 3), "pickle", b"\x80\x04K\x01."), "serialised as 'pickle'"),
    ],
)
def test_a_header_that_lies_costs_nothing(array: Array, reason: str):
    with pytest.raises(Refused) as caught:
        unpack(array, "models", "<f4", (2, 3))
    assert reason in str(caught.value)


SHAPES = st.lists(st.integers(0, 3), max_size=5)


@given(SHAPES, st.sampled_from(["<f4", ">f8", "|b1", "|u1", "<i8", "<f2", "<c16"]), st.sampled_from("CF"))
def test_an_array_of_numbers_is_read_as_numpy_reads_it(shape: list[int], dtype: str, order: Any):
    written = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype=dtype, order=order)
    found = read_array(Array(written), "any")
    assert (found.dtype, found.shape) == (written.dtype, written.shape)
    np.testing.assert_array_equal(found, Array(written).numpy())


def test_a_header_is_read_without_ast(monkeypatch: pytest.MonkeyPatch):
    """Where two threads use it, Python 3.11.7 raises a SystemError now and then, and a client's answer was lost."""

    def fail(*_: object, **__: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    sent = Array(np.ones((2, 3), dtype=np.float32))
    monkeypatch.setattr("ast.parse", fail)
    monkeypatch.setattr("ast.literal_eval", fail)
    assert unpack(sent, "models", "<f4", (2, 3)).tolist() == [[1.0] * 3] * 2


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_bytes_of_any_kind_never_break_the_reader(data: bytes):
    for raw in (data, b"\x93NUMPY\x01\x00" + data, b"\x93NUMPY\x02\x00" + data, b"\x93NUMPY\x03\x00" + data):
        with pytest.raises(Refused):
            unpack(Array("float32", (2, 3), "numpy.ndarray", raw), "models", "<f4", (2, 3))


@settings(max_examples=200)
@given(st.text(max_size=100))
def test_text_of_any_kind_never_breaks_the_reader(text: str):
    with pytest.raises(Refused):
        read(RecordDict({"form": ConfigRecord({"json": text}), "arrays": ArrayRecord()}))


QUESTION = Question("fed", 7, 3, torch.zeros(2, 3), detailed=True)


def test_question_and_evaluation_survive_the_wire():
    got, header = questions.read_question(questions.write_question(QUESTION, 5.0, "r1"))
    run, seconds = header.run, header.seconds
    assert (got.federation, got.seed, got.round, got.detailed, run, seconds) == ("fed", 7, 3, True, "r1", 5.0)
    assert got.models.shape == (2, 3)
    answer = evaluate(QUESTION, ("c1", "c2"))
    answer = replace(answer, metrics={"ndcg": np.asarray([0.1, 0.7])})
    back = questions.read_evaluations(questions.write_evaluations(answer), QUESTION, ["c1", "c2", "c3"], (0, 1))
    assert back.clients == ("c1", "c2")
    assert back.failures == (Failure("c3", "its node gave no test of it (no test samples?)"),)
    assert back.scores.tolist() == [[0.01, 0.02], [0.02, 0.03]]
    assert back.metrics["ndcg"].tolist() == [0.1, 0.7]
    assert back.right is not None
    assert back.right.tolist() == [True, True, False, True]


def evaluation(**changes: Any) -> RecordDict:
    records = questions.write_evaluations(evaluate(QUESTION, ("c1", "c2")))
    form = json.loads(records.config_records["form"]["json"]) | changes  # type: ignore[arg-type]
    return RecordDict({"form": ConfigRecord({"json": json.dumps(form)}), "arrays": records.array_records["arrays"]})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": [[0.1, 0.2]]}, "scores: not a table of 2 candidates by 2 clients"),
        ({"losses": [[0.1], [0.2]]}, "losses: not a table"),
        ({"round": 4}, "round: got 4; allowed: 3"),
        ({"samples": [2, 3]}, "array right: shape (4,); allowed: (5,)"),
        ({"metrics": {"ndcg": [1.0]}}, "ndcg: 1 values; allowed: 2"),
        ({"metrics": {"samples": [1.0, 1.0]}}, "metrics: got samples, a name of the record's own"),
        ({"metrics": {"score": [1.0, 1.0], "ndcg": [1, 1]}}, "metrics: got score, a name of the record's own"),
        ({"metrics": {"samples": [2.0, 2.0]}, "samples": [2]}, "samples: 1 values; allowed: 2"),
    ],
)
def test_a_wrong_evaluation_is_refused(changes: dict[str, Any], reason: str):
    with pytest.raises(Refused) as caught:
        questions.read_evaluations(evaluation(**changes), QUESTION, ["c1", "c2"], (0, 1))
    assert str(caught.value).startswith(reason)


def test_a_metric_may_have_any_other_name():
    got = questions.read_evaluations(evaluation(metrics={"count": [3.0, 4.0]}), QUESTION, ["c1", "c2"], (0, 1))
    assert got.metrics["count"].tolist() == [3.0, 4.0]


def test_a_score_out_of_range_leaves_out_only_its_client():
    got = questions.read_evaluations(evaluation(scores=[[0.1, 1.1], [0.1, 0.2]]), QUESTION, ["c1", "c2"], (0, 1))
    assert got.clients == ("c1",)
    assert got.right is not None
    assert got.right.tolist() == [True, True]
    assert got.failures == (Failure("c2", "score = 1.1; allowed: 0 to 1"),)
    free = questions.read_evaluations(evaluation(scores=[[-3.0, 7.5], [0.1, 0.2]]), QUESTION, ["c1", "c2"])
    assert free.clients == ("c1", "c2")
    unscored = questions.read_evaluations(evaluation(scores=[[math.nan, 1], [0.1, 0.2]]), QUESTION, ["c1", "c2"])
    assert unscored.clients == ("c2",)


def test_empty_task_is_possible():
    empty = Task("fed", 7, 1, (), torch.zeros(3))
    got, _ = tasks.read_task(tasks.write_task(empty, [], 1.0, tasks.pack_parameters(empty)))
    assert got.clients == ()
