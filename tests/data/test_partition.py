"""Partitions: nothing lost or doubled, every client has its share, the same seed gives the same rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.data import Dataset, PartitionSettings, Population, in_memory, share_out
from steelyard.data.files import digest, fingerprint
from steelyard.data.partition import split_locally


def made(rows: int, classes: int = 5, owners: int = 0, test: int = 0, seed: int = 0) -> Dataset:
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, classes, size=rows)
    labels[:classes] = np.arange(classes)
    people = [f"user-{number:02d}" for number in chance.integers(0, owners, size=rows)] if owners else None
    return in_memory(
        np.arange(rows, dtype=np.float32)[:, None],
        labels,
        people,
        held_out=np.arange(rows) >= rows - test if test else None,
        classes=classes,
    )


def cut(dataset: Dataset, seed: int = 0, **fields: Any) -> Population:
    return share_out(dataset, PartitionSettings.model_validate(fields), seed)


def all_rows(population: Population) -> list[int]:
    return sorted(np.concatenate([np.concatenate([c.train, c.test]) for c in population.clients]).tolist())


def same(one: Population, other: Population) -> bool:
    return one.names == other.names and all(
        np.array_equal(a.train, b.train) and np.array_equal(a.test, b.test)
        for a, b in zip(one.clients, other.clients, strict=True)
    )


schemes = st.one_of(
    st.builds(dict, scheme=st.just("iid"), size_spread=st.floats(0, 2)),
    st.builds(dict, scheme=st.just("shard"), size_spread=st.floats(0, 2), shards_per_client=st.integers(1, 4)),
    st.builds(dict, scheme=st.just("dirichlet"), alpha=st.floats(0.3, 50), size_spread=st.floats(0, 0.5)),
    st.builds(dict, scheme=st.just("dirichlet"), alpha=st.floats(0.5, 50), self_balancing=st.just(True)),
    st.builds(dict, scheme=st.just("quantity"), alpha=st.floats(0.05, 50)),
)


@settings(max_examples=80, deadline=None)
@given(schemes, st.integers(1, 12), st.integers(120, 300), st.integers(0, 3), st.floats(0.05, 0.6))
def test_every_row_goes_to_exactly_one_client(scheme, clients, rows, seed, fraction):
    dataset = made(rows)
    chosen = PartitionSettings(**scheme, clients=clients, test_fraction=fraction)
    population = share_out(dataset, chosen, seed)
    assert all_rows(population) == list(range(rows))
    assert population.names == sorted(population.names) == [f"client-{n:03d}" for n in range(clients)]
    for client in population.clients:
        total = len(client.train) + len(client.test)
        assert len(client.test) == min(max(1, int(fraction * total + 0.5)), total - 1)
        assert np.array_equal(client.train, np.sort(client.train))
    assert same(population, share_out(dataset, chosen, seed))
    assert same(population, share_out(dataset, chosen.model_copy(update={"seed": seed}), seed + 99))


def test_a_client_keeps_a_row_to_train_on():
    assert [len(rows) for rows in split_locally(np.arange(2), 0.9, "a", 0)] == [1, 1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(0, 5))
def test_a_table_is_met_exactly(lines, seed):
    lines = [[line[0] + 2, *line[1:]] for line in lines]
    labels = np.repeat([0, 1, 2], 40)
    population = cut(in_memory(np.zeros((120, 1)), labels), seed, scheme="table", table=lines, test="none")
    for line, client in zip(lines, population.clients, strict=True):
        assert np.bincount(labels[client.train], minlength=3).tolist() == line
    rows = all_rows(population)
    assert len(rows) == len(set(rows)) == sum(map(sum, lines))


def test_two_shards_of_one_label_each_bound_the_labels():
    labels = np.repeat(np.arange(10), 60)
    first, second = (
        cut(in_memory(np.zeros((600, 1)), labels), seed, scheme="shard", clients=10, shard_size=30, test="none")
        for seed in (3, 4)
    )
    # 20 shards of 30 cut each class of 60 into exactly two shards, so each shard holds one label.
    for client in first.clients:
        counts = np.bincount(labels[client.train], minlength=10)
        assert sorted(counts[counts > 0].tolist()) in ([30, 30], [60])
    assert not same(first, second)


@pytest.mark.parametrize("samples", [None, 60])
def test_a_small_alpha_gives_fewer_labels_than_a_large_one(samples: int | None):
    dataset = made(2000, classes=10)

    def labels_seen(alpha: float) -> float:
        population = cut(dataset, scheme="dirichlet", clients=20, alpha=alpha, samples=samples)
        return float(np.mean([len(np.unique(population.train_labels(client))) for client in population.clients]))

    assert labels_seen(0.1) < 6 < 9 < labels_seen(100)


def test_natural_keeps_people_apart_and_drops_small_ones():
    owners = ["b"] * 3 + ["a"] * 5 + ["c"] * 2
    dataset = in_memory(np.zeros((10, 1)), [0, 1] * 5, owners)
    population = cut(dataset, scheme="natural", minimum=3)
    assert population.names == ["a", "b"]
    assert sorted([*population.clients[0].train, *population.clients[0].test]) == [3, 4, 5, 6, 7]
    assert population.notes == ("people with fewer than 3 rows, left out: 1 of 3",)
    # at most so many rows of each, its own
    few = cut(dataset, scheme="natural", samples=4, test="none")
    assert [len(client.train) for client in few.clients] == [4, 3, 2]
    assert [set(dataset.owners[client.train].tolist()) for client in few.clients] == [{"a"}, {"b"}, {"c"}]


def test_given_keeps_the_users_own_split():
    owners = ["u1", "u2", "u1", "u1", "u2", "u3"]
    dataset = in_memory(np.zeros((6, 1)), [0] * 6, owners, held_out=[False, False, False, True, True, True])
    population = cut(dataset, scheme="given", test="held-out")
    assert {c.client: (c.train.tolist(), c.test.tolist()) for c in population.clients} == {
        "u1": ([0, 2], [3]),
        "u2": ([1], [4]),
    }
    assert population.notes == ("users without rows to train on, left out: 1",)
    assert cut(dataset.take(np.arange(5)), scheme="given", test="held-out").notes == ()


def test_held_out_tests_follow_the_labels_of_the_client():
    labels = np.concatenate([np.repeat([0, 1], 60), np.tile([0, 1], 20)])
    dataset = in_memory(np.zeros((160, 1)), labels, held_out=np.arange(160) >= 120)
    population = cut(dataset, scheme="table", table=[[30, 10], [10, 30]], test="held-out", test_samples=8)
    for client, counts in zip(population.clients, ([6, 2], [2, 6]), strict=True):
        assert np.bincount(labels[client.test]).tolist() == counts
        assert client.test.min() >= 120
    assert not set(population.clients[0].test) & set(population.clients[1].test)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.integers(1, 9), st.sampled_from(["iid", "shard"]), st.integers(0, 3))
def test_slices_of_the_test_part_are_disjoint_and_complete(clients, count, scheme, seed):
    fields = {**SLICES, "scheme": scheme, "clients": clients, "test_samples": count, "test_labels": "all"}
    population = cut(made(60 + clients * count, test=clients * count), seed, **fields)
    for number, client in enumerate(population.clients):
        assert client.test.tolist() == list(range(60 + number * count, 60 + (number + 1) * count))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 0.9), st.sampled_from(["iid", "shard", "natural"]), st.integers(0, 3))
def test_the_server_never_holds_a_row_of_a_client(fraction, scheme, seed):
    clients = None if scheme == "natural" else 4
    fields = {"scheme": scheme, "clients": clients, "server": "fraction", "server_fraction": fraction}
    population = cut(made(200, owners=4), seed, **fields)
    assert len(population.server) == round(fraction * 200)
    assert sorted([*all_rows(population), *population.server.tolist()]) == list(range(200))


def test_the_server_takes_the_held_out_part_and_reports_apart_from_what_weighs_unless_asked_otherwise():
    dataset, held = made(100, test=20), list(range(80, 100))
    fields = {"scheme": "iid", "clients": 4, "server": "held-out"}
    population = cut(dataset, **fields, test="none")
    assert (population.server.tolist(), all_rows(population)) == (held, list(range(80)))
    both = cut(dataset, **fields, test="held-out")
    assert both.notes == ("the server's test set and the clients' local test sets share rows",)
    assert all_rows(both) == list(range(100))
    apart = cut(dataset, **fields, test="held-out", server_report="apart")
    assert (sorted([*apart.server, *apart.report]), len(apart.server)) == (held, 10)
    tested = {row for client in apart.clients for row in client.test.tolist()}
    assert tested <= set(apart.report.tolist())
    same = cut(dataset, **fields, test="held-out", server_report="same")
    assert same.server.tolist() == same.report.tolist() == held


def test_overlap_is_refused_unless_asked_for_and_then_noted():
    dataset = in_memory(np.zeros((15, 1)), [0] * 10 + [1] * 5)
    fields = {"scheme": "table", "table": [[8, 2], [8, 3]], "test": "none"}
    assert_refused(lambda: cut(dataset, **fields), "partition.table: asks for 16 rows of class 0")
    population = cut(dataset, **fields, overlap=True)
    assert population.notes == ("class 0: 16 rows asked for, 10 there: 6 drawn with overlap",)
    first, second = (set(client.train.tolist()) for client in population.clients)
    assert (len(first), len(second), len(first & second)) == (10, 11, 6)


def test_some_clients_test_for_all(monkeypatch: pytest.MonkeyPatch):
    every, some = (cut(made(200), 3, scheme="iid", clients=40, test_clients=count) for count in (None, 7))
    assert sum(len(rows.test) > 0 for rows in some.clients) == 7
    assert (some.testable, every.testable) == (40, None)
    assert some.notes[-1].startswith("7 of 40 clients test")
    for rows in some.clients:
        whole = every.by_name[rows.client]
        assert rows.train.tolist() == whole.train.tolist()
        assert rows.test.tolist() in ([], whole.test.tolist())
    monkeypatch.setattr("steelyard.data.partition.TESTED", 5)
    for many, tested in ((40, 40), (39, 5)):
        monkeypatch.setattr("steelyard.data.partition.MANY", many)
        found = cut(made(200), 3, scheme="iid", clients=40)
        assert sum(len(rows.test) > 0 for rows in found.clients) == tested


@pytest.mark.parametrize("each", [1, 3])
def test_labels_gives_each_client_so_many_and_shares_a_label_equally(each):
    dataset = made(600)
    population = cut(dataset, 3, scheme="labels", clients=8, labels_per_client=each)
    assert all_rows(population) == list(range(600))
    labels = dataset.labels.numpy()
    counts = np.array([np.bincount(labels[np.concatenate([c.train, c.test])], minlength=5) for c in population.clients])
    assert (counts > 0).sum(axis=1).tolist() == [each] * 8
    assert (counts[np.arange(8), np.arange(8) % 5] > 0).all()
    for held in counts.T:
        assert np.ptp(held[held > 0]) <= 1


def test_self_balancing_ends_no_client_far_above_its_part():
    dataset = made(2000, classes=40)

    def biggest(seed: int, **fields: bool) -> int:
        population = cut(dataset, seed, scheme="dirichlet", clients=10, alpha=0.1, minimum=2, **fields)
        return max(len(c.train) + len(c.test) for c in population.clients)

    # Who has 200 rows gets none of the labels that follow, so at most one label of about 50 comes on top.
    assert max(biggest(seed, self_balancing=True) for seed in range(5)) < 275 < max(map(biggest, range(5)))


@pytest.mark.parametrize(
    "fields",
    [
        {"scheme": "quantity"},
        {"scheme": "iid", "size_spread": 1.5},
        {"scheme": "shard", "size_spread": 1.5},
        {"scheme": "dirichlet", "alpha": 50, "size_spread": 1.5, "minimum": 2},
    ],
)
def test_sizes_are_of_all_kinds_where_they_are_drawn(fields: dict[str, Any]):
    fields = {"clients": 10, "minimum": 20, **fields}
    sizes = sorted(len(client.train) + len(client.test) for client in cut(made(3000), 2, **fields).clients)
    assert sizes[0] >= fields["minimum"]
    assert sizes[-1] > 5 * sizes[0]


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"scheme": "noniid-#label3", "clients": 4}, {"scheme": "labels", "clients": 4, "labels_per_client": 3}),
        (
            {"scheme": "PathologicalPartitioner", "num_partitions": 4, "num_classes_per_partition": 3},
            {"scheme": "labels", "clients": 4, "labels_per_client": 3},
        ),
        (
            {"scheme": "noniid-labeldir", "clients": 4, "beta": 0.3},
            {"scheme": "dirichlet", "clients": 4, "alpha": 0.3, "self_balancing": True},
        ),
    ],
)
def test_splits_go_by_the_names_that_others_use(given, own):
    assert PartitionSettings(**given) == PartitionSettings(**own)


MADE = made(100)
TARGETS = in_memory(np.zeros((50, 1)), np.linspace(0, 1, 50))
PEOPLE = made(100, owners=5)
TOKENS = in_memory(np.ones((20, 6), dtype=int), np.arange(20) % 2, tokens=True)
KEPT = {"scheme": "iid", "clients": 2, "server": "fraction"}
SLICES = {"scheme": "iid", "clients": 4, "test": "held-out", "test_samples": 3, "test_order": "stored"}


@pytest.mark.parametrize(
    ("dataset", "fields", "told"),
    [
        (MADE, {"scheme": "iid", "clients": 60}, "partition.clients: got 60 with at least 2 rows each"),
        (MADE, {"scheme": "shard", "clients": 10, "shard_size": 6}, "partition.shard_size: got 6 for each of 20"),
        (MADE, {"scheme": "dirichlet", "clients": 20, "alpha": 0.01, "minimum": 5}, "partition.minimum: got 5"),
        (
            MADE,
            {"scheme": "natural"},
            "allowed: iid, shard, labels, dirichlet, quantity, table (the source does not know whose rows they are)",
        ),
        (MADE, {"scheme": "iid", "clients": 2, "server": "held-out"}, "partition.server: got 'held-out'"),
        (made(60, test=10), SLICES, "test_samples: got 3 for 4 clients"),
        (
            TARGETS,
            {"scheme": "dirichlet", "clients": 2},
            "with memory; allowed: iid, shard, quantity (this data has no classes)",
        ),
        (TARGETS, {**KEPT, "server_balance": "classes"}, "partition.server_balance: got 'classes', but memory has"),
        (MADE, {**KEPT, "server_fraction": 0.01, "server_report": "apart"}, "got 'apart' with 1 server rows"),
        (
            MADE,
            {**KEPT, "server_report": "apart", "server_weighs": 10},
            "partition.server_weighs: got 10; allowed: at most 9",
        ),
        (PEOPLE, {"scheme": "natural", "clients": 9}, "partition.clients: got 9; allowed: at most 5 (people of memory"),
        (PEOPLE, {"scheme": "natural", "minimum": 60}, "partition.minimum: got 60; allowed: at most 2"),
        (
            MADE,
            {"scheme": "labels", "clients": 2, "labels_per_client": 9},
            "partition.labels_per_client: got 9; allowed: at most 5",
        ),
        (
            MADE,
            {"scheme": "labels", "clients": 50, "labels_per_client": 2, "minimum": 9},
            "partition.minimum: got 9, and a client with 2 labels has",
        ),
        (
            MADE,
            {"scheme": "table", "table": [[2, 2]]},
            "got 'lines of 2 counts' with memory; allowed: lines of 5 counts",
        ),
        (MADE, {"scheme": "table", "table": [[99, 0, 0, 0, 0]]}, "line 0 asks for 99 rows of class 0; allowed"),
        (
            MADE,
            {"scheme": "iid", "clients": 2, "samples": 60},
            "got 60 for each of 2 clients; allowed: at most 50",
        ),
        (
            MADE,
            {"scheme": "shard", "clients": 5, "shard_size": 2, "minimum": 5},
            "partition.shard_size: got 2; allowed: at least 3",
        ),
        (
            made(60, test=10),
            {"scheme": "iid", "clients": 4, "test": "held-out", "test_samples": 11},
            "partition.test_samples: got 11 for 4 clients; allowed: 1 to 10",
        ),
        (
            made(60, test=10),
            {**KEPT, "server": "held-out", "server_report": "apart", "test": "none", "validation": 0.05},
            "partition.validation: holds back one row of each client",
        ),
        (MADE, {"scheme": "iid", "clients": 2, "validation": 0.001}, "got 0.001, less than one of 80 training"),
        (TOKENS, {"scheme": "iid", "clients": 2, "noise": 0.1}, "partition.noise: got 0.1"),
        (PEOPLE, {"scheme": "given", "test": "none"}, "(the source does not split its users' rows)"),
    ],
)
def test_what_the_data_cannot_give_is_refused_in_one_line(dataset: Dataset, fields: dict[str, object], told: str):
    assert_refused(lambda: cut(dataset, **fields), told)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, [4, 3, 3, 3, 3]),
        ({"samples": 2}, [2] * 5),
        ({"rows": "all"}, [5, 5, 5, 4, 4]),
        ({"scheme": "dirichlet", "samples": 2, "alpha": 0.1}, [2] * 5),
    ],
)
def test_sizes_by_hand(fields: dict[str, object], sizes: list[int]):
    population = cut(made(23, test=7), 1, **{"scheme": "iid", "clients": 5, "test": "none", **fields})
    assert [len(client.train) for client in population.clients] == sizes
    assert len(set(all_rows(population))) == sum(sizes)
    assert population.notes == (("6 of 16 rows go to no client",) if sum(sizes) == 10 else ())


def test_a_fingerprint_names_what_changed():
    fields = {"scheme": "iid", "clients": 3, "server": "held-out", "test": "none"}
    population = cut(made(60, test=9), **fields)
    data, first = population.dataset, population.clients[0]
    before, features = fingerprint(population), data.features.clone()
    features[7] += 1e-3
    relabelled = replace(first, train_labels=data.labels[first.train])
    for changed, where in (
        (cut(made(60, test=9), **fields), None),
        (replace(population, dataset=replace(data, features=features)), "features"),
        (replace(population, dataset=replace(data, marks={"sharp": np.ones(60)})), "features"),
        (replace(population, dataset=replace(data, labels=data.labels.flip(0))), "labels"),
        (replace(population, server=population.server[1:]), "clients' rows"),
        (replace(population, clients=[relabelled, *population.clients[1:]]), "clients' rows"),
        (cut(made(60, test=9), 1, **fields), "clients' rows"),
    ):
        after = fingerprint(changed)
        assert [name for name in before if after[name] != before[name]] == ([where] if where else [])
    assert before["samples"] == "60"
    # runs that were recorded long ago are held against it: sha256(b"<f4(2,)" + 1 and 2 as bytes + b"4:None3:a\nb")
    assert digest([np.array([1, 2], dtype=np.float32), None, np.array(["a", "b"])]) == "7392536626fdd90d"


# the validation split -------------------------------------------------------------------------------------------------

OVERLAPPING = {"scheme": "table", "table": [[20, 20, 20]] * 3, "clients": None, "overlap": True}
OVERLAPPING |= {"test": "held-out", "test_labels": "all"}
LAYOUTS = {
    "local tests": {},
    "held-out tests": {"test": "held-out"},
    "a server with rows of its own": {"server": "fraction", "server_report": "apart"},
    "a server on half of the test part": {"test": "held-out", "server": "held-out", "server_report": "apart"},
    "a server that reports on what it weighs": {"server": "held-out", "server_report": "same", "test": "none"},
    "clients that share rows": OVERLAPPING,
}


def striped(rows: int = 120, held_out: int = 30) -> Dataset:
    return in_memory(np.zeros((rows, 1)), np.arange(rows) % 3, held_out=np.arange(rows) >= rows - held_out)


def split(seed: int = 0, dataset: Dataset | None = None, **fields: Any) -> Population:
    return cut(dataset or striped(), seed, **{"scheme": "iid", "clients": 3, **fields})


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
    whole, held_back = (rows_of(split(3, **fields, validation=share)) for share in (None, 0.2))
    tested = whole["test"] | whole["reports"] | (whole["weighs"] if fields.get("server") == "held-out" else set())
    assert tested, "the layout has no test set to keep away from"
    used = held_back["train"] | held_back["test"] | held_back["weighs"] | held_back["reports"]
    assert not used & tested
    held = (held_back["test"] | held_back["weighs"] | held_back["reports"]) - whole["weighs"]
    assert held, "nothing is held back"
    assert held <= whole["train"]
    assert not held & held_back["train"]
    assert held_back["train"] < whole["train"]
    # rows that weigh do not report unless they are meant to
    if fields.get("server_report") == "same":
        assert held_back["weighs"] == held_back["reports"]
    else:
        assert not held_back["weighs"] & (held_back["reports"] | held_back["test"])
    assert bool(held_back["reports"]) == (fields.get("server_report", "none") != "none")


def test_each_class_gives_its_share_by_hand():
    # One client: 8 rows of class 0, 8 of class 1, 4 of class 2; a quarter of 20 is 5: 2, 2 and 1.
    labels = np.array([0] * 8 + [1] * 8 + [2] * 4)
    dataset = in_memory(np.zeros((20, 1)), labels)
    (client,) = split(0, dataset, clients=1, test="none", validation=0.25).clients
    assert np.bincount(labels[client.train]).tolist() == [6, 6, 3]
    # test = none: clients have no test rows, also none for validation.
    assert client.test.tolist() == []
    # Without classes it is a share of all rows: of 25 each keeps 5 for the test, and a quarter of 20 is held back.
    halves = split(0, TARGETS, clients=2, validation=0.25)
    assert [(len(client.train), len(client.test)) for client in halves.clients] == [(15, 5)] * 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.floats(0.01, 0.99), st.integers(0, 3), st.sampled_from(["iid", "shard", "dirichlet"]))
def test_train_and_validation_are_what_was_trained_on(clients, share, seed, scheme):
    fields = {"scheme": scheme, "clients": clients, "alpha": 5.0, "minimum": 6}
    whole, held_back = (split(seed, striped(300, 60), **fields, validation=each) for each in (None, share))
    for before, after in zip(whole.clients, held_back.clients, strict=True):
        assert sorted([*after.train.tolist(), *after.test.tolist()]) == before.train.tolist()
        count = len(before.train)
        assert len(after.test) == min(max(1, int(share * count + 0.5)), count - 1)


def test_a_split_that_leaves_nothing_is_refused():
    # 30 rows of class 0 to train on: the first client holds all of them, and keeps one
    fields = {**OVERLAPPING, "table": [[30, 0, 0], [2, 0, 0]], "test_samples": 3, "validation": 0.97}
    told = "partition.validation: got 0.97, which leaves client-001 nothing to train"
    assert_refused(lambda: split(**fields), told)
