"""Single checks of what a node sends: each refuses with one line, or returns what is wrong with one client's part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from steelyard.base.errors import without_controls
from steelyard.clients.flower.forms import FailureForm, Refused
from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import MOST_SAMPLES, Counts, Failure

MOST_GROWTH = 1e6
"""In one round no parameter grows beyond this many times the largest of the model that was sent (or of 1)."""
SIZE = "DS"
"""The criterion that is the number of samples, which a client says already."""
LONGEST_REASON = 300
MOST_METRICS, LONGEST_METRIC = 100, 64
RECORD_COLUMNS = frozenset({"rule", "seed", "round", "client", "samples", "score", "loss", "metrics"})
"""What the record of a run has for each client and evaluation, beside the metrics that clients add."""
FORM_BYTES, FORM_BYTES_PER_CLIENT, FORM_BYTES_PER_SCORE = 65_536, 8_192, 160
"""Most bytes of the written part of an answer once it is read: for all, for each client, and for each of its scores."""
FORM_BYTES_PER_CANDIDATE = 2_048
LARGEST_DETAILS = 64 << 20
"""Most bytes of right or wrong per test sample, one each, that one node may send."""
_BLOCK = 1 << 18


def clean(reason: str) -> str:
    """Return a node's words as one printable line of bounded length, safe to store and to show."""
    line = " ".join(without_controls(reason, " ").split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def unreadable(error: Exception) -> str:
    """Say in one line that an answer set off an error while it was read; the round goes on without it."""
    return clean(f"its answer could not be read: {type(error).__name__}: {error}")


@contextmanager
def reading_one_answer() -> Generator[None]:
    """Refuse an answer that sets off any error while it is read, so that one node cannot stop a run."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(unreadable(error)) from error


def largest_form(clients: int, candidates: int = 0) -> int:
    """Return the most bytes of the written part of an answer of so many clients, on so many tested models."""
    each = FORM_BYTES_PER_CLIENT + FORM_BYTES_PER_SCORE * candidates
    return FORM_BYTES + FORM_BYTES_PER_CANDIDATE * candidates + clients * each


def refuse_size(text: object, arrays: ArrayRecord, form: int, largest: int) -> int:
    """Refuse an answer larger than an honest one, with its form and its arrays, can be; returns how many bytes it has.

    Over HTTP a larger one is not even fetched; any other grid hands over what it likes.
    """
    sent = sum(len(array.data) for array in arrays.values()) + (len(text) if isinstance(text, str | bytes) else 0)
    if sent > form + largest:
        raise Refused(f"size: {sent} bytes; allowed: at most {form + largest}")
    return sent


def refuse_other(federation: str, round: int, wanted: str, wanted_round: int) -> None:
    """Refuse an answer that belongs to another federation or another round."""
    if federation != wanted:
        raise Refused(f"federation: got {federation!r}; allowed: {wanted!r}")
    if round != wanted_round:
        raise Refused(f"round: got {round}; allowed: {wanted_round}")


def refuse_clients(clients: list[str], failures: list[FailureForm], asked: Sequence[str]) -> int:
    """Refuse an answer for clients that were not asked, or for one client twice; returns how many answered."""
    named = [*clients, *(failure.client for failure in failures)]
    strangers = sorted(set(named) - set(asked))
    if strangers:
        raise Refused(f"clients: got {names(strangers)}; allowed: only those asked, {names(asked)}")
    if len(set(named)) != len(named):
        twice = [name for name, count in Counter(named).items() if count > 1]
        raise Refused(f"clients: {names(twice)} answered twice; allowed: one answer each")
    return len(clients)


def refuse_lengths(count: int, named: tuple[str, Sequence[Any]], *, rows: bool = False) -> None:
    """Refuse a column that does not have one value per client, or a row of them for each candidate."""
    name, values = named
    for row in values if rows else [values]:
        if len(row) != count:
            raise Refused(f"{name}: {len(row)} values; allowed: {count}, one per client")


def refuse_metrics(metrics: Collection[str]) -> None:
    """Refuse metrics that cannot be stored and shown, or are named like a column of the record."""
    odd = [name for name in metrics if not (name.isprintable() and 0 < len(name) <= LONGEST_METRIC)]
    if odd or len(metrics) > MOST_METRICS:
        raise Refused(
            f"metrics: got {len(metrics)}, such as {next(iter(odd or metrics))[:40]!r}; allowed: at most "
            f"{MOST_METRICS}, with printable names of at most {LONGEST_METRIC} letters"
        )
    clashes = sorted(RECORD_COLUMNS.intersection(metrics))
    if clashes:
        raise Refused(f"metrics: got {names(clashes)}, a name of the record's own; allowed: other names")


def size_fault(criteria: Mapping[str, Sequence[float]], samples: Counts, client: int) -> str | None:
    """Say why a client's criterion of its size cannot be true, or None when it can."""
    if SIZE in criteria and (said := criteria[SIZE][client]) != samples[client]:
        return f"criterion {SIZE} = {said:g}, but samples = {samples[client]}; allowed: the same number"
    return None


def explosion(payload: Payload, parameters: torch.Tensor) -> NDArray[np.bool_]:
    """Return for each client whether its update is so far away that it can only be a mistake or an attack."""
    largest = float(parameters.abs().max()) if parameters.numel() else 0.0
    allowed = MOST_GROWTH * max(1.0, largest)
    if not isinstance(payload, DenseModels):
        return ~(payload.divergence(parameters) <= allowed * max(1.0, parameters.numel() ** 0.5))
    far = torch.zeros(len(payload.models), dtype=torch.bool)
    # Some parameters at a time: a second copy of a large model would be most of the memory that an answer needs.
    for begin in range(0, parameters.numel(), _BLOCK):
        step = payload.models[:, begin : begin + _BLOCK] - parameters[begin : begin + _BLOCK]
        far |= ~(step.abs() <= allowed).all(dim=1)
    return far.numpy()


def most_counted(samples: Sequence[int], factor: float) -> int:
    """Return how many test samples of a client count at most: `factor` times those of the median client.

    One client alone has nobody to be compared with: all of its samples count.
    """
    held = sorted(count for count in samples if count > 0)
    # The lower of two middle ones: a liar among two must not raise the bound.
    return MOST_SAMPLES if len(held) < 2 else max(1, int(factor * held[(len(held) - 1) // 2]))


def failures(
    forms: list[FailureForm],
    answered: Sequence[str],
    asked: Sequence[str],
    omitted: str = "its node answered without it",
) -> tuple[Failure, ...]:
    """Return the failures that a node reports, and one for every asked client that it passed over in silence."""
    reasons = {form.client: clean(form.reason) for form in forms}
    silent = [client for client in asked if client not in reasons and client not in set(answered)]
    return (
        *(Failure(client, reason) for client, reason in reasons.items()),
        *(Failure(client, omitted) for client in silent),
    )


def names(found: Iterable[str]) -> str:
    """Return names as one line of bounded length, for a reason."""
    return clean(", ".join(sorted(found)) or "none")
