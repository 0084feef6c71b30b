"""What every message is made of: one written form, the arrays beside it, and what each says of the run it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from steelyard.clients.flower import arrays as packing
from steelyard.clients.flower.checks import clean
from steelyard.clients.flower.forms import FailureForm, Form, Refused
from steelyard.messages.updates import Failure
from steelyard.proof.statements import Proof


def content(form: Form, arrays: Mapping[str, NDArray[Any]]) -> RecordDict:
    """Return the content of a message: one form and the arrays beside it."""
    return RecordDict({"form": written(form), "arrays": packing.pack(arrays)})


def written(form: Form) -> ConfigRecord:
    """Return a form as a record of a message."""
    return ConfigRecord({"json": form.write()})


def split(records: RecordDict) -> tuple[object, ArrayRecord]:
    """Return the form's text and the arrays of a message, or refuse a message of another make."""
    if set(records) != {"form", "arrays"}:
        raise Refused(f"records: got {', '.join(sorted(records))[:200] or 'none'}; allowed: exactly arrays, form")
    form, arrays = records["form"], records["arrays"]
    if not isinstance(form, ConfigRecord) or not isinstance(arrays, ArrayRecord) or set(form) != {"json"}:
        raise Refused("records: 'form' must hold one JSON text and 'arrays' must hold arrays")
    return form["json"], arrays


@dataclass(frozen=True)
class Header:
    """What a message to a node says beside its task or question."""

    run: str
    """Name of the run that it belongs to."""
    experiment: str
    """The experiment as JSON."""
    seconds: float
    """How long the server waits."""
    cohort: tuple[str, ...] = ()
    """Where updates are hidden: all clients of the round."""
    keys: NDArray[np.uint8] | None = None
    """Where updates are hidden: the public keys of each of them."""
    attempt: str = ""
    algorithm: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name and parameters of the algorithm; of a question only where clients test models of their own."""
    proofs: Sequence[Proof] = ()
    """What the server's signed heads say of the node in earlier rounds."""


def failure_forms(failures: Sequence[Failure]) -> list[FailureForm]:
    """Return failures as an answer writes them."""
    return [FailureForm(client=failure.client, reason=clean(failure.reason)) for failure in failures]
