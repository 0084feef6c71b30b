"""What enters the server: honest messages survive unchanged; every fault is refused with its reason, and alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.clients.flower.flower_fakes import (
    assert_taken_back,
    changed_answer,
    crowd,
    evaluate,
    honest,
    reasons,
    task,
    train,
)

from steelyard.algorithms.fednova import FedNova
from steelyard.algorithms.scaffold import CHANGE, CONTROL, Scaffold
from steelyard.base.tallies import Leading, Tally, tallied
from steelyard.clients.flower import tasks
from steelyard.clients.flower.grid import CohortRows
from steelyard.clients.flower.wire import Refused, most_counted, read_array, unpack
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import MOST_SAMPLES, Evaluations, Failure, LossState, Question, Task, Updates

CRITERIA = {"DS": lambda value: None if math.isfinite(value) and 0 <= value <= 1000 else f"criterion DS = {value}"}
PLAIN = tasks.Expected(CRITERIA)
EXPECTED = tasks.Expected(CRITERIA, further=frozenset({"steps", "first_losses", "label_counts"}), classes=2)
TASK = replace(task("c1", "c2"), algorithm=Scaffold(), vectors={CONTROL: torch.ones(3)})
VECTORS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
VECTOR = f"vector/{CHANGE}"


def answered(asked: Task = TASK) -> Updates:
    """An honest answer with all that can be said; of client 1 the first row, of client 2 the second."""
    rows = [int(client[1:]) - 1 for client in asked.clients]
    return replace(
        train(asked),
        steps=np.array([3, 5])[rows],
        first_losses=np.array([0.5, 0.25])[rows],
        label_counts=np.array([[10, 0], [12, 8]])[rows],
        vectors={CHANGE: VECTORS[rows]},
    )


def models_of(updates: Updates) -> list[list[float]]:
    assert isinstance(updates.payload, DenseModels)
    return updates.payload.models.tolist()


def read(records: RecordDict, asked: Task = TASK) -> Updates:
    return tasks.read_updates(records, asked, asked.clients, EXPECTED)


def tampered(arrays: dict[str, NDArray[Any] | None] | None = None, **form: Any) -> RecordDict:
    return changed_answer(tasks.write_updates(answered()), arrays, **form)


class TestUpdates:
    """Tasks and their answers."""

    def test_a_task_survives_the_wire(self) -> None:
        sent = replace(TASK, loss=LossState("cross-entropy", (10.0, 1 / 1.1), None, 0.1 + 0.2))
        got, header = tasks.read_task(tasks.write_task(sent, ["c2"], 12.5, tasks.pack_parameters(sent), "r1", "{}"))
        said = (
            got.federation,
            got.seed,
            got.round,
            got.clients,
            header.run,
            header.seconds,
            header.experiment,
            got.loss,
        )
        assert said == ("fed", 7, 1, ("c2",), "r1", 12.5, "{}", sent.loss)
        assert torch.equal(got.parameters, sent.parameters)
        assert header.algorithm == {"name": "scaffold", "server_rate": 1.0}
        assert got.algorithm.name == "fedavg"  # The node makes its own, of its experiment.
        assert {name: vector.tolist() for name, vector in got.vectors.items()} == {CONTROL: [1.0, 1.0, 1.0]}
        empty = replace(TASK, clients=())
        assert tasks.read_task(tasks.write_task(empty, [], 1.0, tasks.pack_parameters(empty)))[0].clients == ()

    def test_all_that_clients_say_survives_the_wire(self) -> None:
        got = read(tasks.write_updates(answered()))
        assert (got.clients, got.failures) == (("c1", "c2"), ())
        assert (got.samples.tolist(), got.criteria["DS"].tolist()) == ([10, 20], [10.0, 20.0])
        assert got.losses.tolist() == [0.125, 0.25]
        assert models_of(got) == [[1, 2, 3], [2, 3, 4]]
        assert torch.equal(got.vectors[CHANGE], VECTORS)
        said = (got.steps, got.first_losses, got.label_counts)
        assert [None if one is None else one.tolist() for one in said] == [[3, 5], [0.5, 0.25], [[10, 0], [12, 8]]]

    def test_a_client_that_failed_or_was_forgotten_by_its_node_is_named_with_its_reason(self) -> None:
        alone = answered(replace(TASK, clients=("c2",)))
        assert read(tasks.write_updates(alone)).failures == (Failure("c1", "its node answered without it"),)
        got = read(tasks.write_updates(replace(alone, failures=(Failure("c1", "disk\x1b[31m full\n" + "x" * 500),))))
        assert got.clients == ("c2",)
        assert reasons(got.failures)["c1"].startswith("disk [31m full xxx")
        assert len(got.failures[0].reason) == 300

    def test_what_was_not_asked_for_is_not_used_and_what_an_algorithm_needs_is_asked_for(self) -> None:
        asked, bare = task("c1", "c2"), replace(answered(), vectors={}, label_counts=None)
        got = tasks.read_updates(tasks.write_updates(bare), asked, asked.clients, PLAIN)
        assert (got.steps, got.first_losses, got.label_counts, got.vectors) == (None, None, None, {})
        more = tampered({VECTOR: None})
        assert_taken_back(lambda: tasks.read_updates(more, asked, asked.clients, PLAIN), "arrays", "label_counts")
        counting = replace(task("c1"), algorithm=FedNova())
        silent = tasks.write_updates(train(counting))
        assert_taken_back(lambda: tasks.read_updates(silent, counting, ["c1"], PLAIN), "steps: missing")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"round": 2}, "round: got 2"),
        ({"federation": "other"}, "federation: got 'other'"),
        ({"protocol": 99}, "protocol: got 99"),
        ({"clients": ["c1", "c1"]}, "clients: c1 answered twice"),
        ({"clients": ["c1", "mallory"]}, "clients: got mallory"),
        ({"samples": [1]}, "samples: 1 values; allowed: 2"),
        ({"samples": [1.5, 2]}, "samples.0: "),
        ({"criteria": {}}, "criteria: got none; allowed: exactly DS"),
        ({"criteria": {"DS": ["1", 2]}}, "criteria.DS.0: "),
        ({"payload": "pickle"}, "payload: got 'pickle'; allowed: dense"),
        ({"payload": "x" * 200_000}, "size: "),
        ({"surprise": 1}, "surprise: "),
    ],
)
def test_a_wrong_form_is_refused(fields: dict[str, Any], reason: str) -> None:
    assert_taken_back(lambda: read(tampered(**fields)), reason)


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("models", np.zeros((2, 4), "f4"), "array models: shape (2, 4); allowed: (2, 3)"),
        ("models", np.zeros((2, 3), "f8"), "array models: dtype float64; allowed: float32"),
        ("models", np.zeros((1000, 1000), "f4"), "size: 4000"),
        ("weights", np.zeros((2, 3), "f4"), "weights"),
        (VECTOR, None, "allowed: exactly label_counts, models, vector/control_change"),
        (VECTOR, np.zeros((1, 3), "f4"), "array vector/control_change: shape (1, 3)"),
        ("label_counts", np.zeros((2, 3), "i8"), "array label_counts: shape (2, 3); allowed: (2, 2)"),
    ],
)
def test_a_wrong_array_is_refused(name: str, array: NDArray[Any] | None, reason: str) -> None:
    assert_taken_back(lambda: read(tampered({name: array})), reason)


def with_number(value: float) -> NDArray[Any]:
    """Client 2's row holds one number that cannot be."""
    found = np.zeros((2, 3), "f4")
    found[1, 1] = value
    return found


@pytest.mark.parametrize(
    ("arrays", "form", "reason"),
    [
        ({}, {"criteria": {"DS": [10.0, 1001.0]}}, "criterion DS = 1001.0"),
        ({}, {"criteria": {"DS": [10.0, float("nan")]}}, "criterion DS = nan"),
        ({}, {"criteria": {"DS": [10.0, 21.0]}}, "criterion DS = 21, but samples = 20"),
        ({}, {"steps": [3, 0]}, "steps = 0; allowed: 1 to 999999999999"),
        ({}, {"first_losses": [1.0, float("nan")]}, "first loss = nan"),
        ({"models": with_number(-np.inf)}, {}, "update: holds NaN or infinite"),
        # Finite, though their sum is not in float32.
        ({"models": np.array([[0, 1, 2], [3e38] * 3], "f4")}, {}, "update: farther than 1e+06 times the model"),
        ({VECTOR: with_number(np.nan)}, {}, f"vector {CHANGE} = "),
    ],
)
def test_an_impossible_number_leaves_out_only_its_client(
    arrays: dict[str, Any], form: dict[str, Any], reason: str
) -> None:
    got = read(tampered(arrays, **form))
    assert (got.clients, got.vectors[CHANGE].shape) == (("c1",), (1, 3))
    assert list(reasons(got.failures)) == ["c2"]
    assert reasons(got.failures)["c2"].startswith(reason)


def test_a_large_but_honest_step_is_no_explosion() -> None:
    assert read(tampered({"models": np.array([[0, 1, 2], [9e5, 0, -9e5]], "f4")})).clients == ("c1", "c2")


def test_records_of_another_make_are_refused() -> None:
    whole = tampered()
    form, arrays = whole.config_records["form"], whole.array_records["arrays"]
    for records in (
        RecordDict({"form": form}),
        RecordDict({"form": form, "arrays": arrays, "more": MetricRecord({"x": 1})}),
        RecordDict({"form": ConfigRecord({"json": "{}", "y": 1}), "arrays": arrays}),
    ):
        assert_taken_back(lambda records=records: read(records), "records: ")
    as_bytes = RecordDict({"form": ConfigRecord({"json": b"{}"}), "arrays": arrays})
    assert_taken_back(lambda: read(as_bytes), "form: got bytes")


class TestArrays:
    """Bytes that claim to be arrays."""

    @pytest.mark.parametrize(
        ("header", "reason"),
        [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", "0 bytes of data; allowed: 24"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 3), }", "shape"),
            ("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }", "holds Python objects"),
            ("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", "Fortran order"),
            ("{'descr': '<q9', 'fortran_order': False, 'shape': (2, 3), }", "'<q9'"),
            ("__import__('os').system('true')", "not an array file"),
        ],
    )
    def test_a_header_that_lies_costs_nothing(self, header: str, reason: str) -> None:
        text = header.encode() + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        array = Array("float32", (2, 3), "numpy.ndarray", data)
        assert_taken_back(lambda: unpack(array, "models", "<f4", (2, 3)), reason)
        pickled = Array("float32", (2, 3), "pickle", b"\x80\x04K\x01.")
        assert_taken_back(lambda: unpack(pickled, "models", "<f4", (2, 3)), "serialised as 'pickle'")

    @given(
        st.lists(st.integers(0, 3), max_size=5),
        st.sampled_from(["<f4", ">f8", "|b1", "|u1", "<i8", "<f2", "<c16"]),
        st.sampled_from("CF"),
    )
    def test_an_array_of_numbers_is_read_as_numpy_reads_it(self, shape: list[int], dtype: str, order: Any) -> None:
        written = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype=dtype, order=order)
        found = read_array(Array(written), "any")
        assert (found.dtype, found.shape) == (written.dtype, written.shape)
        np.testing.assert_array_equal(found, Array(written).numpy())

    def test_a_header_is_read_without_ast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In two threads at once Python 3.11.7 fails to parse now and then (gh-106905): a client's answer was lost."""
        sent = Array(np.ones((2, 3), dtype=np.float32))
        for name in ("parse", "literal_eval"):
            monkeypatch.delattr(f"ast.{name}")
        assert unpack(sent, "models", "<f4", (2, 3)).tolist() == [[1.0] * 3] * 2

    @settings(max_examples=200)
    @given(st.binary(max_size=200))
    def test_bytes_of_any_kind_never_break_the_reader(self, data: bytes) -> None:
        for raw in (data, b"\x93NUMPY\x01\x00" + data, b"\x93NUMPY\x02\x00" + data, b"\x93NUMPY\x03\x00" + data):
            with pytest.raises(Refused):
                unpack(Array("float32", (2, 3), "numpy.ndarray", raw), "models", "<f4", (2, 3))


QUESTION = Question("fed", 7, 3, torch.zeros(2, 3), detailed=True)


def read_evaluation(bounds: tuple[float, float] | None = (0, 1), **changes: Any) -> Evaluations:
    records = tasks.write_evaluations(evaluate(QUESTION, ("c1", "c2")))
    return tasks.read_evaluations(changed_answer(records, **changes), QUESTION, ["c1", "c2"], bounds)


class TestEvaluations:
    """Questions and their answers."""

    def test_question_and_evaluation_survive_the_wire(self) -> None:
        got, header = tasks.read_question(tasks.write_question(QUESTION, 5.0, "r1"))
        said = (got.federation, got.seed, got.round, got.detailed, got.models.shape, header.run, header.seconds)
        assert said == ("fed", 7, 3, True, (2, 3), "r1", 5.0)
        answer = replace(evaluate(QUESTION, ("c1", "c2")), metrics={"ndcg": np.asarray([0.1, 0.7])})
        back = tasks.read_evaluations(tasks.write_evaluations(answer), QUESTION, ["c1", "c2", "c3"], (0, 1))
        assert back.clients == ("c1", "c2")
        assert list(reasons(back.failures)) == ["c3"]
        assert back.scores.tolist() == [[0.01, 0.02], [0.02, 0.03]]
        assert back.metrics["ndcg"].tolist() == [0.1, 0.7]
        assert back.right is not None
        assert back.right.tolist() == [True, True, False, True]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"scores": [[0.1, 0.2]]}, "scores: 1 rows; allowed: 2, one per candidate"),
            ({"round": 4}, "round: got 4; allowed: 3"),
            ({"samples": [2, 3]}, "array right: shape (4,); allowed: (5,)"),
            ({"losses": [[0.1, 0.2], [0.1]]}, "losses: 1 values; allowed: 2"),
            ({"metrics": {"ndcg": [1.0]}}, "ndcg: 1 values"),
            ({"metrics": {"samples": [1.0, 1.0]}}, "metrics: got samples, a name of the record's own"),
            ({"metrics": {"a\x1b[2Kb": [1.0, 1.0]}}, "metrics: got 1, such as "),
            ({"metrics": {f"m{number}": [1.0] * 2 for number in range(101)}}, "allowed: at most 100"),
        ],
    )
    def test_a_wrong_evaluation_is_refused(self, changes: dict[str, Any], reason: str) -> None:
        assert_taken_back(lambda: read_evaluation(**changes), reason)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"scores": [[0.1, 1.1], [0.1, 0.2]]}, "score = 1.1; allowed: 0 to 1"),
            ({"losses": [[1.0, float("inf")], [1.0, 1.0]]}, "loss = inf"),
            ({"samples": [2, 0], "arrays": {"right": np.array([True, True])}}, "samples = 0; allowed: 1 to"),
        ],
    )
    def test_an_impossible_number_leaves_out_only_its_client(self, changes: dict[str, Any], reason: str) -> None:
        got = read_evaluation(**changes)
        assert (got.clients, list(reasons(got.failures))) == (("c1",), ["c2"])
        assert reasons(got.failures)["c2"].startswith(reason)
        assert got.right is not None
        assert got.right.tolist() == [True, True]

    def test_scores_without_bounds_may_be_any_number(self) -> None:
        assert read_evaluation(None, scores=[[-3.0, 7.5], [0.1, 0.2]]).clients == ("c1", "c2")
        assert read_evaluation(None, scores=[[math.nan, 1], [0.1, 0.2]]).clients == ("c2",)


LED = replace(QUESTION, models=QUESTION.models[:1], detailed=False, measure=Leading("roc_auc", 0.25))


def summed(rows: int = 2, classes: int = 2) -> Any:
    """A test with the sums of so many rows, half of each class, rightly told apart."""

    def test(question: Question, clients: tuple[str, ...]) -> Evaluations:
        labels = np.arange(rows) % 2
        outputs = np.eye(classes)[labels]
        cells = tallied(outputs, labels, np.zeros(rows, np.intp), 1)
        return replace(evaluate(question, clients), tallies=np.tile(cells, (1, len(clients), 1)))

    return test


class TestSums:
    """What test rows add up to, where a measure is asked for."""

    def test_they_survive_the_wire_with_the_measure(self) -> None:
        got, _ = tasks.read_question(tasks.write_question(LED, 5.0, "r1"))
        assert got.measure == LED.measure
        answer = summed()(got, ("c1", "c2"))
        back = tasks.read_evaluations(tasks.write_evaluations(answer), LED, ["c1", "c2"], (0, 1))
        assert back.tallies is not None
        assert back.tallies == pytest.approx(answer.tallies)
        assert back.overall(LED.measure).tolist() == [1.0]
        unasked = replace(LED, measure=None)
        assert_taken_back(
            lambda: tasks.read_evaluations(tasks.write_evaluations(answer), unasked, ["c1", "c2"]), "arrays: got"
        )

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda cells: 2 * cells, "sums: not those of 2 rows"),
            (lambda cells: np.where(np.arange(len(cells)) == 9, -1.0, cells), "sums: not those of 2 rows"),
            (lambda cells: cells * np.nan, "sum = nan"),
        ],
    )
    def test_sums_that_cannot_be_leave_out_only_their_client(self, change: Any, reason: str) -> None:
        answer = summed()(LED, ("c1", "c2"))
        assert answer.tallies is not None
        answer.tallies[:, 1] = change(answer.tallies[0, 1])
        got = tasks.read_evaluations(tasks.write_evaluations(answer), LED, ["c1", "c2"])
        assert got.clients == ("c1",)
        assert reasons(got.failures)["c2"].startswith(reason)

    def test_a_lone_client_changes_neither_the_classes_nor_the_number_of_rows_of_all(self) -> None:
        other = summed(classes=3)(LED, ("c3",))
        many = replace(summed(rows=40)(LED, ("c4",)), samples=np.array([40]))
        answer = tasks.joined_evaluations(LED, [summed()(LED, ("c1", "c2")), other, many], [], most=6)
        assert answer.clients == ("c1", "c2", "c4")
        assert reasons(answer.failures)["c3"].startswith("sums: of another number of classes")
        assert answer.tallies is not None
        assert Tally(answer.tallies).confusion.sum(axis=(-2, -1)).tolist() == [[2, 2, 6]]


def asked_of(*evaluations: Any, detailed: bool = False) -> Evaluations:
    """Ask nodes with a client each, c0, c1, ..., how good a model is."""
    nodes = {1 + i: honest(f"c{i}", evaluate=one) for i, one in enumerate(evaluations)}
    (answer,) = crowd(nodes).evaluate([Question("fed", 7, 1, torch.zeros(1, 3), detailed)])
    return answer


def boasting(times: int) -> Any:
    """A test that claims so many times the rows it has, all of them right."""

    def test(question: Question, clients: tuple[str, ...]) -> Evaluations:
        found = evaluate(question, clients)
        right = None if found.right is None else np.ones(len(found.right) * times, dtype=np.bool_)
        return replace(found, samples=found.samples * times, scores=np.ones_like(found.scores), right=right)

    return test


def with_metrics(**metrics: list[float]) -> Any:
    def test(question: Question, clients: tuple[str, ...]) -> Evaluations:
        return replace(evaluate(question, clients), metrics={name: np.asarray(v) for name, v in metrics.items()})

    return test


class TestClaims:
    """What one client may claim beside all others."""

    def test_more_test_rows_than_anybody_count_three_times_the_median_ones(self) -> None:
        times = 90
        nodes = {1 + i: honest(f"c{i}", evaluate=boasting(times) if i == 2 else evaluate) for i in range(10)}
        clients = crowd(nodes)
        (answer,) = clients.evaluate([Question("fed", 7, 1, torch.zeros(1, 3), detailed=True)])
        assert answer.clients == tuple(f"c{number}" for number in range(10))
        assert answer.samples.tolist() == [2, 2, 6, *[2] * 7]
        assert answer.right is not None
        assert len(answer.right) == 24  # What does not count is not recorded either.
        honest_sum = sum(number / 100 for number in range(10) if number != 2)
        assert answer.overall().tolist() == [pytest.approx((honest_sum + 3 * 1.0) / 12)]
        (note,) = clients.notes
        assert f"client c2 says {2 * times} test samples; 6 count" in note

    def test_the_bound_of_test_sets_is_the_lower_middle_one(self) -> None:
        assert most_counted([5, 0, 500], 3.0) == 15
        assert most_counted([5, 501], 3.0) == 15
        assert most_counted([10**9], 3.0) == MOST_SAMPLES  # Nobody to compare with.

    def test_one_node_neither_takes_a_metric_from_the_others_nor_adds_one(self) -> None:
        ours = with_metrics(ndcg=[0.5])
        for other in (evaluate, lambda asked, names: evaluate(asked, ()), with_metrics(mine=[1.0])):
            answer = asked_of(ours, ours, other)
            assert list(answer.metrics) == ["ndcg"]
            assert answer.metrics["ndcg"][:2].tolist() == [0.5, 0.5]
            assert np.isnan(answer.metrics["ndcg"][2:]).all()
            assert len(answer.metrics["ndcg"]) == len(answer.clients)


class TestCohorts:
    """One matrix for a cohort: answers are copied in as they arrive."""

    @staticmethod
    def part(*clients: str) -> Updates:
        """Each client's model is its number, three times; its vector the opposite."""
        models = torch.tensor([[float(name[1:])] * 3 for name in clients]).reshape(-1, 3)
        counts, losses = np.ones(len(clients), dtype=np.int64), np.zeros(len(clients))
        return Updates("f", 1, clients, counts, {}, losses, DenseModels(models), vectors={CHANGE: -models})

    @staticmethod
    def rows(*clients: str) -> CohortRows:
        return CohortRows(Task("f", 0, 1, clients, torch.zeros(3), algorithm=Scaffold()))

    @settings(max_examples=50)
    @given(st.permutations([f"c{i}" for i in range(8)]), st.integers(1, 7), st.sets(st.integers(0, 7)))
    def test_models_stand_in_the_order_of_their_clients(self, order: list[str], cut: int, missing: set[int]) -> None:
        rows = self.rows(*(f"c{i}" for i in range(8)))
        came = [name for name in order if int(name[1:]) not in missing]
        left = [rows.put(self.part(*piece)) for piece in (came[:cut], came[cut:])]
        assert [one.payload.content() for one in left] == [[], []]  # Their models lie in the cohort's matrix alone.
        joined = rows.joined(left, [])
        assert list(joined.clients) == sorted(came)
        assert models_of(joined) == [[float(name[1:])] * 3 for name in sorted(came)]
        assert joined.vectors[CHANGE].tolist() == [[-float(name[1:])] * 3 for name in sorted(came)]

    def test_an_answer_after_the_end_writes_over_nobody(self) -> None:
        rows = self.rows("c1", "c2")
        joined = rows.joined([rows.put(self.part("c2"))], [])
        assert_taken_back(lambda: rows.put(self.part("c1")), "came after the deadline")
        assert models_of(joined) == [[2.0, 2.0, 2.0]]
