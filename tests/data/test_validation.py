"""The validation split: disjoint from the test set and from training, of every class alike, the same for a seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.data import Dataset, PartitionSettings, Population, in_memory, share_out
from steelyard.errors import UserError

OVERLAPPING = {
    "scheme": "table",
    "table": [[20, 20, 20]] * 3,
    "clients": None,
    "overlap": True,
    "test": "held-out",
    "test_labels": "all",
}
LAYOUTS = {
    "local tests": {},
    "held-out tests": {"test": "held-out"},
    "a server with rows of its own": {"server": "fraction", "server_report": "apart"},
    "a server on the test part": {"server": "held-out"},
    "a server on half of the test part": {"test": "held-out", "server": "held-out", "server_report": "apart"},
    "a server that reports on what it weighs": {"server": "held-out", "server_report": "same", "test": "none"},
    "shards": {"scheme": "shard", "test": "held-out"},
    "clients that share rows": OVERLAPPING,
}


def made(rows: int = 120, held_out: int = 30, classes: int = 3) -> Dataset:
    labels = np.arange(rows) % classes
    return in_memory(
        np.arange(rows, dtype=np.float32)[:, None], labels, held_out=np.arange(rows) >= rows - held_out, classes=classes
    )


def partition(**fields: object) -> PartitionSettings:
    return PartitionSettings.model_validate({"scheme": "iid", "clients": 3, **fields})


def rows_of(population: Population) -> dict[str, set[int]]:
    parts = {
        "train": [client.train for client in population.clients],
        "test": [client.test for client in population.clients],
        "weighs": [population.server],
        "reports": [population.report],
    }
    return {name: set(np.concatenate(rows).tolist()) for name, rows in parts.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_the_test_set_is_in_any_part(layout):
    fields = LAYOUTS[layout]
    whole = rows_of(share_out(made(), partition(**fields), 3))
    split = rows_of(share_out(made(), partition(**fields, validation=0.2), 3))
    tested = whole["test"] | whole["reports"] | (whole["weighs"] if fields.get("server") == "held-out" else set())
    assert tested, "the layout has no test set to keep away from"
    used = split["train"] | split["test"] | split["weighs"] | split["reports"]
    assert not used & tested
    held = (split["test"] | split["weighs"] | split["reports"]) - whole["weighs"]
    assert held, "nothing is held back"
    assert held <= whole["train"]
    assert not held & split["train"]
    assert split["train"] < whole["train"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_weigh_do_not_report_unless_they_are_meant_to(layout):
    split = rows_of(share_out(made(), partition(**LAYOUTS[layout], validation=0.3), 1))
    if LAYOUTS[layout].get("server_report") == "same":
        assert split["weighs"] == split["reports"]
    else:
        assert not split["weighs"] & (split["reports"] | split["test"])
    assert bool(split["reports"]) == (LAYOUTS[layout].get("server_report", "none") != "none")
    assert bool(split["weighs"]) == (LAYOUTS[layout].get("server", "none") != "none")


def test_each_class_gives_its_share_by_hand():
    # One client: 8 rows of class 0, 8 of class 1, 4 of class 2; a quarter of 20 is 5: 2, 2 and 1.
    labels = np.array([0] * 8 + [1] * 8 + [2] * 4)
    dataset = in_memory(np.zeros((20, 1), dtype=np.float32), labels, held_out=None)
    population = share_out(dataset, partition(clients=1, test="none", validation=0.25, server="none"), 0)
    (client,) = population.clients
    assert np.bincount(labels[client.train]).tolist() == [6, 6, 3]
    # test = none: clients have no test rows, also none for validation.
    assert client.test.tolist() == []
    apart = partition(clients=1, test="local", test_fraction=0.01, validation=0.25)
    (client,) = share_out(dataset, apart, 0).clients
    assert len(client.test) == 5  # 0.25 · 19 = 4.75


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.floats(0.01, 0.99), st.integers(0, 3), st.sampled_from(["iid", "shard", "dirichlet"]))
def test_train_and_validation_are_what_was_trained_on(clients, share, seed, scheme):
    dataset = made(300, 60)
    fields = {"scheme": scheme, "clients": clients, "alpha": 5.0, "minimum": 6}
    whole = share_out(dataset, partition(**fields), seed)
    split = share_out(dataset, partition(**fields, validation=share), seed)
    for before, after in zip(whole.clients, split.clients, strict=True):
        assert sorted([*after.train.tolist(), *after.test.tolist()]) == before.train.tolist()
        count = len(before.train)
        assert len(after.test) == min(max(1, int(share * count + 0.5)), count - 1)
    again = share_out(dataset, partition(**fields, validation=share), seed)
    assert [c.test.tolist() for c in again.clients] == [c.test.tolist() for c in split.clients]


def test_seeds_draw_other_rows():
    first, second = (share_out(made(), partition(validation=0.3, seed=seed), 0) for seed in (1, 2))
    assert [c.test.tolist() for c in first.clients] != [c.test.tolist() for c in second.clients]


def test_a_table_is_scaled_by_what_is_left_to_train_on():
    dataset = made()
    split = share_out(dataset, partition(validation=0.5, test="held-out"), 0)
    spoilt = dataset.features.clone()
    spoilt[torch.from_numpy(np.flatnonzero(dataset.held_out))] = float("nan")
    same = share_out(replace(dataset, features=spoilt), partition(validation=0.5, test="held-out"), 0)
    for one, other in zip(split.clients, same.clients, strict=True):
        assert np.array_equal(one.train, other.train)
        assert np.array_equal(one.test, other.test)
        assert torch.equal(split.dataset.inputs(one.train), same.dataset.inputs(other.train))
        assert torch.equal(split.dataset.inputs(one.test), same.dataset.inputs(other.test))


def test_the_run_says_that_no_test_set_was_used():
    notes = share_out(made(), partition(validation=0.2, test="held-out"), 0).notes
    assert "tested on a validation split, 18 of 90 training rows; no test set" in notes


def test_a_client_left_with_nothing_is_refused():
    shared = {**OVERLAPPING, "table": [[30, 0, 0], [2, 0, 0]], "minimum": 2}
    dataset = made(120, 30)  # 30 rows of class 0 to train on: the first client holds all of them, and keeps one
    with pytest.raises(UserError, match=r"partition\.validation: got 0\.97, which leaves client-001 nothing to train"):
        share_out(dataset, partition(**shared, test_samples=3, validation=0.97), 0)


def test_one_row_each_is_too_few_for_a_server_that_weighs_on_half():
    with pytest.raises(UserError, match="allowed: a larger share"):
        share_out(made(), partition(server="held-out", validation=0.01), 0)
