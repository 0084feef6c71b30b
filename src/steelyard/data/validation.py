"""A validation split: training rows that are tested on in place of the test set, so that settings can be chosen.

The rows that a partition keeps for testing, at the clients and at the server, are in no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.data import schemes
from steelyard.data.dataset import ClientRows, Dataset, Rows
from steelyard.data.settings import PartitionSettings


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
        weighs, tests = _halves(back, held, seed)
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


def _halves(back: Sequence[Rows], held: Rows, seed: int) -> tuple[Rows, list[Rows]]:
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
