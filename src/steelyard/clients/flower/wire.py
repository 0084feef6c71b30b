"""What every message is made of: one written form and the arrays beside it, read with every claim checked.

Forms are strict, one JSON text each. One that does not parse is refused before any array is looked at. What a form
cannot say (does the answer belong to the question, are the numbers possible) single checks find: each refuses with one
line, or returns what is wrong with one client's part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from steelyard.base.errors import without_controls
from steelyard.base.tallies import SUM
from steelyard.clients.node import Terms
from steelyard.messages.payloads import Shape
from steelyard.messages.updates import MOST_SAMPLES, Answer, Counts, Evaluations, Failure, LossState, Question, Updates
from steelyard.proof.statements import Hash, Proof

if TYPE_CHECKING:
    # Only for annotations: the process of a node that speaks to the server does without torch.
    import torch

PROTOCOL = 9
"""Version of these forms; both sides must use the same."""

INTRODUCE = "query.introduce"
TRAIN = "train.task"
EVALUATE = "evaluate.question"
HEADS = "query.heads"
STATISTICS = "query.statistics"
COMPARE = "query.compare"
SURVEY = "(columns)"
"""In the place of a federation's name, in round 0: nodes tell of their columns in numbers that are only added up."""
"""The messages that a server sends, by Flower's message type; those of hidden updates are in `hidden_messages`."""


LARGEST_FORM = 32 << 20
"""Most bytes that a form may have once it is read, where nothing else is said."""
_LIST_BYTES, _VALUE_BYTES = 512, 40
"""What a list or an object takes in memory while JSON is read, and one value in it."""


class Refused(Exception):
    """What came from a node cannot be used; the text says why and is recorded with the round."""


class Form(BaseModel):
    """Base of all forms: exact types, unknown fields refused, NaN and infinity written as such."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")

    protocol: int = PROTOCOL

    @classmethod
    def read(cls, text: object, largest: int = LARGEST_FORM) -> Self:
        """Parse a form that came over the wire, or refuse it with the first thing that is wrong.

        `largest` bounds what it takes in memory, which is counted before it is parsed.
        """
        if not isinstance(text, str):
            raise Refused(f"form: got {type(text).__name__}; allowed: a JSON text")
        if (size := read_size(text)) > largest:
            raise Refused(f"form: {size} bytes once it is read; allowed: at most {largest}")
        try:
            form = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "form"
            raise Refused(f"{field}: {first['msg']}") from None
        if form.protocol != PROTOCOL:
            raise Refused(f"protocol: got {form.protocol}; allowed: {PROTOCOL} (another version of steelyard)")
        return form

    def write(self) -> str:
        """Return the form as JSON; numbers survive unchanged."""
        return self.model_dump_json()


def read_size(text: str) -> int:
    """Return the most that a JSON text takes in memory once it is read: "[],[],[]" takes a hundred times its length."""
    lists = text.count("[") + text.count("{")
    return len(text) + _LIST_BYTES * lists + _VALUE_BYTES * text.count(",")


class AskForm(Form):
    """The server asks a node who lives on it, for an experiment."""

    experiment: str = ""
    """The experiment as JSON; it goes with every message, so that a node that was restarted knows it again."""


class IntroductionForm(Form):
    """A node names the clients that live on it."""

    version: str
    clients: list[str]
    about: dict[str, int | list[int]] = {}
    """What a server without data must know to make the first model; all nodes must say the same."""
    terms: Terms = Terms()
    """What the node's owner limits."""
    samples: dict[str, Annotated[int, Field(ge=1, le=MOST_SAMPLES)]] = {}
    """Under [privacy.records], where it counts as known: how many samples each client trains on."""


Vouchers = dict[
    Annotated[str, Field(max_length=400)], dict[str, Annotated[str, Field(pattern="^([0-9a-f]{2}){1,104}$")]]
]
"""By a node's public key: its signatures, in hexadecimal digits, under the keys that its clients show in a round."""


class WorkForm(Form):
    """The server asks a node for work in a round."""

    run: str
    """Name of the run; what a node kept from another run is not used in this one."""
    federation: str
    seed: int
    round: int
    seconds: float
    """How long the server waits; the node gives up by itself after that, so that it is free for the next round."""
    experiment: str = ""
    """The experiment as JSON."""


class TaskForm(WorkForm):
    """The server asks some of a node's clients to train."""

    clients: list[str]
    loss: LossState
    algorithm: dict[str, Any]
    """The algorithm's name and parameters; what it sends to clients is in the arrays beside it. A node takes none that
    the experiment does not name."""
    cohort: list[str] = []
    """Where updates are hidden: all clients of the round, whose keys are in the arrays beside it; else empty."""
    attempt: str = ""
    """Where updates are hidden: which attempt at the round the keys were made for."""
    vouchers: Vouchers = Field(default_factory=Vouchers)
    """Where updates are hidden: who signed for the keys of which client."""
    proofs: list[Proof] = []
    """What the server's signed heads say of this node in earlier rounds; empty where it signs none."""


class HeadsForm(Form):
    """The server hands out what its signed heads say of a node, without a task: after the last round."""

    run: str
    proofs: list[Proof]
    seconds: float


class StatisticsForm(Form):
    """The server asks a node, before the first round, what its owner lets it tell of its columns; it names none."""

    run: str
    experiment: str
    seconds: float


class SumsForm(Form):
    """What a node tells, or the others together: columns of numbers, whose counts are in the arrays beside it."""

    rows: int
    columns: list[str]
    words: dict[str, dict[str, int]]


class ComparisonForm(StatisticsForm, SumsForm):
    """The server sends a node what the others have together, and asks what seems wrong beside them."""

    weight: float = Field(default=0.0, ge=0, le=1)
    """The node's own share of what all have together; 0: its own part is not in it."""


class SaidFinding(BaseModel, extra="forbid", frozen=True, strict=True):
    """What a node says of itself: a finding's name, a column of its own, and a factor with one digit."""

    name: str
    column: str
    factor: float | None = None


class FindingsForm(Form):
    """A node's answer to that; empty where its owner lets it tell none."""

    findings: list[SaidFinding]


class SignedForm(BaseModel, extra="forbid", frozen=True, strict=True):
    """What a node signs of its clients' updates; bytes in hexadecimal digits."""

    before: Hash
    digests: dict[str, str]
    salts: dict[str, str]
    """Empty where updates are hidden: the node keeps them."""
    signature: str


class ClientsForm(Form):
    """What answers to tasks and to questions have in common; the columns of `of` are fields of it, too."""

    federation: str
    round: int
    clients: list[str]
    failures: list[Failure] = []
    """Clients that could not do their part, in their node's own words."""


class UpdateForm(ClientsForm):
    """A node's answer to a task, read as `UPDATES`; models and columns that are arrays stand beside it."""

    payload: str
    started_over: list[str] = []
    """Clients that began with nothing kept: in their first round, or because their node lost it."""
    signed: SignedForm | None = None
    """What the node signs of its clients' updates; None where it has no key of its own."""


FormT = TypeVar("FormT", bound=ClientsForm)


def with_columns(form: type[FormT], of: type[Answer]) -> type[FormT]:
    """Return the form with the columns that are not sent as arrays."""
    said: Any = {
        name: (column.written, ... if column.told == "always" else None)
        for name, column in of.columns().items()
        if column.told != "never" and not column.array
    }
    return create_model(form.__name__, __base__=form, **said)


UPDATES = with_columns(UpdateForm, Updates)
EVALUATIONS = with_columns(ClientsForm, Evaluations)


class QuestionForm(WorkForm):
    """The server asks all of a node's clients to test one or more models."""

    candidates: int
    detailed: bool
    measure: str = ""
    """By what clients are to be scored, with their sums; empty: by the task's own score."""
    threshold: float = 0.5
    algorithm: dict[str, Any] = {}
    """Where clients test models of their own: the algorithm's name and parameters; else empty."""
    withdrawn: list[str] = []
    """Of the node's clients those that have withdrawn, and are not to be tested."""


def content(form: Form, arrays: Mapping[str, NDArray[Any]]) -> RecordDict:
    """Return the content of a message: one form and the arrays beside it."""
    return RecordDict({"form": written(form), "arrays": pack(arrays)})


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


def cleaned(failures: Sequence[Failure]) -> list[Failure]:
    """Return failures as an answer writes them."""
    return [Failure(failure.client, clean(failure.reason)) for failure in failures]


_NUMPY = "numpy.ndarray"
_LENGTH_BYTES = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}
"""By version of NumPy's file format: how many bytes say how long the header is."""
_LONGEST_HEADER = 10_000
_HEADER = re.compile(
    rb"\{'descr': '([<>|=][\w\[\]]{1,16})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:-?\d{1,20}(?:, |,?(?=\))))*)\), \} *\n"
)
"""The one form in which NumPy writes the header of an array of numbers."""


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return a record of these arrays, ready to be sent."""
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()})


def unpack(array: Array, name: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return an array that came over the wire, or refuse it; None in `shape` stands for any length.

    The header of the bytes themselves is believed, not what the message says about them, and the number of bytes must
    be exactly what the header declares: a header that claims terabytes costs nothing.
    """
    found, fortran, found_dtype, start = _header(array, name)
    if fortran and len(found) > 1:
        raise Refused(f"array {name}: Fortran order; allowed: C order")
    if found_dtype != np.dtype(dtype):
        raise Refused(f"array {name}: dtype {found_dtype}; allowed: {np.dtype(dtype)}")
    if len(found) != len(shape) or any(w is not None and f != w for f, w in zip(found, shape, strict=True)):
        wanted = str(tuple("any" if length is None else length for length in shape)).replace("'", "")
        raise Refused(f"array {name}: shape {found}; allowed: {wanted}")
    return _numbers(array, name, found_dtype, start, found).reshape(found)


def read_array(array: Array, name: str) -> NDArray[Any]:
    """Return an array of any type and shape, as other people's apps send them, or refuse it, checked as in `unpack`."""
    shape, fortran, dtype, start = _header(array, name)
    if dtype.itemsize == 0 or not all(0 <= length < 1 << 62 for length in shape):
        raise Refused(f"array {name}: shape {shape} of {dtype}; allowed: lengths from 0 on, and a type of numbers")
    return _numbers(array, name, dtype, start, shape).reshape(shape, order="F" if fortran else "C")


def _numbers(array: Array, name: str, dtype: np.dtype[Any], start: int, shape: tuple[int, ...]) -> NDArray[Any]:
    declared = prod(shape) * dtype.itemsize
    if len(array.data) - start != declared:
        raise Refused(f"array {name}: {len(array.data) - start} bytes of data; allowed: {declared}")
    return np.frombuffer(array.data, dtype=dtype, offset=start)


def _header(array: Array, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether columns come first, type, and where the numbers begin."""
    if array.stype != _NUMPY:
        raise Refused(f"array {name}: serialised as {array.stype!r}; allowed: {_NUMPY}")
    # NumPy's reader uses `ast`, which fails now and then in two threads at once (Python 3.11 before 3.11.8, gh-106905).
    data = memoryview(array.data)
    width = _LENGTH_BYTES.get(bytes(data[:8]), 0)
    start = 8 + width
    end = start + int.from_bytes(data[8:start], "little")
    found = _HEADER.fullmatch(data[start:end]) if width and end <= min(len(data), start + _LONGEST_HEADER) else None
    if found is None:
        raise Refused(f"array {name}: not an array file")
    try:
        dtype = np.dtype(found[1].decode())
    except TypeError:
        raise Refused(f"array {name}: not an array file (NumPy knows no type {found[1].decode()!r})") from None
    if dtype.hasobject:
        raise Refused(f"array {name}: holds Python objects; allowed: numbers")
    shape = tuple(int(length) for length in re.findall(rb"-?\d+", found[3]))
    return shape, found[2] == b"True", dtype, end


def unpack_all(arrays: Mapping[str, Array], shapes: Mapping[str, Shape]) -> dict[str, NDArray[Any]]:
    """Return the numbers of the arrays that a message must have, or refuse it; it must have no others."""
    if set(arrays) != set(shapes):
        raise Refused(f"arrays: got {names(arrays)}; allowed: exactly {names(shapes)}")
    return {name: unpack(arrays[name], name, *shape) for name, shape in shapes.items()}


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor with a memory of its own; the bytes of a message cannot be written to."""
    import torch  # Late for speed of start: the process of a node that speaks to the server does without.

    return torch.from_numpy(array.copy())


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
"""Most bytes of right or wrong per test sample, one each, or of sums, that one node may send."""


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


def details(question: Question) -> int:
    """Return the most bytes of what an answer to a question has beside its form."""
    return LARGEST_DETAILS * (question.detailed + (question.measure is not None))


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


def refuse_clients(clients: list[str], failures: list[Failure], asked: Sequence[str]) -> int:
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
    odd += [name for name in metrics if name.startswith(SUM)]
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


def most_counted(samples: Sequence[int], factor: float) -> int:
    """Return how many test samples of a client count at most: `factor` times those of the median client.

    One client alone has nobody to be compared with: all of its samples count.
    """
    held = sorted(count for count in samples if count > 0)
    # The lower of two middle ones: a liar among two must not raise the bound.
    return MOST_SAMPLES if len(held) < 2 else max(1, int(factor * held[(len(held) - 1) // 2]))


def failures(
    said: list[Failure],
    answered: Sequence[str],
    asked: Sequence[str],
    omitted: str = "its node answered without it",
) -> tuple[Failure, ...]:
    """Return the failures that a node reports, and one for every asked client that it passed over in silence."""
    reasons = {failure.client: clean(failure.reason) for failure in said}
    silent = [client for client in asked if client not in reasons and client not in set(answered)]
    return (
        *(Failure(client, reason) for client, reason in reasons.items()),
        *(Failure(client, omitted) for client in silent),
    )


def names(found: Iterable[str]) -> str:
    """Return names as one line of bounded length, for a reason."""
    return clean(", ".join(sorted(found)) or "none")
