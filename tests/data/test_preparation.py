"""What rows went through before training is written down, and gives the same bits for rows that come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from tests.kit import assert_refused

from steelyard import Experiment, in_memory
from steelyard.data import Dataset, DataSettings, PartitionSettings, load, new_rows, share_out
from steelyard.data.columns import by_name, table_dataset
from steelyard.data.dataset import Population
from steelyard.data.mending import mended
from steelyard.data.preparation import Preparation
from steelyard.data.scaling import normalised, preparation_of
from steelyard.data.site_sums import SiteColumns, site_preparation
from steelyard.data.tables import Table, read_tables
from steelyard.experiment.loading import build

WARDS = pandas.DataFrame(
    {
        "ward": ["a", "b"] * 8,
        "age": [30.0 + place for place in range(15)] + [None],
        "dose": [0.1 * place if place % 5 else -9 for place in range(16)],
        "drug": ["x", "y", None, "z"] * 4,
        "note": ["seen"] * 16,
        "ill": ["no", "yes"] * 8,
    }
)


USUAL = {"path": "wards.csv", "labels": "ill", "owner": "ward", "ignore": ["note"]}


def unshared(**fields: Any) -> Dataset:
    given = {**USUAL, **fields}
    settings: Any = DataSettings(source="csv", **given)
    table = mended(Table(Path("wards.csv"), WARDS), settings.columns, settings.owner)
    return table_dataset(table, settings)


def wards(**fields: Any) -> Population:
    return share_out(unshared(**fields), PartitionSettings(scheme="natural"), 1)


def again(population: Population) -> Preparation:
    """What a run would have written of a population."""
    return Preparation.model_validate_json(preparation_of(population).model_dump_json())


def frame(**changes: Any) -> Table:
    return Table(Path("new.csv"), WARDS.assign(**changes))


@pytest.mark.parametrize("normalise", ["unit", "standard", "client"])
@pytest.mark.parametrize("missing", ["mean", "zero"])
def test_rows_of_a_table_come_out_as_training_saw_them(normalise: str, missing: str):
    population = wards(
        normalise=normalise, missing=missing, columns={"dose": {"missing": [-9]}}, indicators=["drug", "dose"]
    )
    found = new_rows.of_table(frame(), again(population))
    assert torch.equal(found.features, population.dataset.features)
    assert found.notes == ()
    columns = again(population).columns
    assert [column.kind for column in columns] == ["number", "number", "category"]
    assert (columns[0].low, columns[0].high, columns[2].levels) == (30, 44, ["x", "y", "z"])
    assert again(population).target.names == ["no", "yes"]


def test_cells_are_read_as_the_settings_of_training_say():
    age: dict[str, Any] = {"factor": {"a": 0.1}, "offset": 1}
    columns = {"age": age, "dose": {"missing": [-9], "range": [0, 1.2]}, "drug": {"synonyms": {"x": ["y"]}}}
    population = wards(columns=columns)
    prepared, seen = again(population), population.dataset.features
    found = new_rows.of_table(frame(), prepared)
    assert torch.equal(found.features, seen)
    assert prepared.columns[2].levels == ["x", "z"]
    # one site alone, named by a column or by its name
    some = Table(Path("new.csv"), WARDS[WARDS["ward"] == "a"].reset_index(drop=True))
    assert torch.equal(new_rows.of_table(some, prepared).features, seen[::2])
    unnamed = Table(some.path, some.frame.drop(columns="ward"))
    assert torch.equal(new_rows.of_table(unnamed, prepared, "a").features, seen[::2])


def test_what_nodes_tell_says_how_their_rows_are_read():
    fields: dict[str, Any] = {"columns": {"age": {"offset": 1}, "dose": {"missing": [-9]}}, "indicators": ["drug"]}
    data = by_name(unshared(**fields))
    told = SiteColumns.of("a", data, np.arange(len(data)), 1).sums
    whole: dict[str, Any] = {"data": {"source": "csv", **USUAL, **fields}, "partition": {"scheme": "natural"}}
    table = build(whole).table
    assert table is not None
    prepared = site_preparation(table, told, data.shape)
    assert prepared.model_dump(exclude={"known"}) == data.described.model_dump(exclude={"known"})


def test_hospitals_with_rows_at_the_server_come_out_as_training_saw_them():
    experiment: Any = Experiment.load("hospitals")
    population = share_out(load(experiment.data), experiment.partition, 1)
    table = read_tables([experiment.data.path], experiment.data.owner, {})
    assert torch.equal(new_rows.of_table(table, again(population)).features, population.dataset.features)
    assert again(population).target.names == ["target <= 0", "target > 0"]


def images(folder: Path) -> Dataset:
    from PIL import Image

    for number in range(6):
        place = folder / "cats and dogs" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return load(DataSettings(source="images", path=folder / "cats and dogs", size=8, normalise="standard"))


def test_images_come_out_as_training_saw_them(tmp_path: Path):
    data = images(tmp_path)
    prepared = Preparation.model_validate_json(data.described.model_dump_json())
    found = new_rows.of_images([tmp_path / "cats and dogs"], prepared)
    assert torch.equal(found.features, data.features)
    assert (prepared.form, prepared.shape, prepared.target.names) == ("images", [3, 8, 8], ["cat", "dog"])


def test_arrays_come_out_as_training_saw_them_and_numbers_out_of_the_range_are_counted():
    plain = load(DataSettings())
    for normalise in ("unit", "standard"):
        settings: Any = DataSettings(source="memory", normalise=normalise)
        population = share_out(normalised(plain, settings), PartitionSettings(clients=4), 1)
        found = new_rows.of_arrays(plain.features, again(population))
        assert torch.equal(found.features, population.dataset.features)
    prepared = again(share_out(plain, PartitionSettings(clients=4), 1))
    assert new_rows.of_arrays(plain.features, prepared).notes == ()
    bright = new_rows.of_arrays(16 * plain.features[:2], prepared).notes
    assert len(bright) == 1
    assert "out of the range seen in training, 0 to 1" in bright[0]
    assert_refused(lambda: new_rows.of_arrays(plain.features[:, :, 1:], prepared), "(1, 7, 8)", "(1, 8, 8)")
    words = in_memory(plain.features, ["even" if label % 2 == 0 else "odd" for label in plain.labels.tolist()])
    assert words.described.target.names == ["even", "odd"]


def test_what_a_new_table_has_wrong_is_said_by_name():
    prepared = again(wards(normalise="standard"))
    assert_refused(lambda: new_rows.of_table(Table(Path("new.csv"), WARDS.drop(columns="age")), prepared), "'age'")
    assert_refused(lambda: new_rows.of_table(frame(age="old"), prepared), "new.csv", "'age'", "'old'")
    changed = frame(age=[100.0 + row for row in range(16)], drug=["x", "w"] * 8, colour="red")
    changed = Table(changed.path, changed.frame[["drug", "dose", "age", "colour"]])
    others, order, drug, age = sorted(new_rows.of_table(changed, prepared).notes, key=len)
    told = "\n".join(new_rows.of_table(changed, prepared).notes)
    for part in ("colour", "another order", "'drug' holds w", "'age'", "16 of 16", "30 to 44", "100 in row 1", "unit?"):
        assert part in told, part
    assert len({others, order, drug, age}) == 4
    # an unknown category counts as an empty one, and an empty cell has the mean
    empty = new_rows.of_table(frame(drug=[None] * 16, age=[np.nan] * 16), prepared).features
    assert torch.equal(new_rows.of_table(frame(drug="w", age=[np.nan] * 16), prepared).features, empty)
    assert (empty[:, 0] == 0).all()


def test_a_site_that_did_not_train_scales_by_its_new_rows_and_one_that_did_by_its_own():
    population = wards()
    prepared, seen = again(population), population.dataset.features
    no_ward = Table(Path("new.csv"), WARDS.drop(columns="ward"))
    assert torch.equal(new_rows.of_table(no_ward, prepared, "b").features[1::2], seen[1::2])
    new = new_rows.of_table(frame(ward=["a", "c"] * 8), prepared)
    assert torch.equal(new.features[::2], seen[::2])
    assert new.features[1::2, 0].mean() == pytest.approx(0, abs=1e-6)
    assert len(new.notes) == 1
    assert "'c' are filled and scaled by these 8 rows" in new.notes[0]
    assert_refused(lambda: new_rows.of_table(no_ward, prepared, "d"), "'d'", "a, b")
    hidden = prepared.without_rows()
    assert (hidden.sites, hidden.columns[0].high) == ({}, None)
    assert_refused(lambda: new_rows.of_table(no_ward, hidden, "a"), "no scale of a single site")
