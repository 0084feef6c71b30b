"""Local test sets: a part of the client's own rows, or rows of the source's test part."""

from __future__ import annotations

import math

import numpy as np

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.data import schemes
from steelyard.data.dataset import Dataset, Rows
from steelyard.data.settings import PartitionSettings


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
