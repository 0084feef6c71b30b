import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from steelyard.errors import UserError
from steelyard.update_payloads import DenseModels, ServerTest
from steelyard.usercode import NotAllowed, load_entry_points, only
from steelyard.weighing import built_in, criteria
from steelyard.weighing.criteria import (
    CohortView,
    Criterion,
    LocalData,
    client_criterion,
    load_plugins,
    server_criterion,
)
from steelyard.weighing.needs import NO_NEEDS, Needs


def local(labels: list[int], **more: object) -> LocalData:
    return LocalData("a", torch.tensor(labels), 2, **more)  # type: ignore[arg-type]


def view(divergence: list[float], accuracy: list[float] | None = None) -> CohortView:
    test = ServerTest(np.array(accuracy or []), np.zeros((0, 0)))
    return CohortView(np.ones(len(divergence), dtype=np.int64), lambda: np.array(divergence), lambda: test)


def test_counts_on_the_client() -> None:
    data = local([0, 1, 1, 1, 0])
    assert criteria.get("DS").on_client(data) == 5
    assert criteria.get("LD").on_client(data) == 2
    assert criteria.get("CB").on_client(data) == pytest.approx(2 / 3)
    assert criteria.get("CB").on_client(local([1, 1])) == 0
    assert criteria.get("CB").on_client(local([0, 0])) == 0


def test_sharpness_is_the_share_marked_sharp() -> None:
    data = local([0, 1, 1, 0], marks={"sharp": np.array([1.0, 0.0, 1.0, 1.0])})
    assert criteria.get("IS").on_client(data) == 0.75
    with pytest.raises(UserError, match="sharp"):
        criteria.get("IS").on_client(local([0]))


def test_model_divergence_of_the_spec() -> None:
    found = criteria.get("MD").on_server(view([0, 1, 3, 8]))
    # The spec prints six decimals.
    assert found == pytest.approx([1, 0.707107, 0.5, 0.333333], abs=5e-7)


def test_divergence_runs_over_all_parameters_together() -> None:
    models = DenseModels(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
    assert models.divergence(torch.zeros(3)) == pytest.approx([5, 0])


def test_who_measures_is_visible() -> None:
    by = {name: criterion.measured_by for name, criterion in criteria.known().items()}
    assert {name for name in ("DS", "LD", "CB", "IS") if by[name] == "client"} == {"DS", "LD", "CB", "IS"}
    assert by["MD"] == by["VP"] == "server"


def test_a_criterion_of_ones_own_may_be_boolean() -> None:
    @client_criterion("PLUGGED", about="device", description="on mains power")
    def plugged(data: LocalData) -> bool:
        return data.device.get("plugged", 0) > 0

    assert criteria.get("PLUGGED").on_client(local([0], device={"plugged": 1.0})) == 1.0
    assert criteria.get("PLUGGED").on_client(local([0])) == 0.0
    assert plugged(local([0])) is False


def test_a_script_and_an_entry_point_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from steelyard import client_criterion\n"
        "@client_criterion('{name}', description='mine')\n"
        "def measure_{name}(local): return 1.0\n"
    )
    script = tmp_path / "mine.py"
    script.write_text(text.format(name="SCRIPTED"))
    load_plugins([str(script)])
    assert criteria.get("SCRIPTED").description == "mine"

    (tmp_path / "offered_criteria.py").write_text(text.format(name="OFFERED"))
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[steelyard.criteria]\nmine = offered_criteria\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    load_entry_points.cache_clear()
    assert criteria.get("OFFERED").measured_by == "client"
    load_plugins(["offered_criteria"])
    assert "offered_criteria" in sys.modules


@pytest.mark.parametrize("allowed", [None, ["some.py"], ["bystander.inner"]])
def test_a_module_that_nobody_declared_is_not_even_imported(
    allowed: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing runs a module: a plugin is declared by its package, or is a file of one's own."""
    (tmp_path / "bystander.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with only(allowed), pytest.raises(NotAllowed) as found:
        load_plugins(["bystander"])
    assert "\n" not in str(found.value)
    # Neither line says which there are.
    assert str(found.value) == (
        "plugin: 'bystander' is not declared for Steelyard; allowed: 'path/to/file.py' of your own, or what an "
        "installed package declares under the entry point steelyard.criteria"
        if allowed is None
        else "plugin: 'bystander' is not run here; allowed: what is built in, and what the node's own `allow` names"
    )
    assert not (tmp_path / "ran").exists()


def test_a_module_that_the_owner_of_a_node_allows_by_name_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owners_choice.py").write_text("ran = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with only(["owners_choice"]):
        load_plugins(["owners_choice"])
        assert "owners_choice" in sys.modules


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'DS'"):
        criteria.get("ds")
    with pytest.raises(UserError, match="there is no file"):
        load_plugins([str(tmp_path / "none.py")])
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_plugins([str(broken)])

    @client_criterion("NEGATIVE")
    def negative(data: LocalData) -> float:
        return -1.0

    assert negative(local([0])) == -1
    _, why = criteria.get("NEGATIVE").taken(local([0]))
    assert why == "criterion NEGATIVE = -1.0; allowed: 0 to any finite number"


def test_names_of_criteria() -> None:
    def measure(data: LocalData) -> float:
        return 1.0

    for name in ("A-B", "A_B", "a1", "-_x"):
        criteria.add(Criterion(name, "client", "data", "", measure))
        assert criteria.get(name).measure is measure
    for name in ("", "A B", "A>B", "-", "é!"):
        with pytest.raises(UserError) as found:
            criteria.add(Criterion(name, "client", "data", "", measure))
        assert str(found.value) == f"criterion name '{name}': allowed: letters, digits, '-' and '_'"


def test_a_name_is_taken_once_but_a_script_may_be_run_again() -> None:
    def first(data: LocalData) -> float:
        return 1.0

    def second(data: LocalData) -> float:
        return 2.0

    criteria.add(Criterion("TAKEN", "client", "data", "", first))
    criteria.add(Criterion("TAKEN", "client", "data", "again", first))
    assert criteria.get("TAKEN").description == "again"
    with pytest.raises(UserError) as found:
        criteria.add(Criterion("TAKEN", "client", "data", "", second))
    here = "test_a_name_is_taken_once_but_a_script_may_be_run_again.<locals>"
    assert str(found.value) == (
        f"criterion TAKEN: registered twice, by {here}.first and {here}.second; give one of them another name"
    )
    assert criteria.get("TAKEN").measure is first


def test_decorators_have_plain_defaults() -> None:
    many = lambda labelled: labelled.sizes.astype(float)  # noqa: E731

    @client_criterion("PLAIN", of_labels=many)
    def plain(data: LocalData) -> float:
        """First line.

        More."""
        return 1.0

    @server_criterion("PLAIN2")
    def plain_too(view: CohortView) -> np.ndarray:
        return view.samples

    assert criteria.get("PLAIN") == Criterion("PLAIN", "client", "data", "First line.", plain, None, NO_NEEDS, many)
    assert criteria.get("PLAIN2") == Criterion(
        "PLAIN2", "server", "model", "PLAIN2", plain_too, None, Needs(models=True), of_one=False
    )
    assert criteria.get("PLAIN2").on_server(view([0, 0])).dtype == np.float64


@pytest.mark.parametrize(("name", "classes"), [("CB", 0), ("CB", 3)])
def test_two_classes_are_needed_for_class_balance(name: str, classes: int) -> None:
    with pytest.raises(UserError) as found:
        criteria.get(name).on_client(LocalData("a", torch.tensor([0, 1]), classes))
    assert str(found.value) == (
        f"criterion CB: is for 2 classes, and this data has {classes or 'none'}; allowed: data with 2 classes"
    )
    assert criteria.get(name).on_client(LocalData("a", torch.tensor([0, 0]), 1)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_measure_that_is_no_worth_leaves_the_client_out(value: float) -> None:
    found, why = Criterion("X", "client", "data", "", lambda data: value).taken(local([0]))
    assert np.isnan(found)
    assert why == f"criterion X = {value}; allowed: 0 to any finite number"
    assert Criterion("X", "client", "data", "", lambda data: 0).taken(local([0])) == (0.0, None)


def test_a_measure_that_fails_leaves_the_client_out() -> None:
    _, why = Criterion("X", "client", "data", "", lambda data: {}["battery"]).taken(local([0]))  # type: ignore[index]
    assert why == "criterion X failed: KeyError: 'battery'"
    _, why = Criterion("X", "client", "data", "", lambda data: None).taken(local([0]))  # type: ignore[arg-type,return-value]
    assert why is not None
    assert why.startswith("criterion X failed: TypeError")


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([1.0, np.nan, np.nan], "criterion S: measured nan on the server for 1 and 1 more; allowed: a number >= 0"),
        ([1.0, 0.0, -2.0], "criterion S: measured -2.0 on the server for 2; allowed: a number >= 0 for each client"),
        ([np.inf, 0, 0], "criterion S: measured inf on the server for 0; allowed"),
        ([1.0, 2.0], r"criterion S: measured shape \(2,\) on the server; allowed: a number >= 0 for each of the 3"),
        (1.0, r"criterion S: measured shape \(\) on the server"),
        ("high", "criterion S: fails on the server: ValueError"),
        (None, r"criterion S: measured shape \(\) on the server"),
    ],
)
def test_a_server_criterion_that_is_no_worth_is_one_line(measured: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Criterion("S", "server", "model", "", lambda view: measured).on_server(view([0, 1, 2]))  # type: ignore[arg-type,return-value]


def test_a_server_criterion_that_raises_is_one_line() -> None:
    with pytest.raises(UserError, match="criterion S: fails on the server: ZeroDivisionError: division by zero"):
        Criterion("S", "server", "model", "", lambda view: 1 / 0).on_server(view([0, 1, 2]))  # type: ignore[arg-type,return-value]


def test_many_labels_are_counted_as_few_are() -> None:
    labels = [number % 7 for number in range(built_in.FEW_LABELS + 1)]
    assert criteria.get("LD").on_client(local(labels)) == 7
    assert criteria.get("LD").on_client(local(labels[:-1])) == 7


def test_sharpness_of_nothing_is_none() -> None:
    with pytest.raises(UserError) as found:
        criteria.get("IS").on_client(local([0]))
    assert str(found.value) == "criterion IS: this data has no mark 'sharp'; allowed: a source with that mark"
    assert criteria.get("IS").on_client(local([], marks={"sharp": np.zeros(0)})) == 0.0


def test_equal_say() -> None:
    assert criteria.get("EQ").on_server(view([3, 4, 5])).tolist() == [1, 1, 1]


def test_what_a_client_cannot_have_measured_is_refused() -> None:
    for value in (0.0, 1.0):
        assert criteria.get("CB").refusal(value) is None
    assert criteria.get("CB").refusal(-0.5) == "criterion CB = -0.5; allowed: 0 to 1.0"
    assert criteria.get("DS").refusal(-0.5) == "criterion DS = -0.5; allowed: 0 to any finite number"
    assert criteria.get("CB").refusal(0.5) is None
    assert "CB = 1.5" in (criteria.get("CB").refusal(1.5) or "")
    assert criteria.get("DS").refusal(1e9) is None
    for value in (float("nan"), float("inf"), -1.0):
        assert criteria.get("DS").refusal(value) is not None


def test_who_counts_classes_cannot_count_more_than_there_are() -> None:
    assert criteria.get("LD").refusal(3.0, 3) is None
    assert criteria.get("LD").refusal(4.0, 3) == "criterion LD = 4.0; allowed: 0 to 3"
    assert criteria.get("LD").refusal(4.0, None) is None
    assert criteria.get("LD").most(3) == 3
    assert criteria.get("DS").most(3) == np.inf
    assert criteria.get("CB").most(3) == 1.0


@pytest.mark.parametrize(
    ("given", "claims"),
    [
        ({}, False),
        ({"uses_claims": True}, True),
        ({"needs_label_counts": True}, True),
        ({"needs_first_losses": True}, True),
    ],
)
def test_a_measure_that_looks_at_what_clients_say_is_no_truer_than_they_are(
    given: dict[str, bool], claims: bool
) -> None:
    name = f"SAID{'-'.join(given)}"

    @server_criterion(name, maximum=2.0, of_one=True, needs_models=False, needs_task="classes", **given)  # type: ignore[arg-type]
    def said(view: CohortView) -> np.ndarray:
        return view.samples

    found = criteria.get(name)
    assert found.uses_claims is claims
    assert (found.maximum, found.of_one) == (2.0, True)
    assert found.needs == Needs(
        models=False,
        task="classes",
        label_counts=given.get("needs_label_counts", False),
        first_losses=given.get("needs_first_losses", False),
    )


def test_a_reason_of_many_lines_is_told_in_one() -> None:
    def failing(data: LocalData) -> float:
        raise RuntimeError("no\n  battery")

    found, why = Criterion("X", "client", "data", "", failing).taken(local([0]))
    assert np.isnan(found)
    assert why == "criterion X failed: RuntimeError: no battery"

    def leaving(data: LocalData) -> float:
        raise SystemExit(3)

    assert Criterion("X", "client", "data", "", leaving).taken(local([0]))[1] == "criterion X failed: SystemExit: 3"


def test_label_entropy_by_hand() -> None:
    """Two of four classes held alike: ln 2 / ln 4 = ½; one class: 0; all alike: 1; many clients at once agree."""
    entropy = criteria.known()["LE"]
    for labels, wanted in (([0, 0, 1, 1], 0.5), ([3, 3, 3], 0.0), ([0, 1, 2, 3], 1.0)):
        local = LocalData("a", torch.tensor(labels), classes=4)
        assert entropy.on_client(local) == pytest.approx(wanted, abs=1e-15)
    assert entropy.of_labels is not None
    many = criteria.Labelled(np.array([0, 0, 1, 1, 3, 3, 3, 0, 1, 2, 3]), np.array([4, 3, 4]), 4)
    np.testing.assert_allclose(entropy.of_labels(many), [0.5, 0.0, 1.0], atol=1e-15)


def test_completeness_is_the_mean_share_of_filled_cells() -> None:
    data = local([0, 1], marks={"complete": np.array([1.0, 0.5])})
    assert criteria.get("CR").on_client(data) == 0.75
    assert criteria.get("CR").refusal(1.5) is not None
    with pytest.raises(UserError, match="complete"):
        criteria.get("CR").on_client(local([0]))
