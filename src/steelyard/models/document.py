# ruff: noqa: RUF012  pydantic gives each model its own copy of a default
"""`model.json`, all that a model's folder says of itself; and what its tests find."""

from __future__ import annotations

from math import isnan
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from steelyard.base.documents import Document
from steelyard.base.errors import printable
from steelyard.base.measures import MEASURES, measure_of
from steelyard.data.preparation import Preparation
from steelyard.recommend.fpl import Learning
from steelyard.recommend.kgflex.selection import KgflexSettings

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Held(Document):
    """A file of the folder, by which a changed one is noticed."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0)]


class CodeFile(Held):
    """The file that builds a network of the user's own."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}\.py$")]
    """In the folder `code`."""


class Network(Document):
    """How the network is built."""

    settings: dict[str, Any]
    """The fields of `[model]`; none where only the app that trained it can build the network."""
    outputs: Annotated[int, Field(ge=0, le=10_000_000)]
    """Number of classes or labels; 0 for a number."""
    pixels: bool = False
    """Whether the classes are those of each pixel."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    vector: list[str]
    """The names of the numbers that were trained, in the order in which the run's chain has their digest."""


class Figure(Document):
    """One measure of some rows."""

    measure: str
    value: float | None
    """None: there is none."""
    low: float | None = None
    """Of its 95 % interval; None where nothing says how wide that is."""
    high: float | None = None

    @classmethod
    def of(cls, name: str, value: float | None, rows: int, error: float | None = None, /, **fields: Any) -> Self:
        """Return a figure by its name in `MEASURES`, or its own, with its interval on so many rows (0: not known)."""
        kind = MEASURES.get(name) or measure_of(name)
        if value is None or isnan(value):
            return cls(measure=kind.name, value=None, **fields)
        ends = kind.interval(value, rows, None if error is None or isnan(error) else error) if rows else None
        low, high = (None, None) if ends is None or isnan(sum(ends)) else ends
        return cls(measure=kind.name, value=value, low=low, high=high, **fields)

    @property
    def shown(self) -> str:
        """The value as people read it, with its interval."""
        if self.value is None:
            return "none"
        kind = measure_of(self.measure)
        interval = "" if self.low is None or self.high is None else f" {kind.show_interval(self.low, self.high)}"
        return f"{kind.show(self.value)}{interval}"


class Test(Figure):
    """A score of the model in its run."""

    where: str
    """the server, or a site."""
    rows: int
    """0: not known."""
    why: str = ""
    """Why there is no value: rows of one class, say, have no ROC AUC."""

    @property
    def shown(self) -> str:
        """The value as people read it, or why there is none."""
        return super().shown if self.value is not None else f"none: {printable(self.why) or 'its rows give none'}"


class Group(Document):
    """New rows that were tested together."""

    name: str
    """all, or what the rows have in the column."""
    rows: int
    figures: list[Figure]
    """The score first."""


class Tested(Document):
    """The answer of `steelyard test`."""

    by: str | None
    """The column of the groups."""
    groups: list[Group]
    """All rows first."""
    notes: list[str]
    """What of the rows is not as it was in training."""


class Origin(Document):
    """Where the model is from; `steelyard verify RUN --model FOLDER` holds it to its run."""

    run: str
    """The run's name."""
    purpose: str
    """What it is for, as the experiment's description says."""
    rule: str
    algorithm: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    round: Annotated[int, Field(ge=0)]
    chosen: str
    """Why this rule and this round, in a sentence."""
    own: str = ""
    """Whose model it is where it is that of one client; its numbers are in no chain, and `digest` is of the global one.
    """
    digest: Sha256
    """Of the model's numbers, as the run's chain has it for this round."""
    closing: str
    """The final hash of the run when the model was taken; empty where a node took it, which has no run."""
    measure: str | None = None
    """The measure that leads, by its name in a run's record; None: that of the task."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Above this probability the second of two classes is predicted."""
    tests: list[Test] = []
    version: str
    """Of Steelyard."""


Number = Annotated[int, Field(ge=0, le=100_000_000)]


class RecommenderDocument(Document):
    """What the folder of a recommender says of itself."""

    format: Literal["steelyard-recommender"] = "steelyard-recommender"
    version: Literal[1] = 1
    origin: Origin
    items: list[str]
    """The ids of all items in the order of the table; of KGFlex in that of their features."""
    titles: list[str]
    learning: Learning
    visits: Annotated[int, Field(ge=1, le=1_000_000)]
    """How many triples a user visited in the run, and a newcomer does."""
    threshold: float | None = None
    """Ratings below this were no likes."""
    cutoff: Annotated[int, Field(ge=1, le=10_000)]
    score: str
    kgflex: KgflexSettings | None = None
    features: list[str] = []
    """Of KGFlex, in the order of the table, in words."""
    hops: list[Annotated[int, Field(ge=1, le=100)]] = []
    user: str = ""
    """The one user whose own part the folder holds; empty: nobody's."""
    taken: list[Number] = []
    """The numbers of her items."""
    weights: Held
    card: Held


class ModelDocument(Document):
    """What a model's folder says of itself."""

    format: Literal["steelyard-model"] = "steelyard-model"
    version: Literal[1] = 1
    origin: Origin
    network: Network
    preparation: Preparation | None
    """None where nobody told what rows go through: the weights alone left the run."""
    weights: Held
    card: Held
    code: CodeFile | None = None

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        if (self.preparation is None) == bool(self.network.settings):
            raise ValueError("network.settings and preparation are known both, or neither")
        if self.preparation is None:
            return self
        target, columns = self.preparation.target, {column.name for column in self.preparation.columns}
        if (self.network.outputs, self.network.pixels) != (len(target.names), target.task == "segmentation"):
            raise ValueError("network.outputs and network.pixels do not go with preparation.target")
        if not columns.issuperset(self.preparation.indicators):
            raise ValueError("preparation.indicators names what is no column")
        return self
