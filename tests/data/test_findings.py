"""Profiles of sites add up, and what is compared are sums: what a node could send is enough to find what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import pytest

from steelyard.data.cells import parse_numbers
from steelyard.data.findings import Finding, beside, compared, drift
from steelyard.data.profile import ColumnProfile, SiteProfile, edges_of, profile_column, profile_labels, together


def sites(**cells: Mapping[str, Any]) -> list[SiteProfile]:
    """Return the profiles of sites that have these columns, `y` the label, with edges that all agree on."""
    frames: dict[str, Any] = {site: pandas.DataFrame(dict(columns)) for site, columns in cells.items()}
    names = {str(name) for frame in frames.values() for name in frame.columns} - {"y"}
    parts = {name: [parse_numbers(frame[name]) for frame in frames.values() if name in frame] for name in names}
    edges = {name: edges_of(np.concatenate(parts[name])) for name in names}
    classes: Any = pandas.Index(pandas.concat([frame["y"] for frame in frames.values()]).unique())
    found: list[SiteProfile] = []
    for site, frame in frames.items():
        labels = np.asarray(classes.get_indexer(frame["y"]))
        columns = {
            str(name): profile_column(frame[name], parse_numbers(frame[name]), edges[name], [labels])
            for name in frame
            if name != "y"
        }
        found.append(SiteProfile(site, len(frame), "y", profile_labels(frame["y"], classes=True), columns))
    return found


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


CHANCE = np.random.default_rng(3)
AGE = CHANCE.normal(50, 10, (4, 200)).round(1)
ILL = [list("ab" * 100)] * 4


def test_profiles_add_up_and_the_rest_of_the_sum_is_the_others() -> None:
    parts = sites(**{f"s{n}": {"age": AGE[n], "sex": list("fm" * 100), "y": ILL[n]} for n in range(4)})
    pool, whole = together(parts), sites(all={"age": AGE.ravel(), "sex": list("fm" * 400), "y": ILL[0] * 4})[0]
    rest = pool.plus(parts[0], -1)
    assert (pool.columns["age"].counts == whole.columns["age"].counts).all()
    assert pool.columns["sex"].words == whole.columns["sex"].words == {"f": 400, "m": 400}
    assert (rest.rows, rest.labels.words) == (600, {"a": 300, "b": 300})
    # Quantiles of a sum are as good as its bins.
    estimated, exact = rest.columns["age"].estimated(), np.quantile(AGE[1:], 0.5)
    assert estimated is not None
    assert estimated[3] == pytest.approx(exact, abs=0.5)


@pytest.mark.parametrize(
    ("change", "factor", "units"),
    [
        (lambda age: age * 10, 10, ""),
        (lambda age: age / 1000, 0.001, ""),
        (lambda age: age * 2.54, 2.54, "inches and cm"),
        (lambda age: age * 47, 47, ""),
        (lambda age: age * 1.8 + 32, 1.8, "°F and °C, 32 apart"),
    ],
)
def test_a_factor_between_sites_is_found_at_the_site_that_has_it(change: Any, factor: float, units: str) -> None:
    parts = sites(**{f"s{n}": {"age": change(AGE[n]) if n == 2 else AGE[n], "y": ILL[n]} for n in range(4)})
    findings = [finding for finding in compared(parts, task="classes") if finding.column == "age"]
    assert [(finding.name, finding.site) for finding in findings] == [("other-units", "s2")]
    assert findings[0].figures["factor"] == pytest.approx(factor, rel=0.05)
    assert units in findings[0].sentence
    assert findings[0].mend == "data.columns.age.factor"


@pytest.mark.parametrize("shift", [-30, 12.5, 30, 75])
def test_numbers_that_are_all_higher_have_no_other_unit(shift: float) -> None:
    parts = sites(**{f"s{n}": {"age": AGE[n] + shift * (n == 2), "y": ILL[n]} for n in range(4)})
    findings = [finding for finding in compared(parts, task="classes") if finding.column == "age"]
    assert [(finding.name, finding.site) for finding in findings] == [("drift", "s2")]


@pytest.mark.parametrize(("odd", "rows"), [({2, 3}, 200), ({3}, 12)])
def test_a_factor_is_told_as_it_is_where_half_of_the_sites_have_it_or_a_small_one(odd: set[int], rows: int) -> None:
    heavy = CHANCE.lognormal(6, 0.6, (4, 200))
    parts = sites(
        **{f"s{n}": {"x": heavy[n] * 10, "y": ILL[n]} if n in odd else {"x": heavy[n], "y": ILL[n]} for n in range(4)}
        | {"s3": {"x": heavy[3][:rows] * 10, "y": ILL[3][:rows]}}
    )
    findings = [finding for finding in compared(parts, task="classes") if finding.name == "other-units"]
    assert {(finding.site, finding.figures["factor"]) for finding in findings} == {(f"s{n}", 10) for n in odd}


def test_a_field_is_named_as_an_experiment_file_writes_it() -> None:
    parts = sites(a={"mean radius": AGE[0], "y": ILL[0]}, b={"mean radius": AGE[1] * 10, "y": ILL[1]})
    (finding,) = (each for each in compared(parts, task="classes") if each.name == "other-units")
    assert finding.mend == 'data.columns."mean radius".factor'


def test_sites_that_are_alike_or_small_are_left_in_peace() -> None:
    heavy = CHANCE.lognormal(3, 1, (4, 200))
    rare = (CHANCE.random((4, 200)) < 0.02).astype(int)
    parts = sites(
        **{f"s{n}": {"age": AGE[n], "heavy": heavy[n], "rare": rare[n], "y": ILL[n]} for n in range(4)},
        tiny={"age": [80, 81, 79], "heavy": [1, 2, 900], "rare": [0, 1, 1], "y": list("aba")},
    )
    assert [finding.name for finding in compared(parts, task="classes")] == ["few-rows"]


def test_strange_numbers_leave_the_others_as_they_are() -> None:
    cells = AGE[0].astype(object)
    cells[:30], cells[30], cells[31] = -999, 1e12, "<5"
    mostly = AGE[2].astype(object)
    mostly[:150] = "<5"
    strange, usual = sites(a={"age": cells, "y": ILL[0]}, b={"age": AGE[1], "y": ILL[1]})
    column = strange.columns["age"]
    assert dict(column.strange) == {-999.0: 30, 1e12: 1}
    assert (column.bulk, column.words, column.first) == (168, {"<5": 1}, {"<5": 31})
    found = [(finding.name, finding.mend) for finding in compared([strange, usual], task="classes")]
    assert found[0] == ("words-among-numbers", "data.columns.age.limits")
    assert [name for name, _ in found[1:]] == ["not-recorded", "not-recorded"]
    below = compared(sites(a={"age": mostly, "y": ILL[0]}, b={"age": AGE[1], "y": ILL[1]}), task="classes")
    assert [(finding.name, finding.mend) for finding in below] == found[:1]


def test_zeros_of_a_measurement_stand_apart_and_counts_do_not() -> None:
    measured = np.where(np.arange(200) < 40, 0, CHANCE.normal(220, 30, 200))
    counts = CHANCE.poisson(0.3, 200)
    column = sites(a={"measured": measured, "counts": counts, "y": ILL[0]})[0].columns
    assert dict(column["measured"].strange) == {0.0: 40}
    assert not column["counts"].strange


@pytest.mark.parametrize("how", ["number", "threshold", "word", "empty", "no word"])
def test_a_column_that_alone_gives_the_label_is_found_and_a_good_one_is_not(how: str) -> None:
    ill = np.arange(400) % 2
    leak: dict[str, Any] = {
        "number": 2 * ill + 1,
        "threshold": CHANCE.normal(0, 1, 400) + 12 * ill,
        "word": np.where(ill == 1, "treated", "sent home"),
        "empty": np.where(ill == 1, CHANCE.normal(0, 1, 400), np.nan),
        "no word": np.where(ill == 1, CHANCE.choice(["once", "twice"], 400), None),
    }
    good = CHANCE.normal(0, 1, 400) + 2 * ill
    parts = sites(a={"leak": leak[how], "good": good, "y": np.where(ill == 1, "x", "y")})
    assert [(each.name, each.column) for each in compared(parts, task="classes")] == [("gives-the-label-away", "leak")]


@pytest.mark.parametrize(
    ("labels", "name", "row"),
    [
        ([*("Benign", "malignant") * 5], "labels-spelled-alike", "1"),
        ([*("benign", "malig nant") * 5], "labels-spelled-alike", "2"),
        ([*(0, 1) * 5], "labels-of-two-kinds", "1"),
        ([*("benign", "unclear") * 5], "class-at-one-site", ""),
        ([*("benign", 4) * 5], "class-at-one-site", ""),
    ],
)
def test_labels_that_do_not_go_together(labels: list[Any], name: str, row: str) -> None:
    usual = {"x": range(20), "y": [*("benign", "malignant") * 10]}
    own, other = sites(south={"x": range(10), "y": labels}, north=usual)
    findings = by_name(beside(own, other))
    assert findings[name].row == row
    assert not by_name(beside(other, own)).keys() & {"labels-spelled-alike", "labels-of-two-kinds"}


def test_types_that_clash_and_sites_without_a_common_column() -> None:
    numbers, words = sites(a={"x": range(20), "y": ILL[0][:20]}, b={"x": list("pq" * 10), "y": ILL[0][:20]})
    assert beside(words, numbers)[0].model_dump(include={"name", "row", "mend"}) == {
        "name": "types-clash",
        "row": "1",
        "mend": "data.columns.x.type",
    }
    assert beside(numbers, words)[0].row == "1"
    one, other = sites(a={"x": range(20), "y": ILL[0][:20]}, b={"z": range(20), "y": ILL[0][:20]})
    assert [finding.name for finding in beside(one, other)] == ["no-common-column"]
    one, other = sites(
        **{name: {"x": range(20), column: range(20), "y": ILL[0][:20]} for name, column in (("a", "Z "), ("b", "z"))}
    )
    assert "has no value in 'z', is it 'Z '?" in by_name(beside(one, other))["no-values"].sentence


def test_what_is_constant_at_each_site_is_constant_where_all_have_the_same() -> None:
    fixed = {"dose": 5, "ward": "w"}
    parts = sites(
        **{f"s{n}": {name: [value] * 200 for name, value in fixed.items()} | {"y": ILL[n]} for n in range(2)},
        other={"dose": [7] * 200, "ward": ["v"] * 200, "y": ILL[2]},
    )
    alike, every = (compared(some, task="classes") for some in (parts[:2], parts))
    assert [(each.name, each.column) for each in alike] == [("constant", name) for name in fixed for _ in range(2)]
    assert {(each.name, each.column, each.mend) for each in every} == {
        ("drift", "dose", "data.normalise"),
        ("drift", "ward", "data.ignore"),
    }


def test_drift_is_told_from_chance() -> None:
    alike: list[float] = []
    for size in (20, 2000):
        parts = sites(**{name: {"x": CHANCE.normal(0, 1, size), "y": ["a"] * size} for name in ("one", "two")})
        found: list[ColumnProfile] = [part.columns["x"] for part in parts]
        index, chance = drift(*found)
        alike.append(index)
        assert index < 0.25 + chance
    assert alike[0] > alike[1]
    moved = sites(one={"x": AGE[0], "y": ILL[0]}, two={"x": AGE[1] + 15, "y": ILL[1]})
    findings = compared(moved, task="classes")
    assert [(each.name, each.column) for each in findings] == [("drift", "x")]
    assert findings[0].figures["psi"] > 1
