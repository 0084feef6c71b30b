"""What a source of data gives, and what a partition makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError, brief
from steelyard.data.cells import MOST_CLASSES
from steelyard.data.preparation import Preparation, Scale, Target, Values
from steelyard.data.sources.source import FurtherTask, SourceCapabilities, TaskKind
from steelyard.learning.augmentation import Augmentation

Rows = NDArray[np.int64]
OwnAttack = Literal["reversed", "gaussian", "boosted", "bias", "drift"]
JointAttack = Literal["alie", "ipm", "min-max", "min-sum", "mimic", "decoy", "neurotoxin", "adaptive"]
AttackKind = OwnAttack | JointAttack


@dataclass(frozen=True, eq=False)
class RawColumns:
    """The columns of a table as they were read: filling and scaling wait for the rows that clients train on."""

    numbers: NDArray[np.float64]
    """Rows × columns of numbers, NaN where nothing was recorded; they become the first columns of the features."""
    flags: NDArray[np.float32]
    """Rows × 0/1 columns, from categories and missing cells; they stay as they are."""
    normalise: Literal["unit", "standard", "client"]
    missing: Literal["mean", "zero"]
    names: tuple[str, ...] = ()
    """Of the columns of numbers."""
    agreed: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Mean and deviation of columns that are not measured here."""

    def of_rows(self, rows: Rows) -> RawColumns:
        """Return some rows of it."""
        return replace(self, numbers=self.numbers[rows], flags=self.flags[rows])

    def scale(self, train: Rows) -> Scale:
        """Return what fills and scales numbers, by what the cells of the rows `train` say, or as it was agreed."""
        scaled = self.normalise != "unit"
        found = Scale.of(self.numbers[train], self.missing, scaled=scaled or bool(self.agreed))
        if not self.agreed:
            return found
        measured = zip(self.names, zip(found.mean, found.deviation, strict=True), strict=True)
        return Scale.by([self.agreed.get(name, own) for name, own in measured], self.missing, scaled=scaled)

    def ranges(self, train: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the least and the largest number of each column in the rows `train`; NaN where there is none."""
        seen, nothing = self.numbers[train], np.full((1, self.numbers.shape[1]), np.nan)
        ends = np.concatenate([seen, nothing])
        return np.fmin.reduce(ends, axis=0), np.fmax.reduce(ends, axis=0)

    def features(self, numbers: NDArray[np.float64]) -> torch.Tensor:
        """Return these numbers before the 0/1 columns."""
        return joined(numbers, self.flags)


def joined(numbers: NDArray[np.float64], flags: NDArray[np.float32]) -> torch.Tensor:
    """Return the columns of a table as a model takes them: scaled numbers, then 0/1 columns."""
    return torch.from_numpy(np.concatenate([numbers.astype(np.float32), flags], axis=1))


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of one source as tensors; use it for any data, read from files or built in memory.

    `features` is float32, uint8 for images whose values are to be divided by 255 when they are used, or int64 for
    tokens. `labels` is int64 for classes, float32 for a regression target or the time to an event; of masks it is
    uint8 (rows, pixels), of several labels float32 (rows, labels), each 0 or 1. `owners` names the writer or user of
    each row where the source knows one. `held_out` marks the rows of the source's own test part. `marks` are further
    per-row attributes, such as "sharp".

        >>> steelyard.in_memory(numpy.zeros((4, 1, 8, 8)), [0, 1, 0, 1])  # features (rows, ...), labels (rows,)
        Dataset('memory': 4 samples of 1×8×8, 2 classes)
    """

    name: str
    features: torch.Tensor
    labels: torch.Tensor
    classes: int
    """Number of classes of a row; 0 where a row has none, such as a number, a mask or several labels."""
    owners: NDArray[np.str_] | None = None
    held_out: NDArray[np.bool_] | None = None
    marks: Mapping[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    notes: tuple[str, ...] = ()
    """What reading had to do that the user should know."""
    task: FurtherTask | None = None
    """What is learnt where it is neither a class nor a number. survival: labels are times to an event, negative where
    it had not come until then; segmentation: a class for each pixel, 0 is the background; multi-label: several labels,
    each of which a row has or has not."""
    targets: int = 0
    """Number of classes of a pixel, or of labels."""
    raw: RawColumns | None = None
    """A table's columns before they are filled and scaled; `share_out` does that with training rows alone. Until then
    `features` are filled and scaled over all rows."""
    augment: Augmentation | None = None
    """How images are changed at random each time they are trained on."""
    preparation: Preparation | None = None
    """What rows went through, where the source or what scaled them says it."""

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        """How many samples of what shape, and whose, in one line; what a notebook or a prompt shows."""
        kind = f"{self.classes} classes" if self.classes else "numbers to predict"
        further = {
            "survival": "times to an event",
            "segmentation": f"masks of {self.targets} classes",
            "multi-label": f"{self.targets} labels",
        }
        kind = kind if self.task is None else further[self.task]
        shape = "×".join(map(str, self.shape))
        people = "" if self.owners is None else f", {len(np.unique(self.owners))} owners"
        return f"Dataset({self.name!r}: {len(self):,} samples of {shape}, {kind}{people})"

    @property
    def kind(self) -> TaskKind:
        """What is learnt."""
        return self.task or ("classes" if self.classes else "regression")

    @property
    def capabilities(self) -> SourceCapabilities:
        """What it holds that a partition may need."""
        owned, tested = self.owners is not None, self.held_out is not None
        return SourceCapabilities(self.kind, self.classes, frozenset(self.marks), owned, tested, owned and tested)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample: (channels, height, width) for images, (columns,) for tables."""
        return tuple(self.features.shape[1:])

    @property
    def tokens(self) -> bool:
        """Whether a sample is a text: whole numbers for an embedding, which have no noise and no mean."""
        return self.features.dtype == torch.int64

    @property
    def described(self) -> Preparation:
        """What rows went through; of a source that does not say, the shape and the numbers of its classes."""
        if self.preparation is not None:
            return self.preparation
        names = [str(number) for number in range(self.targets or self.classes)]
        kinds: dict[torch.dtype, Values] = {torch.uint8: "bytes", torch.int64: "tokens"}
        values = kinds.get(self.features.dtype, "numbers")
        target = Target(task=self.kind, names=names)
        return Preparation(form="array", values=values, shape=list(self.shape), target=target)

    def inputs(self, rows: Rows) -> torch.Tensor:
        """Return the features of some rows as float32, bytes divided by 255; what a model takes."""
        chosen = self.features[torch.from_numpy(rows)]
        return chosen.float() / 255 if chosen.dtype == torch.uint8 else chosen

    def take(self, rows: Rows) -> Dataset:
        """Return the data set with only these rows, in this order; the number of classes stays."""
        index = torch.from_numpy(rows)
        return replace(
            self,
            features=self.features[index],
            labels=self.labels[index],
            owners=None if self.owners is None else self.owners[rows],
            held_out=None if self.held_out is None else self.held_out[rows],
            marks={name: values[rows] for name, values in self.marks.items()},
            raw=None if self.raw is None else self.raw.of_rows(rows),
        )

    def append(self, rows: Rows, features: torch.Tensor) -> Dataset:
        """Return the data set with further rows, which have these features and are in all else as those given."""
        both = np.concatenate([np.arange(len(self)), rows])
        return replace(self.take(both), features=torch.cat([self.features, features]))


DatasetOrSeeded = Dataset | Callable[[int], Dataset]
"""Data handed over from Python: the same for every seed, or a function that returns those of a seed."""


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The rows of one client: which samples it trains on, which it tests on; both in ascending order."""

    client: str
    train: Rows
    test: Rows
    train_labels: torch.Tensor | None = None
    """Labels that replace the data set's on the training rows (a client with wrong labels); None for the true ones."""


@dataclass(frozen=True, eq=False)
class Backdoor:
    """Which class malicious clients want to be answered, and for which rows of the data set: test rows of others."""

    target: int
    rows: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    """By client: those of its local test rows that show what is to be taken for the target, or stamped copies."""


@dataclass(frozen=True)
class Behaviour:
    """How a client departs from the protocol; the defaults are those of a client that keeps it."""

    work: float = 1.0
    """Share of its rows that it trains on in a round, drawn anew each time."""
    stale: int = 0
    """It starts from the global model of this many rounds ago."""
    own_model: bool = False
    """It ignores the model it receives and goes on training its own (AdaFed, simulation 3)."""
    free_rider: bool = False
    """It returns the model it received, after no training."""
    pretends: bool = False
    """free riders: it adds the last step of the global model, with a little noise, to look like a trained one."""
    claims: float = 1.0
    """It reports this many times its number of samples."""
    inflates: float = 1.0
    """Criteria that it measures itself: it reports the most that can be true, or so many times what is true."""
    lies_from: int = 1
    """The round in which its claims begin."""
    attack: AttackKind | None = None
    """What it sends in place of its update, to harm the model; None for the update itself."""
    attacks_from: int = 1
    """The round in which its attack begins; before that it sends its update."""
    strength: float = 1.0
    """The attack's amount."""
    target: int = 0
    """bias: the class whose bias is pushed."""
    family: str = "all"
    """adaptive: the candidates of which it sends the worst."""


HONEST = Behaviour()


@dataclass(frozen=True, eq=False)
class Population:
    """A data set shared out among clients; `server` are the rows that the server itself holds for testing.

    >>> rows = steelyard.in_memory(numpy.zeros((20, 3)), [0, 1] * 10)
    >>> steelyard.data.share_out(rows, steelyard.data.PartitionSettings(clients=2), seed=1).names
    ['client-000', 'client-001']
    """

    dataset: Dataset
    clients: tuple[ClientRows, ...]
    """In ascending order of client id."""
    server: Rows
    """Rows on which the server weighs clients and adapts the loss."""
    notes: tuple[str, ...] = ()
    """What reading and partition had to do that the user should know (people left out, draws with overlap)."""
    report: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows on which the server reports how the combined model does; empty when only local test sets report."""
    behaviours: Mapping[str, Behaviour] = field(default_factory=dict[str, Behaviour])
    """By client, for those that do not keep the protocol."""
    flaws: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By client, in words: what makes it worth less than the others; clients without a flaw are left out."""
    facts: Mapping[str, Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict[str, Mapping[str, Mapping[str, float]]]
    )
    """By client: what is known of its device and its user, {"device": {"battery": 0.7}, "user": {...}}."""
    backdoor: Backdoor | None = None
    """Test rows with the pattern that malicious clients taught; None in a population without."""
    testable: int | None = None
    """How many clients had test rows, where only a sample of them keeps theirs; None: all of them do."""

    @cached_property
    def by_name(self) -> dict[str, ClientRows]:
        return {rows.client: rows for rows in self.clients}

    @property
    def names(self) -> list[str]:
        return [rows.client for rows in self.clients]

    def train_labels(self, rows: ClientRows) -> torch.Tensor:
        """The labels that this client trains on."""
        return self.dataset.labels[torch.from_numpy(rows.train)] if rows.train_labels is None else rows.train_labels

    def label_counts(self) -> dict[str, list[int]]:
        """Return by client how many training samples it has of each class, as it labels them."""
        classes = self.dataset.classes
        return {
            rows.client: torch.bincount(self.train_labels(rows).long(), minlength=classes).tolist()
            for rows in self.clients
        }


def share_of_rows(owners: NDArray[np.str_] | None, count: int, share: float, seed: int) -> Rows:
    """Return which of `count` rows to keep, ascending: whole people drawn until the share is reached, else single rows.

    This is what LEAF's sampling fraction does for a split by user: a person's rows stay together.
    """
    wanted = max(1, round(share * count))
    chance = randomness.generator(seed, purpose="data/share")
    if owners is None:
        return np.sort(chance.permutation(count)[:wanted]).astype(np.int64)
    people, index, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    order = chance.permutation(len(people))
    reached = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    return np.flatnonzero(np.isin(index.reshape(-1), order[:reached])).astype(np.int64)


# Building one from arrays.


def of_arrays(
    features: torch.Tensor | ArrayLike | RawColumns,
    labels: torch.Tensor | ArrayLike,
    owners: Sequence[Any] | NDArray[Any] | None = None,
    *,
    held_out: ArrayLike | None = None,
    marks: Mapping[str, ArrayLike] | None = None,
    classes: int | None = None,
    name: str = "memory",
    tokens: bool = False,
) -> Dataset:
    """Build a data set from tensors or arrays; use it for any data that Steelyard has no reader for.

    Whole-number labels are classes 0, 1, 2, ... (`classes` of them, default the largest plus one); floating-point
    labels are a regression target. Labels (rows, height, width) are masks, a class for each pixel, and labels (rows,
    labels) of 0 and 1 say which of several a row has. uint8 features are pixels and are divided by 255 when used; all
    others become float32, or int64 with `tokens`. `owners` names each row's person, `held_out` marks the rows of a test
    part, `marks` are further 0/1 attributes of the rows such as "sharp". The columns of a table are scaled over all
    rows here, and by training rows alone when they are shared out.
    """
    raw = None
    if isinstance(features, RawColumns):
        raw, everything = features, np.arange(len(features.numbers))
        features = raw.features(raw.scale(everything).apply(raw.numbers))
    inputs = _features(name, features, tokens)
    targets, count, task = _labels(name, labels, classes, tuple(inputs.shape[-2:]))
    if len(inputs) != len(targets):
        raise UserError(
            f"{name}: got {len(inputs)} rows of features and {len(targets)} labels; expected as many of each"
        )
    if not len(targets):
        raise UserError(f"{name}: got no rows; expected at least one")
    people = None if owners is None else owner_names(one_axis(name, "owners", owners))
    test = None if held_out is None else _numbers(name, "held_out", held_out).astype(np.bool_)
    extra = {mark: _numbers(name, mark, values).astype(np.float64) for mark, values in (marks or {}).items()}
    columns: dict[str, NDArray[Any] | None] = {"owners": people, "held_out": test, **extra}
    for column, values in columns.items():
        if values is not None and values.shape != (len(targets),):
            raise UserError(
                f"{name}: {column} has shape {values.shape}; expected one value for each of the {len(targets)} rows"
            )
    if task is None:
        return Dataset(name, inputs, targets, count, people, test, extra, raw=raw)
    return Dataset(name, inputs, targets, 0, people, test, extra, task=task, targets=count, raw=raw)


def _features(name: str, features: torch.Tensor | ArrayLike, tokens: bool) -> torch.Tensor:
    tensor = features.detach().cpu() if isinstance(features, torch.Tensor) else _tensor(name, "features", features)
    if tensor.ndim < 2:
        raise UserError(f"{name}: features has shape {tuple(tensor.shape)}; expected (rows, ...) with two or more axes")
    if not prod(tensor.shape[1:]):
        raise UserError(f"{name}: features has shape {tuple(tensor.shape)}; expected at least one number per row")
    if tensor.is_complex():
        raise UserError(f"{name}: features is complex numbers; expected real ones")
    if tokens:
        if tensor.is_floating_point() or int(tensor.min()) < 0:
            raise UserError(f"{name}: features are no tokens; expected whole numbers from 0")
        return tensor.to(torch.int64).contiguous()
    if tensor.dtype == torch.uint8:
        return tensor.contiguous()
    tensor = tensor.to(torch.float32).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise UserError(f"{name}: features holds nan or infinite values; expected finite numbers")
    return tensor


def _labels(
    name: str, labels: torch.Tensor | ArrayLike, classes: int | None, image: tuple[int, ...]
) -> tuple[torch.Tensor, int, FurtherTask | None]:
    """Return labels, how many classes or labels there are, and the task where they are masks or several labels."""
    tensor = labels.detach().cpu() if isinstance(labels, torch.Tensor) else _tensor(name, "labels", labels)
    if tensor.ndim == 2 and tensor.shape[1] > 1:
        if not bool(((tensor == 0) | (tensor == 1)).all()):
            raise UserError(f"{name}: labels (rows, {tensor.shape[1]}) hold other values than 0 and 1; expected these")
        return tensor.to(torch.float32), tensor.shape[1], "multi-label"
    if tensor.ndim == 3 and len(tensor):
        return *_masks(name, tensor, classes, image), "segmentation"
    if tensor.ndim != 1:
        raise UserError(
            f"{name}: labels has shape {tuple(tensor.shape)}; expected one label per row, several of 0 and 1, or a mask"
        )
    return *_single(name, tensor, classes), None


def _masks(name: str, tensor: torch.Tensor, classes: int | None, image: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """Return masks as bytes (rows, pixels), and the number of classes of a pixel."""
    if tuple(tensor.shape[1:]) != image:
        raise UserError(f"{name}: masks are {tuple(tensor.shape[1:])} and images {image}; expected the same size")
    if tensor.is_floating_point() or tensor.is_complex():
        raise UserError(f"{name}: masks are no whole numbers; expected a class for each pixel")
    least, most = int(tensor.min()), int(tensor.max())
    count = most + 1 if classes is None else classes
    if least < 0 or most >= count or not 2 <= count <= 256:
        raise UserError(
            f"{name}: masks run from {least} to {most}; expected classes 0 (background) to "
            f"{255 if classes is None else count - 1}, two classes at least"
        )
    return tensor.to(torch.uint8).flatten(1), count


def _single(name: str, tensor: torch.Tensor, classes: int | None) -> tuple[torch.Tensor, int]:
    if tensor.is_floating_point():
        if classes:
            raise UserError(f"{name}: labels are floating-point numbers with classes={classes}; expected whole numbers")
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name}: labels holds nan or infinite values; expected finite numbers")
        return tensor.to(torch.float32), 0
    if tensor.is_complex():
        raise UserError(f"{name}: labels is complex numbers; expected whole numbers, or real ones for a regression")
    tensor = tensor.to(torch.int64)
    if not len(tensor):
        return tensor, classes or 0
    least, most = int(tensor.min()), int(tensor.max())
    count = most + 1 if classes is None else classes
    if count > MOST_CLASSES:
        raise UserError(
            f"{name}: labels run up to {count - 1}; expected classes 0 to at most {MOST_CLASSES - 1}, "
            "or floating-point numbers for a regression"
        )
    if least < 0 or most >= count:
        hint = ", numbered from 0 (such as 0 and 1 in place of -1 and 1)" if least < 0 else ""
        raise UserError(f"{name}: labels run from {least} to {most}; expected classes 0 to {count - 1}{hint}")
    return tensor, count


def _numbers(name: str, part: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise UserError(f"{name}: {part} has rows of different lengths; expected one shape for all") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name}: {part} is {_kind(array)}; expected numbers")
    # torch knows neither other byte orders nor extended precision.
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 8
    return array.astype(np.float64) if wide else array.astype(array.dtype.newbyteorder("="), copy=False)


def one_axis(name: str, part: str, values: object) -> NDArray[Any]:
    """Return values as an array of one axis; what has none or more is refused."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        array = np.zeros(())
    if array.ndim != 1:
        found = f"has shape {array.shape}" if array.ndim else f"is {brief(values)}"
        raise UserError(f"{name}: {part} {found}; expected a list or an array with a value for each row")
    return array


def _kind(array: NDArray[Any]) -> str:
    """Say in plain words what an array holds."""
    words = {"U": "text", "S": "text", "c": "complex numbers", "M": "dates", "m": "spans of time", "V": "records"}
    return words.get(array.dtype.kind, "objects")


def _tensor(name: str, part: str, values: ArrayLike) -> torch.Tensor:
    array = _numbers(name, part, values)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array, order="C"))


def owner_names(values: NDArray[Any], word: str = "user") -> NDArray[np.str_]:
    """Return a name per row: whole numbers become word-007, zero-padded so that they sort as numbers; words stay.

    A row without a name (empty, NaN or None) is refused: it would join all such rows to one person.
    """
    values = np.asarray(values)
    if values.dtype.kind in "iu":
        if len(values) and int(values.min()) < 0:
            return np.array([f"{word}-{value}" for value in values.tolist()])
        width = max(3, len(str(int(values.max())))) if len(values) else 3
        return np.array([f"{word}-{value:0{width}d}" for value in values.tolist()])
    if values.dtype.kind == "f" and not bool(np.isfinite(values).all()):
        raise UserError(f"{word}: row {_first(~np.isfinite(values))} has no owner (nan); expected one for every row")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "biufUO":
        raise UserError(f"{word}: owners are {_kind(values)}; expected text or whole numbers")
    names, nameless = values, np.zeros(values.size, np.bool_)
    if values.dtype.kind != "U":
        nameless = np.array([value is None or value != value for value in values.ravel().tolist()], np.bool_)
        names = np.array([str(value) for value in values.ravel().tolist()], dtype=np.str_).reshape(values.shape)
    nameless |= np.char.strip(names).ravel() == ""
    if nameless.any():
        raise UserError(f"{word}: row {_first(nameless)} has no owner; expected one for every row")
    return names


def _first(found: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(found.ravel())[0]) + 1
