"""Partition schemes: pure functions that cut a pool of rows into one set of rows per client.

Each takes the rows to share out and their labels, and draws from the generator it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.data.dataset import Rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_ATTEMPTS = 300


def apportion(shares: Floats | Ints, total: int) -> Ints:
    """Cut `total` into whole numbers in proportion to the shares, by largest remainder (ties: the earlier first)."""
    exact = np.asarray(shares, dtype=np.float64) / float(np.sum(shares)) * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def spread_sizes(total: int, shares: Floats, minimum: int) -> Ints:
    """Return sizes that sum to `total`, each at least `minimum`, what is above it in proportion to the shares."""
    if total < minimum * len(shares):
        raise UserError(
            f"partition.clients: got {len(shares)} with at least {minimum} rows each; "
            f"allowed: at most {total // minimum} (the source has {total} rows to share out)"
        )
    return minimum + apportion(shares, total - minimum * len(shares))


def lognormal_shares(count: int, spread: float, chance: np.random.Generator) -> Floats:
    """Return one positive share per client, lognormal with this deviation of the logarithm; all 1 for spread 0."""
    return np.exp(spread * chance.standard_normal(count)) if spread else np.ones(count)


def iid(
    pool: Rows, clients: int, samples: int | None, spread: float, minimum: int, chance: np.random.Generator
) -> list[Rows]:
    """Deal the rows at random: `samples` to each client, or all of them in equal or lognormal parts."""
    if samples is None:
        sizes = spread_sizes(len(pool), lognormal_shares(clients, spread, chance), minimum)
    else:
        _enough(len(pool), clients, samples, "samples")
        sizes = np.full(clients, samples)
    return _cut(chance.permutation(pool), sizes)


def shards(
    pool: Rows,
    labels: NDArray[np.generic],
    clients: int,
    per_client: int,
    size: int | None,
    spread: float,
    minimum: int,
    chance: np.random.Generator,
) -> list[Rows]:
    """Sort the rows by label, cut them into shards and deal `per_client` shards to each client (McMahan et al. 2017).

    Rows of one label are in random order. Shards have `size` rows, or share all rows equally; with a spread, the
    shards of a client grow with its lognormal share. For a regression the rows are sorted by their target.
    """
    count = clients * per_client
    holders = chance.permutation(np.repeat(np.arange(clients), per_client))
    mixed = chance.permutation(len(pool))
    if size is None:
        shares = lognormal_shares(clients, spread, chance)[holders]
        sizes = spread_sizes(len(pool), shares, -(-minimum // per_client))
    else:
        _enough(len(pool), count, size, "shard_size", "shards")
        if size * per_client < minimum:
            raise UserError(
                f"partition.shard_size: got {size}; allowed: at least {-(-minimum // per_client)} (minimum = {minimum})"
            )
        sizes = np.full(count, size)
        mixed = mixed[: size * count]
    ordered = mixed[np.argsort(labels[mixed], kind="stable")]
    pieces = _cut(pool[ordered], sizes)
    return [np.concatenate([pieces[i] for i in np.flatnonzero(holders == client)]) for client in range(clients)]


def dirichlet(
    pool: Rows,
    labels: Ints,
    classes: int,
    clients: int,
    alpha: float,
    spread: float,
    minimum: int,
    chance: np.random.Generator,
    *,
    balancing: bool = False,
) -> list[Rows]:
    """Share out the rows of each class by a draw from Dirichlet(alpha) over the clients (Yurochkin et al. 2019).

    With a spread, a client's part of every class also grows with its lognormal share. `balancing` gives no more rows
    to a client that has its equal part of all. Drawn again until every client has `minimum` rows.
    """
    if len(pool) < clients * minimum:
        spread_sizes(len(pool), np.ones(clients), minimum)
    by_class = [chance.permutation(pool[labels == label]) for label in range(classes)]
    growth = lognormal_shares(clients, spread, chance)
    smallest = 0
    for _ in range(_ATTEMPTS):
        parts = chance.dirichlet(np.full(clients, alpha), size=classes) * growth
        # A concentration near 0 can round every part that counts to 0; such a draw is no draw.
        if not (parts.sum(axis=1) > 0).all():
            continue
        counts = _dealt(parts, [len(rows) for rows in by_class], len(pool) / clients if balancing else None)
        smallest = max(smallest, int(counts.sum(axis=0).min()))
        if counts.sum(axis=0).min() >= minimum:
            cuts = [_cut(rows, sizes) for rows, sizes in zip(by_class, counts, strict=True)]
            return [np.concatenate([cut[client] for cut in cuts]) for client in range(clients)]
    raise UserError(
        f"partition.minimum: got {minimum}, not met in {_ATTEMPTS} draws with alpha {alpha} (best: {smallest}); "
        "allowed: a smaller minimum, a larger alpha, fewer clients, or samples for a fixed size"
    )


def _dealt(parts: Floats, sizes: Sequence[int], most: float | None) -> Ints:
    """Return how many rows of each class every client gets; who has `most` rows or more gets none of later classes."""
    counts: list[Ints] = []
    for part, size in zip(parts, sizes, strict=True):
        open_to = np.ones(len(part), dtype=np.bool_) if most is None or not counts else np.sum(counts, axis=0) < most
        share = np.where(open_to, part, 0.0)
        # Where the draw left nothing to those who still take rows, they share alike.
        counts.append(apportion(share if share.sum() > 0 else open_to.astype(np.float64), size))
    return np.stack(counts)


def by_labels(
    pool: Rows, labels: Ints, classes: int, clients: int, each: int, minimum: int, chance: np.random.Generator
) -> list[Rows]:
    """Give each client rows of `each` labels; the clients of a label share its rows equally (Li et al. 2022, #C).

    Client i has label i modulo the number of classes, and others drawn at random.
    """
    if each > classes:
        raise UserError(f"partition.labels_per_client: got {each}; allowed: at most {classes}, the number of classes")
    has = np.zeros((clients, classes), dtype=np.bool_)
    for client in range(clients):
        own = client % classes
        others = chance.permutation(np.delete(np.arange(classes), own))[: each - 1]
        has[client, [own, *others.tolist()]] = True
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(classes):
        holders = np.flatnonzero(has[:, label])
        if not len(holders):
            continue
        rows = chance.permutation(pool[labels == label])
        for client, part in zip(holders.tolist(), np.array_split(rows, len(holders)), strict=True):
            parts[client].append(part)
    found = [np.concatenate(part) for part in parts]
    if (least := min(len(part) for part in found)) < minimum:
        raise UserError(
            f"partition.minimum: got {minimum}, and a client with {each} labels has {least} rows; allowed: at most "
            f"{least}, or fewer clients"
        )
    return found


def by_quantity(pool: Rows, clients: int, alpha: float, minimum: int, chance: np.random.Generator) -> list[Rows]:
    """Deal the rows at random, in parts whose sizes are one draw from Dirichlet(alpha) (Li et al. 2022)."""
    # The least share keeps a draw that rounds to nothing usable; what is above the minimum is in proportion.
    shares = np.maximum(chance.dirichlet(np.full(clients, alpha)), 1e-300)
    return _cut(chance.permutation(pool), spread_sizes(len(pool), shares, minimum))


def dirichlet_sized(
    pool: Rows, labels: Ints, classes: int, clients: int, samples: int, alpha: float, chance: np.random.Generator
) -> list[Rows]:
    """Give each client `samples` rows whose class shares are its own draw from Dirichlet(alpha) (Hsu et al. 2019).

    Once a class is used up, the clients that follow draw from the classes that are left.
    """
    _enough(len(pool), clients, samples, "samples")
    by_class = [chance.permutation(pool[labels == label]) for label in range(classes)]
    left = np.array([len(rows) for rows in by_class])
    taken = np.zeros(classes, dtype=np.int64)
    parts: list[Rows] = []
    for _ in range(clients):
        mixture = chance.dirichlet(np.full(classes, alpha))
        counts = np.zeros(classes, dtype=np.int64)
        while (missing := samples - int(counts.sum())) > 0:
            spare = left - counts
            wish = np.where(spare > 0, mixture, 0.0)
            wish = wish if wish.sum() > 1e-12 else spare.astype(np.float64)
            counts += np.minimum(chance.multinomial(missing, wish / wish.sum()), spare)
        parts.append(np.concatenate([rows[at : at + n] for rows, at, n in zip(by_class, taken, counts, strict=True)]))
        taken += counts
        left -= counts
    return parts


def table(
    pool: Rows, labels: Ints, lines: Sequence[Sequence[int]], overlap: bool, chance: np.random.Generator
) -> tuple[list[Rows], list[str]]:
    """Give each client exactly as many rows of each class as its line says (AdaFed); also return notes on overlap.

    Each class's rows are in random order and dealt one after another; where they run out, `overlap` starts over.
    """
    parts: list[list[Rows]] = [[] for _ in lines]
    notes: list[str] = []
    for label in range(len(lines[0])):
        rows = chance.permutation(pool[labels == label])
        wanted = [line[label] for line in lines]
        short = sum(wanted) - len(rows)
        if max(wanted) > len(rows):
            client = wanted.index(max(wanted))
            raise UserError(
                f"partition.table: line {client} asks for {wanted[client]} rows of class {label}; "
                f"allowed: at most {len(rows)}, all there are"
            )
        if short > 0 and not overlap:
            raise UserError(
                f"partition.table: asks for {sum(wanted)} rows of class {label}; allowed: at most {len(rows)} in all, "
                "or overlap = true to let clients share rows"
            )
        if short > 0:
            notes.append(f"class {label}: {sum(wanted)} rows asked for, {len(rows)} there: {short} drawn with overlap")
        for part, dealt in zip(parts, deal(rows, wanted), strict=True):
            part.append(dealt)
    return [np.concatenate(part) for part in parts], notes


def deal(rows: Rows, counts: Sequence[int]) -> list[Rows]:
    """Deal rows one after another, starting over when they run out; nobody has a row twice if no count exceeds them."""
    ends = np.cumsum([0, *counts])
    return [rows[np.arange(ends[i], ends[i + 1]) % max(1, len(rows))] for i in range(len(counts))]


def _cut(rows: Rows, sizes: Ints) -> list[Rows]:
    ends = np.cumsum(sizes)
    return [rows[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


def _enough(rows: int, count: int, size: int, field: str, word: str = "clients") -> None:
    if rows < count * size:
        raise UserError(
            f"partition.{field}: got {size} for each of {count} {word}; allowed: at most {rows // count} "
            f"(the source has {rows} rows to share out)"
        )
