"""The written part of every message between server and node: strict forms, one JSON text each.

A form that does not parse is refused before any array is looked at; what a form cannot say (does the answer belong to
the question, are the numbers possible) is checked in `checks`.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from steelyard.messages.updates import Answer, Evaluations, LossState, Updates
from steelyard.proof.statements import Hash, Proof

PROTOCOL = 6
"""Version of these forms; both sides must use the same."""

INTRODUCE = "query.introduce"
TRAIN = "train.task"
EVALUATE = "evaluate.question"
HEADS = "query.heads"
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


class LossForm(BaseModel, extra="forbid", frozen=True):
    """`LossState` on the wire."""

    name: str
    class_weights: list[float] | None = None
    shape: float | None = None
    scale: float | None = None

    @classmethod
    def of(cls, loss: LossState) -> LossForm:
        """Return the form of a loss; used by the server."""
        weights = None if loss.class_weights is None else list(loss.class_weights)
        return cls(name=loss.name, class_weights=weights, shape=loss.shape, scale=loss.scale)

    def state(self) -> LossState:
        """Return the loss that the form describes; used by the node."""
        weights = None if self.class_weights is None else tuple(self.class_weights)
        return LossState(self.name, weights, self.shape, self.scale)


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
    loss: LossForm
    algorithm: dict[str, Any]
    """The algorithm's name and parameters; what it sends to clients is in the arrays beside it. A node takes none that
    the experiment does not name."""
    cohort: list[str] = []
    """Where updates are hidden: all clients of the round, whose keys are in the arrays beside it; else empty."""
    attempt: str = ""
    """Where updates are hidden: which attempt at the round the keys were made for."""
    proofs: list[Proof] = []
    """What the server's signed heads say of this node in earlier rounds; empty where it signs none."""


class HeadsForm(Form):
    """The server hands out what its signed heads say of a node, without a task: after the last round."""

    run: str
    proofs: list[Proof]
    seconds: float


class FailureForm(BaseModel, extra="forbid", frozen=True, strict=True):
    """One client that could not do its part, in its node's own words."""

    client: str
    reason: str


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
    failures: list[FailureForm] = []


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
    algorithm: dict[str, Any] = {}
    """Where clients test models of their own: the algorithm's name and parameters; else empty."""
    withdrawn: list[str] = []
    """Of the node's clients those that have withdrawn, and are not to be tested."""
