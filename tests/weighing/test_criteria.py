"""Criteria: what clients count, what is no measure, how they are registered, and what they need of data and servers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.weighing.policies.cohorts import answering

from steelyard.base.usercode import load_entry_points
from steelyard.weighing import builtin, criterion, rule
from steelyard.weighing.criterion import (
    NO_NEEDS,
    Capabilities,
    CohortView,
    Criterion,
    Labelled,
    LocalData,
    Needs,
    client_criterion,
    get,
    known,
    load_plugins,
    server_criterion,
    unmet,
)
from steelyard.weighing.rule import Rule, WeighingSettings


def local(labels: list[int], classes: int = 2, **more: Any) -> LocalData:
    return LocalData("a", torch.tensor(labels, dtype=torch.int64), classes, **more)


def view(divergence: list[float]) -> CohortView:
    return answering(np.ones(len(divergence), dtype=np.int64), divergence=np.array(divergence))


def server(measure: Callable[[CohortView], Any]) -> Criterion:
    return Criterion(name="S", measured_by="server", measure=measure)


def client(measure: Callable[[LocalData], Any]) -> Criterion:
    return Criterion(name="X", measured_by="client", measure=measure)


def test_measures_by_hand() -> None:
    data = local([0, 1, 1, 1, 0])
    assert [get(name).on_client(data) for name in ("DS", "LD")] == [5, 2]
    assert get("CB").on_client(data) == pytest.approx(2 / 3)
    assert get("CB").on_client(local([1, 1])) == 0
    assert get("EQ").on_server(view([3, 4, 5])).tolist() == [1, 1, 1]
    assert get("MD").on_server(view([0, 1, 3, 8])) == pytest.approx([1, 0.5**0.5, 0.5, 1 / 3])
    labels = [number % 7 for number in range(builtin.FEW_LABELS + 1)]
    assert get("LD").on_client(local(labels)) == get("LD").on_client(local(labels[:-1])) == 7, "many as few"
    for classes in (0, 3):
        assert_refused(lambda c=classes: get("CB").on_client(local([0, 1], c)), "CB", classes or "no classes")
    assert get("CB").on_client(local([0, 0], 1)) == 0


@pytest.mark.parametrize(("name", "mark"), [("IS", "sharp"), ("CR", "complete")])
def test_a_criterion_of_marks_is_their_mean(name: str, mark: str) -> None:
    assert get(name).on_client(local([0, 1, 1, 0], marks={mark: np.array([1.0, 0.0, 0.5, 1.0])})) == 0.625
    assert get(name).on_client(local([], marks={mark: np.zeros(0)})) == 0.0
    assert get(name).refusal(1.5) is not None
    assert_refused(lambda: get(name).on_client(local([0])), name, f"marked {mark}")


def test_label_entropy_by_hand_and_of_many_clients() -> None:
    """Two of four classes held alike: ln 2 / ln 4 = ½; one class: 0; all alike: 1."""
    entropy = get("LE")
    assert entropy.on_client(local([0, 1], 2)) == pytest.approx(1.0, abs=1e-15)
    for labels, wanted in (([0, 0, 1, 1], 0.5), ([3, 3, 3], 0.0), ([0, 1, 2, 3], 1.0)):
        assert entropy.on_client(local(labels, 4)) == pytest.approx(wanted, abs=1e-15)
    many = Labelled(np.array([0, 0, 1, 1, 3, 3, 3, 0, 1, 2, 3]), np.array([4, 3, 4]), 4)
    np.testing.assert_allclose(entropy.of_labels(many), [0.5, 0.0, 1.0], atol=1e-15)


@given(st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=8))
def test_many_clients_at_once_measure_as_each_alone(clients: list[list[int]]) -> None:
    flat = np.array([label for labels in clients for label in labels], dtype=np.int64)
    many = Labelled(flat, np.array([len(labels) for labels in clients], dtype=np.int64), 7)
    for name in ("DS", "LD"):
        measure = get(name).of_labels
        found = measure(many)
        assert found.tolist() == [get(name).on_client(local(labels, 7)) for labels in clients]


def test_the_highest_class_is_one_less_than_their_number() -> None:
    sizes = np.array([1, 1], dtype=np.int64)
    found = Labelled(np.array([6, 0]), sizes, 7).counts()
    assert found.argmax(axis=1).tolist() == [6, 0]
    assert Labelled(np.array([7, 0]), sizes, 7).counts() is None
    assert Labelled(np.array([-1, 0]), sizes, 7).counts() is None
    assert get("LD").of_labels(Labelled(np.array([0.5, 1.5]), sizes, 7)) is None  # type: ignore[misc]


def test_a_measure_that_is_no_worth_leaves_the_client_out() -> None:
    def raising(error: BaseException) -> Callable[[LocalData], float]:
        def measure(data: LocalData) -> float:
            raise error

        return measure

    for measure, words in (
        (lambda data: float("nan"), "= nan"),
        (lambda data: -1.0, "= -1.0; allowed: 0 to any finite number"),
        (lambda data: None, "failed: TypeError"),
        (raising(RuntimeError("no\n  battery")), "failed: RuntimeError: no battery"),
        (raising(SystemExit(3)), "failed: SystemExit: 3"),
    ):
        found, why = client(measure).taken(local([0]))
        assert np.isnan(found)
        assert (why or "").startswith(f"criterion X {words}")
    assert client(lambda data: 0).taken(local([0])) == (0.0, None)
    assert client(lambda data: len(data.labels) > 1).taken(local([0, 1])) == (1.0, None)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([1.0, np.nan, np.nan], "measured nan on the server for 1 and 1 more"),
        ([1.0, 2.0], "measured shape (2,)"),
        ("high", "fails on the server: ValueError"),
    ],
)
def test_a_server_criterion_that_is_no_worth_is_one_line(measured: object, message: str) -> None:
    assert_refused(lambda: server(lambda view: measured).on_server(view([0, 1, 2])), f"criterion S: {message}")
    fails = server(lambda view: 1 / 0)
    assert_refused(lambda: fails.on_server(view([0])), "criterion S: fails on the server: ZeroDivisionError: division")


def test_what_a_client_cannot_have_measured_is_refused() -> None:
    for name, value, classes, refused in (
        ("CB", 1.0, None, False),
        ("CB", 1.5, None, True),
        ("DS", 1e9, 3, False),
        ("DS", -0.5, None, True),
        ("DS", float("nan"), None, True),
        ("LD", 3.0, 3, False),
        ("LD", 4.0, 3, True),
        ("LD", 4.0, None, False),
    ):
        line = get(name).refusal(value, classes)
        assert (line is not None) == refused, (name, value)
        assert line is None or line.startswith(f"criterion {name} = {value}; allowed: 0 to ")
    assert [get(name).most(3) for name in ("LD", "DS", "CB")] == [3, np.inf, 1.0]


def test_a_script_and_an_entry_point_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from steelyard import client_criterion\n"
        "@client_criterion('{name}-1', description='mine')\n"
        "def measure_{name}(local): return 1.0\n"
    )
    script = tmp_path / "mine.py"
    script.write_text(text.format(name="SCRIPTED"))
    load_plugins([str(script)])
    assert criterion.get("SCRIPTED-1").description == "mine"

    (tmp_path / "offered_criteria.py").write_text(text.format(name="OFFERED"))
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[steelyard.criteria]\nmine = offered_criteria\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    load_entry_points.cache_clear()
    assert criterion.get("OFFERED-1").measured_by == "client"
    load_plugins(["offered_criteria"])
    assert "offered_criteria" in sys.modules


def test_names_and_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    assert_refused(lambda: get("ds"), "'ds'", "did you mean 'DS'")
    assert_refused(lambda: load_plugins([str(tmp_path / "none.py")]), "none.py")
    assert_refused(lambda: load_plugins([str(tmp_path / "broken.py")]), "broken.py", "ZeroDivisionError")
    for name in ("", "A>B", "-"):
        assert_refused(
            lambda n=name: criterion.add(client(float).model_copy(update={"name": n})), f"criterion name '{name}'"
        )


def test_decorators_pass_on_what_they_are_given_and_have_plain_defaults() -> None:
    many = lambda labelled: labelled.sizes.astype(float)  # noqa: E731

    @client_criterion("PLAIN", of_labels=many)
    def plain(data: LocalData) -> float:
        """First line.

        More."""
        return 1.0

    @server_criterion("PLAIN2")
    def plain_too(view: CohortView) -> np.ndarray:
        return view.samples

    @client_criterion(
        *("NEEDY",),
        about="user",
        maximum=3.0,
        needs=Needs(labels=True, classes=3, marks=["a", "b"], task="classes"),  # type: ignore[arg-type]
        description="mine",
    )
    def needy(data: LocalData) -> float:
        return 1.0

    assert get("PLAIN") == Criterion(
        name="PLAIN", measured_by="client", description="First line.", measure=plain, of_labels=many
    )
    assert get("PLAIN2") == Criterion(
        name="PLAIN2",
        measured_by="server",
        about="model",
        description="PLAIN2",
        measure=plain_too,
        needs=Needs(models=True),
        of_one=False,
    )
    found, needs = get("NEEDY"), Needs(labels=True, classes=3, marks=("a", "b"), task="classes")
    assert (found.about, found.description, found.maximum, found.needs) == ("user", "mine", 3.0, needs)


@pytest.mark.parametrize("given", [{"uses_claims": True}, {"needs": Needs(task="classes", first_losses=True)}])
def test_a_measure_that_looks_at_what_clients_say_is_no_truer_than_they_are(given: dict[str, Any]) -> None:
    name = f"SAID{'-'.join(given)}"

    @server_criterion(name, maximum=2.0, of_one=True, **given)
    def said(view: CohortView) -> np.ndarray:
        return view.samples

    found = criterion.get(name)
    assert found.uses_claims
    assert (found.maximum, found.of_one) == (2.0, True)
    assert found.needs == given.get("needs", Needs(models=True))


def test_a_rule_takes_criteria_that_were_looked_up_already() -> None:
    mine = get("DS").model_copy(update={"name": "NOWHERE"})
    assert Rule(WeighingSettings(criteria=("NOWHERE",)), [mine]).criteria == [mine]


RULE = Rule(WeighingSettings(criteria=("DS", "LD")))


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: RULE.score([[1.0], ["x"]]), ("values", [[1.0], ["x"]])),  # type: ignore[arg-type]
        (lambda: RULE.weigh(np.array([[1.0, -1.0]])), ("raw", -1.0)),
        (lambda: RULE.weigh(np.ones((1, 2)), [0, 0]), ("order", [0, 0])),
        (lambda: RULE.weigh(np.ones((1, 2)), how="best"), ("how", "'best'")),  # type: ignore[arg-type]
        (lambda: Rule("DS"), ("Rule", "'DS'")),  # type: ignore[arg-type]
        (lambda: Rule(WeighingSettings(criteria=("DS", "MD", "LD")), [get("LD")]), ("known", "lacks DS, MD")),
        (lambda: Rule(WeighingSettings(), 7), ("Rule: known", 7)),  # type: ignore[arg-type]
        (lambda: Rule(WeighingSettings(), [7]), ("Rule: known", 7)),  # type: ignore[list-item]
        (lambda: Needs(classes=2.5), ("Needs: classes", "2.5; allowed: a whole number")),  # type: ignore[arg-type]
        (lambda: Needs(marks="sharp"), ("Needs: marks", "'sharp'; allowed: a list")),  # type: ignore[arg-type]
        (lambda: Needs(labels=1), ("Needs: labels", "1; allowed: true or false")),  # type: ignore[arg-type]
        (lambda: Needs(label=True), ("Needs: label: unknown field (did you mean 'labels'?)",)),  # type: ignore[call-arg]
        (lambda: server_criterion("X")(3), ('@server_criterion("X")', 3)),  # type: ignore[arg-type]
        (lambda: client_criterion("X")(lambda: 1.0), ('@client_criterion("X")', "too many")),  # type: ignore[arg-type]
        *(
            (
                lambda made=made, given=given: made("X", **given)(float),
                (f"@{made.__name__}: {next(iter(given))}", value),
            )
            for made, given, value in (
                (client_criterion, {"about": "weather"}, "'weather'"),
                (server_criterion, {"maximum": 2e30}, "2e+30"),
                (client_criterion, {"needs": True}, "true; allowed: Needs(...)"),
                (client_criterion, {"needs_labels": True}, "needs_labels: unknown argument"),
                (server_criterion, {"needs_training": True}, "needs_training: unknown argument"),
                (server_criterion, {"of_labels": len}, "allowed: description, needs, about, maximum, uses_claims"),
                (server_criterion, {"of_one": 1}, "1; allowed: true or false"),
                (client_criterion, {"of_labels": 1}, "1; allowed: a function"),
            )
        ),
    ],
)
def test_what_is_handed_over_wrongly_in_python_is_one_line(call: Callable[[], object], parts: tuple[Any, ...]) -> None:
    assert_refused(call, *parts)
    assert "X" not in known()


def test_what_is_at_a_border_is_taken() -> None:
    assert rule.order_of((1, 0), "ab") == [1, 0]
    assert RULE.score([[1, 1]]).dtype == np.float64  # type: ignore[arg-type]
    # A function in C, whose arguments nobody can look up.
    assert client_criterion("BORDER", description="most", maximum=criterion.LARGEST_REAL)(max) is max  # type: ignore[arg-type]


KNOWN = {
    "LE": Needs(task="classes", test_set=True),  # measured otherwise than the rest: never named in their place
    "VP": Needs(task="classes"),
    "VF": Needs(task="classes"),
    "VE": Needs(task="regression"),
    "DS": NO_NEEDS,
}


DIGITS = Capabilities("data.source = 'digits'", task="classes", classes=10, marks=frozenset())


REGRESSION = Capabilities("data.source = 'diabetes'", task="regression", classes=0, marks=frozenset())


USERS = Capabilities(
    "a recommender", task="ranking", classes=0, marks=frozenset(), label_counts=False, first_losses=False
)


UNKNOWN = Capabilities("data.source = 'memory'")


@pytest.mark.parametrize(
    ("needs", "available", "parts"),
    [
        (Needs(classes=2), DIGITS, ("is for 2 classes, and data.source = 'digits' has 10", "data with 2 classes")),
        (Needs(classes=2), REGRESSION, ("'diabetes' has no classes",)),
        (Needs(task="classes"), REGRESSION, ("measures classes, and data.source = 'diabetes' is a reg", "allowed: VE")),
        (Needs(task="regression"), DIGITS, ("the error of a regression", "has classes; allowed: VP, VF")),
        (Needs(task="regression"), USERS, ("a recommender ranks items; allowed: criteria for any task",)),
        (
            Needs(marks=("big", "sharp")),
            Capabilities("npz", marks=frozenset({"big"})),
            ("needs samples marked sharp, and npz has none", "images, npz or csv with data.marks"),
        ),
        (Needs(labels=True), Capabilities("texts", labels=False), ("looks at labels, and texts has none",)),
        (
            Needs(test_set=True),
            Capabilities("x", lacks_test_set="and there is none; allowed: one"),
            ("is measured on the server's test set, and there is none; allowed: one",),
        ),
        (Needs(models=True), Capabilities("masks", models=False), ("single updates, and masks hides them",)),
        (Needs(label_counts=True), USERS, ("label counts", "a recommender does not give them")),
        (Needs(first_losses=True), USERS, ("losses before training, and a recommender has none",)),
        (Needs(expertise=True), DIGITS, ("users' features", "kind = 'recommend' with [kgflex]")),
        (Needs(slopes=True), Capabilities("Flower", slopes=False), ("learns from the", "Flower only tests on them")),
        (Needs(layers=True), Capabilities("a network", layers=False), ("single layers", "a network does not name")),
        (Needs(everyone=True), Capabilities("x", everyone=False), ("full participation", "rounds.fraction = 1")),
        (Needs(client_tests=True), Capabilities("x", client_tests=False), ("in every round", "evaluate_every = 1")),
    ],
)
def test_a_need_that_is_not_met_is_one_line(needs: Needs, available: Capabilities, parts: tuple[str, ...]) -> None:
    line = unmet(needs, available, KNOWN) or ""
    assert [part for part in parts if part not in line] == [], line


EVERYTHING = Needs(
    labels=True,
    classes=2,
    marks=("sharp",),
    task="classes",
    models=True,
    test_set=True,
    label_counts=True,
    first_losses=True,
)


@pytest.mark.parametrize("available", [UNKNOWN, Capabilities("faces", "classes", 2, frozenset({"sharp", "big"}))])
def test_what_is_offered_or_only_the_data_can_tell_is_accepted(available: Capabilities) -> None:
    assert unmet(EVERYTHING, available, KNOWN) is None
    further = Needs(slopes=True, layers=True, everyone=True, client_tests=True)
    assert unmet(further, available, KNOWN) is None
    assert unmet(Needs(expertise=True), replace(available, expertise=True), KNOWN) is None
