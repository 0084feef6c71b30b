"""Sharing a data set out among clients: who trains on which rows, who tests on which, what the server holds.

All chance is named by the seed and a purpose that starts with "partition/", so that, for example, another test
fraction leaves the clients' rows as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.data import schemes
from steelyard.data.dataset import ClientRows, Dataset, Population, Rows
from steelyard.data.flawed import flawed
from steelyard.data.flaws import FlawSettings
from steelyard.data.partition_settings import PartitionSettings, Parts
from steelyard.data.scaling import prepare

MANY, TESTED = 20_000, 10_000
"""Of more clients with test rows than this, so many test, unless the settings say how many."""


def share_out(
    dataset: Dataset, settings: PartitionSettings, seed: int, flaws: Sequence[FlawSettings] = ()
) -> Population:
    """Share out a data set among clients and give some of them flaws; use it once per run, with the run's seed.

    The settings' own seed, where given, comes before `seed`. Clients come in ascending order of their id.

        >>> rows = steelyard.in_memory(numpy.zeros((20, 3)), [0, 1] * 10)
        >>> len(share_out(rows, PartitionSettings(clients=2), seed=1).clients)
        2

    Raises:
        UserError: there are not enough rows, or not those that the scheme needs.
    """
    seed = seed if settings.seed is None else settings.seed
    schemes.check_fits(dataset.capabilities, dataset.name, settings)
    if settings.noise is not None and dataset.tokens:
        raise UserError(
            f"partition.noise: got {settings.noise}, but the rows of {dataset.name} are tokens of a text; allowed: "
            "images or columns of numbers"
        )
    pool, server = _pool(dataset, settings, seed)
    server, report = _report(dataset, server, settings, seed)
    chance = randomness.generator(seed, purpose=f"partition/{settings.scheme}")
    parts = settings.parts(dataset, pool, chance)
    clients, notes = _with_tests(dataset, settings, parts, seed, server)
    if settings.validation is not None:
        clients, server, report, held_notes = hold_back(dataset, settings, settings.validation, clients, server, seed)
        notes = [*notes, *held_notes]
    if len(server) and np.isin(np.concatenate([client.test for client in clients]), server).any():
        notes = [*notes, "the server's test set and the clients' local test sets share rows"]
    clients = sorted(clients, key=lambda client: client.client)
    dataset = prepare(dataset, clients, np.union1d(server, report))
    population = Population(dataset, tuple(clients), server, (*dataset.notes, *notes), report)
    if flaws or settings.noise is not None:
        population = flawed(population, flaws, seed, settings.noise)
    return _some_test(population, settings.test_clients, seed)


def _some_test(population: Population, wanted: int | None, seed: int) -> Population:
    """Return the population with test rows for some clients alone, where that is wanted or there are very many."""
    having = [rows.client for rows in population.clients if len(rows.test)]
    count = wanted if wanted is not None else TESTED if len(having) > MANY else len(having)
    if count >= len(having):
        return population
    chosen = set(randomness.choose(seed, 0, having, count, "partition/tested"))
    clients = tuple(rows if rows.client in chosen else replace(rows, test=rows.test[:0]) for rows in population.clients)
    note = f"{count:,} of {len(having):,} clients test the models, drawn by the seed (partition.test_clients)"
    return replace(population, clients=clients, notes=(*population.notes, note), testable=len(having))


def _pool(dataset: Dataset, settings: PartitionSettings, seed: int) -> tuple[Rows, Rows]:
    """Return the rows that clients may train on, and the rows that the server holds."""
    everything = np.arange(len(dataset))
    held = np.zeros(len(dataset), dtype=np.bool_) if dataset.held_out is None else dataset.held_out
    pool = everything if settings.rows == "all" else everything[~held]
    if settings.server == "held-out":
        return pool, everything[held]
    if settings.server == "fraction":
        count = min(max(1, round(settings.server_fraction * len(pool))), len(pool) - 1)
        mixed = randomness.generator(seed, purpose="partition/server").permutation(pool)
        mixed = _balanced(dataset, settings, mixed)
        return np.sort(mixed[count:]), np.sort(mixed[:count])
    return pool, everything[:0]


def _balanced(dataset: Dataset, settings: PartitionSettings, rows: Rows) -> Rows:
    """Return the rows so that owners or classes take turns, as long as each lasts; else as they are."""
    if settings.server_balance == "none":
        return rows
    of_row = dataset.owners if settings.server_balance == "owners" else dataset.labels.numpy()
    if of_row is None or (settings.server_balance == "classes" and not dataset.classes):
        raise UserError(
            f"partition.server_balance: got '{settings.server_balance}', but {dataset.name} has none; allowed: none"
        )
    index = np.unique(of_row[rows], return_inverse=True)[1].reshape(-1)
    order = np.argsort(index, kind="stable")
    sizes = np.bincount(index)
    turn = np.empty(len(rows), dtype=np.int64)
    turn[order] = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rows[np.argsort(turn, kind="stable")]


def _report(dataset: Dataset, server: Rows, settings: PartitionSettings, seed: int) -> tuple[Rows, Rows]:
    """Return the server's rows that weigh clients, and those that report."""
    if settings.server_report == "same":
        return server, server
    if settings.server_report == "none":
        return server, server[:0]
    if len(server) < 2:
        raise UserError(f"partition.server_report: got 'apart' with {len(server)} server rows; allowed: 2 rows or more")
    mixed = randomness.generator(seed, purpose="partition/report").permutation(server)
    mixed = _balanced(dataset, settings, mixed)
    weighs = len(server) // 2 if settings.server_weighs is None else settings.server_weighs
    if weighs >= len(server):
        raise UserError(
            f"partition.server_weighs: got {weighs}; allowed: at most {len(server) - 1}, so that a row of the server's "
            f"{len(server)} is left to report"
        )
    return np.sort(mixed[:weighs]), np.sort(mixed[weighs:])


def _with_tests(
    dataset: Dataset, settings: PartitionSettings, parts: Parts, seed: int, server: Rows
) -> tuple[list[ClientRows], list[str]]:
    notes = parts.notes
    if settings.test == "local":
        pairs = [
            split_locally(rows, settings.test_fraction, name, seed)
            for name, rows in zip(parts.names, parts.rows, strict=True)
        ]
        return [ClientRows(name, *pair) for name, pair in zip(parts.names, pairs, strict=True)], notes
    tests = [np.zeros(0, dtype=np.int64) for _ in parts.names]
    if settings.test == "held-out" and settings.scheme == "given":
        tests = own_tests(dataset, parts.names)
        untested = sum(not len(test) for test in tests)
        if untested == len(tests):
            raise UserError(
                "partition.test: got 'held-out', but no user has rows both to train and to test on; allowed: none, or "
                "data whose users are in both parts"
            )
        if untested:
            notes = [*notes, f"users without test rows of their own: {untested} of {len(tests)}"]
    elif settings.test == "held-out":
        weighs = server if settings.server_report == "apart" else server[:0]
        tests, found = held_out_tests(dataset, settings, parts.rows, seed, weighs)
        notes = [*notes, *found]
    clients = zip(parts.names, parts.rows, tests, strict=True)
    return [ClientRows(name, np.sort(rows), np.sort(test)) for name, rows, test in clients], notes


# Local test sets: a part of the client's own rows, or rows of the source's test part.


def split_locally(rows: Rows, fraction: float, client: str, seed: int) -> tuple[Rows, Rows]:
    """Split one client's rows at random into train and test: the fraction rounded half up, at least 1, never all."""
    count = min(max(1, math.floor(fraction * len(rows) + 0.5)), len(rows) - 1)
    mixed = randomness.generator(seed, client=client, purpose="partition/split").permutation(np.sort(rows))
    return np.sort(mixed[count:]), np.sort(mixed[:count])


def own_tests(dataset: Dataset, names: list[str]) -> list[Rows]:
    """Return each user's own rows of the source's test part (LEAF)."""
    assert dataset.owners is not None
    assert dataset.held_out is not None
    rows = np.flatnonzero(dataset.held_out).astype(np.int64)
    owners = dataset.owners[rows]
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    starts, ends = np.searchsorted(ordered, names, "left"), np.searchsorted(ordered, names, "right")
    return [rows[order[start:end]] for start, end in zip(starts, ends, strict=True)]


def held_out_tests(
    dataset: Dataset, settings: PartitionSettings, train: list[Rows], seed: int, weighs: Rows
) -> tuple[list[Rows], list[str]]:
    """Deal each client a test set from the source's test part; also return notes on rows that serve two clients.

    Under iid, or with test_labels = all, the rows are dealt at random. Otherwise a client's test rows have the labels
    of its training rows in the same proportion (largest remainder). Rows go to one client only as long as they last.
    The rows in `weighs` are left out: the server weighs on them. With test_order = stored, clients get consecutive
    slices of the test part instead, as papers 000 and 004 cut MNIST's.
    """
    assert dataset.held_out is not None
    pool = np.setdiff1d(np.flatnonzero(dataset.held_out).astype(np.int64), weighs)
    count = settings.test_samples or len(pool) // len(train)
    if not 1 <= count <= len(pool):
        raise UserError(
            f"partition.test_samples: got {settings.test_samples or 'nothing'} for {len(train)} clients; "
            f"allowed: 1 to {len(pool)} (rows in the test part of {dataset.name})"
        )
    if settings.test_order == "stored":
        return _slices(pool, count, len(train), dataset.name), []
    chance = randomness.generator(seed, purpose="partition/held-out")
    if settings.scheme == "iid" or settings.test_labels == "all" or dataset.classes == 0:
        dealt = schemes.deal(chance.permutation(pool), [count] * len(train))
        return dealt, _shared(len(train) * count, dealt)
    labels = dataset.labels.numpy()
    wanted = np.stack(
        [schemes.apportion(np.bincount(labels[rows], minlength=dataset.classes), count) for rows in train]
    )
    parts: list[list[Rows]] = [[] for _ in train]
    for label in range(dataset.classes):
        rows = chance.permutation(pool[labels[pool] == label])
        if wanted[:, label].max() > len(rows):
            raise UserError(
                f"partition.test_samples: {count} rows by the client's labels ask for {wanted[:, label].max()} rows of "
                f"class {label}; allowed: at most {len(rows)} of it, or test_labels = 'all'"
            )
        for part, dealt in zip(parts, schemes.deal(rows, wanted[:, label].tolist()), strict=True):
            part.append(dealt)
    tests = [np.concatenate(part) for part in parts]
    return tests, _shared(len(train) * count, tests)


def _slices(pool: Rows, count: int, clients: int, name: str) -> list[Rows]:
    """Cut the first clients · count rows into one slice of `count` rows after the other, each row in one slice."""
    if count * clients > len(pool):
        raise UserError(
            f"partition.test_samples: got {count} for {clients} clients with test_order 'stored'; allowed: at most "
            f"{len(pool) // clients} (the test part of {name} has {len(pool)} rows, each used once)"
        )
    return list(pool[: count * clients].reshape(clients, count))


def _shared(total: int, tests: list[Rows]) -> list[str]:
    again = total - len(np.unique(np.concatenate(tests)))
    return [f"local test sets: {again} of {total} rows also serve another client"] if again else []


# A validation split: training rows that are tested on in place of the test set, so that settings can be chosen.
# The rows that a partition keeps for testing, at the clients and at the server, are in no part of it.


def hold_back(
    dataset: Dataset, settings: PartitionSettings, share: float, clients: Sequence[ClientRows], server: Rows, seed: int
) -> tuple[list[ClientRows], Rows, Rows, list[str]]:
    """Return clients that test on a share of their training rows, the server's rows that weigh, those that report.

    Each client's share is that of every class, by largest remainder. A server that weighs on test rows (held-out, or
    the same that report) weighs on rows held back instead: on half of each client's, or, where the same rows report, on
    all. No row that is held back is trained on by anybody, also where clients share rows.
    """
    rows = len(np.unique(np.concatenate([client.train for client in clients])))
    if share * rows < 1:
        raise UserError(
            f"partition.validation: got {share:g}, less than one of {rows:,} training rows; allowed: a larger share"
        )
    back = [_drawn(dataset, client, share, seed) for client in clients]
    held = np.unique(np.concatenate(back))
    tests, weighs = back, server
    if settings.server_report == "same":
        weighs = held
    elif settings.server == "held-out":
        weighs, tests = _halves(back, seed)
    report = {"none": held[:0], "same": held, "apart": np.setdiff1d(held, weighs)}[settings.server_report]
    moved = [
        replace(client, train=np.setdiff1d(client.train, held), test=held[:0] if settings.test == "none" else test)
        for client, test in zip(clients, tests, strict=True)
    ]
    for client in moved:
        if not len(client.train):
            raise UserError(
                f"partition.validation: got {share:g}, which leaves {client.client} nothing to train on; allowed: a "
                "smaller share, or clients with more rows"
            )
    return moved, weighs, report, [f"tested on a validation split, {len(held)} of {rows} training rows; no test set"]


def _drawn(dataset: Dataset, client: ClientRows, share: float, seed: int) -> Rows:
    """Return the rows that one client holds back, ascending: the share rounded half up, at least 1, never all.

    A row's draw is its own, so that clients that share a row tend to hold it back both.
    """
    rows = client.train
    count = min(max(1, math.floor(share * len(rows) + 0.5)), len(rows) - 1)
    if count < 1:
        return rows[:0]
    key = randomness.stream_keys(seed, 0, [""], "partition/validation")
    order = np.argsort(randomness.words_at(key, rows.astype(np.uint64)), kind="stable")
    if dataset.classes == 0:
        return np.sort(rows[order[:count]])
    mixed = rows[order]
    labels = dataset.labels.numpy()[mixed]
    wanted = schemes.apportion(np.bincount(labels, minlength=dataset.classes), count)
    parts = [mixed[labels == label][:number] for label, number in enumerate(wanted.tolist()) if number]
    return np.sort(np.concatenate(parts))


def _halves(back: Sequence[Rows], seed: int) -> tuple[Rows, list[Rows]]:
    """Return the half of the rows on which the server weighs, and what each client is left to test on."""
    key = randomness.stream_keys(seed, 0, [""], "partition/validation/server")
    weighs: list[Rows] = []
    for rows in back:
        order = np.argsort(randomness.words_at(key, rows.astype(np.uint64)), kind="stable")
        weighs.append(rows[order[: len(rows) // 2]])
    chosen = np.unique(np.concatenate(weighs))
    if not len(chosen):
        raise UserError(
            "partition.validation: holds back one row of each client, and the server weighs on half of them; allowed: "
            "a larger share"
        )
    return chosen, [np.setdiff1d(rows, chosen) for rows in back]
