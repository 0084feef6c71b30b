"""Giving some clients of a population the flaws that `[[flaws]]` describes.

Flaws are applied in the order written. Features that change are appended to the data set as rows of their own, so that
the shared samples, every test set and the server's rows stay as they are. All chance is named by the seed, the client
and the position of the flaw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError, nearest
from steelyard.data.attacks import BackdoorTaught, Boosted
from steelyard.data.dataset import HONEST, Backdoor, Behaviour, ClientRows, Dataset, Population, Rows
from steelyard.data.flaws import Copy, FlawSettings, LabelsFlipped
from steelyard.data.partition_settings import client_name


def stamped(features: torch.Tensor, brightest: float, quarter: int | None = None) -> torch.Tensor:
    """Return images [rows, channels, height, width] with the pattern, or a quarter of it, on all of them."""
    side = max(2, features.shape[-2] // 9)
    found = features.clone()
    corner = found[..., -side:, -side:]
    if quarter is not None:
        middle = (side + 1) // 2
        down, along = (slice(middle) if half == 0 else slice(middle, side) for half in divmod(quarter, 2))
        corner = corner[..., down, along]
    corner.fill_(brightest)
    return found


def brightest(features: torch.Tensor) -> float:
    """Return the value of a full-bright pixel: 255 for bytes, else the greatest that there is."""
    return 255.0 if features.dtype == torch.uint8 else float(features.max())


def poison(
    features: torch.Tensor,
    labels: torch.Tensor,
    share: float,
    target: int,
    bright: float,
    chance: np.random.Generator,
    quarter: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's rows with the pattern on a share of them, drawn at random and rounded, labelled `target`."""
    chosen, features, labels = _drawn(len(labels), share, chance), features.clone(), labels.clone()
    features[chosen] = stamped(features[chosen], bright, quarter)
    labels[chosen] = target
    return features, labels


def _drawn(rows: int, share: float, chance: np.random.Generator) -> torch.Tensor:
    """Return a share of so many rows, rounded and at least one, drawn at random."""
    return torch.from_numpy(chance.permutation(rows)[: max(1, round(share * rows))])


def semantic(dataset: Dataset, trained: Rows, of: int) -> NDArray[np.bool_]:
    """Return for all rows whether they are of a class and no darker than the brightest quarter of it in training."""
    bright = dataset.features.flatten(1).to(torch.float64).mean(dim=1).numpy()
    mine = dataset.labels.numpy() == of
    known = bright[trained[mine[trained]]]
    return mine & (bright >= (np.quantile(known, 0.75) if len(known) else np.inf))


def replaced(
    features: torch.Tensor,
    labels: torch.Tensor,
    share: float,
    target: int,
    images: torch.Tensor,
    chance: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's rows with a share of them replaced by some of these images, labelled `target`."""
    chosen, features, labels = _drawn(len(labels), share, chance), features.clone(), labels.clone()
    if len(images):
        features[chosen] = images[torch.from_numpy(chance.integers(len(images), size=len(chosen)))]
        labels[chosen] = target
    return features, labels


def with_tests(dataset: Dataset, tests: Mapping[str, Rows], target: int, bright: float) -> tuple[Dataset, Backdoor]:
    """Append stamped copies of the test rows of other classes; each row once, however many clients test on it."""
    truth = dataset.labels.numpy()
    mine = {client: rows[truth[rows] != target] for client, rows in tests.items()}
    distinct = np.unique(np.concatenate([np.zeros(0, np.int64), *mine.values()]))
    bigger = dataset.append(distinct, stamped(dataset.features[torch.from_numpy(distinct)], bright))
    begin = len(dataset)
    return bigger, Backdoor(target, {client: begin + np.searchsorted(distinct, rows) for client, rows in mine.items()})


# What bad sensors do to samples: noise, blur, and columns or pixels that hold nothing.


Values = NDArray[np.float32]
_AT_ONCE = 4096
"""Rows whose numbers are summed in one go; bounds the memory for large data sets."""


class _Range(NamedTuple):
    """How the clients' clean training rows are spread: single numbers for images, one per column for tables."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    least: float
    most: float


class BadSensors:
    """Spoils features as a bad sensor would; it measures the range of clean training rows once, when first needed."""

    def __init__(self, population: Population) -> None:
        self.population = population
        self.images = population.dataset.features.dim() > 2

    def noisy(self, features: torch.Tensor, times: float, chance: np.random.Generator) -> torch.Tensor:
        """Return features with Gaussian noise of so many standard deviations."""
        return self._noisy(features, times * self._range.deviation, chance)

    def blank(self, features: torch.Tensor, share: float, chance: np.random.Generator) -> torch.Tensor:
        """Return features of which a share of the columns or pixels hold nothing."""
        return _as(features.dtype, self._missing(features.numpy().astype(np.float32), share, chance))

    def with_noise(self, features: torch.Tensor, variance: float, chance: np.random.Generator) -> torch.Tensor:
        """Return features with Gaussian noise: of this variance where the brightest pixel, or a deviation, is 1."""
        unit = brightest(self.population.dataset.features) if self.images else self._range.deviation
        return self._noisy(features, math.sqrt(variance) * np.asarray(unit), chance)

    @cached_property
    def _range(self) -> _Range:
        """Mean and deviation in float64, by sums of blocks, so that no copy of all samples is made."""
        features = self.population.dataset.features
        rows = np.unique(np.concatenate([client.train for client in self.population.clients]))
        axis = None if self.images else 0
        total, squares, count = np.zeros(()), np.zeros(()), 0
        least, most = math.inf, -math.inf
        for begin in range(0, len(rows), _AT_ONCE):
            block = features[torch.from_numpy(rows[begin : begin + _AT_ONCE])].numpy().astype(np.float64)
            total = total + block.sum(axis=axis)
            squares = squares + np.square(block).sum(axis=axis)
            count += block.size if self.images else len(block)
            least, most = min(least, float(block.min())), max(most, float(block.max()))
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
        return _Range(mean, deviation, least, most)

    def _noisy(
        self, features: torch.Tensor, deviation: NDArray[np.float64], chance: np.random.Generator
    ) -> torch.Tensor:
        values = features.numpy().astype(np.float32)
        noise = chance.standard_normal(values.shape, dtype=np.float32)
        values = (values + noise * deviation.astype(np.float32)).astype(np.float32)
        if self.images and features.dtype != torch.uint8:
            values = np.clip(values, self._range.least, self._range.most).astype(np.float32)
        return _as(features.dtype, values)

    def _missing(self, values: Values, share: float, chance: np.random.Generator) -> Values:
        # Pixels are missing in all channels; columns of a table are its only axis.
        shape = values.shape[-2:] if self.images else values.shape[1:]
        size = math.prod(shape)
        gone = np.zeros(size, dtype=np.bool_)
        gone[chance.permutation(size)[: max(1, round(share * size))]] = True
        blank = np.float32(0) if self.images else self._range.mean.astype(np.float32)
        return np.where(gone.reshape(shape), blank, values).astype(np.float32)


def _as(kind: torch.dtype, values: Values) -> torch.Tensor:
    """Return values in the type that their source has; bytes stay from 0 to 255."""
    if kind == torch.uint8:
        return torch.from_numpy(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    return torch.from_numpy(values)


def blur(images: Values, sigma: float) -> Values:
    """Return images [..., height, width] blurred by a Gaussian of this sigma in pixels; edge pixels go on beyond it.

    Rows first, then columns; the Gaussian is cut at three sigmas (or the image's size) and sums to 1.
    """
    for axis in (-1, -2):
        reach = min(max(1, math.ceil(3 * sigma)), images.shape[axis])
        weights = np.exp(-0.5 * np.square(np.arange(-reach, reach + 1) / sigma))
        weights = (weights / weights.sum()).astype(np.float32)
        positions = np.arange(images.shape[axis])
        blurred = np.zeros_like(images)
        # One weighted copy after another: the same bits on every machine, whatever number of threads.
        for offset, weight in zip(range(-reach, reach + 1), weights, strict=True):
            blurred += weight * images.take(np.clip(positions + offset, 0, images.shape[axis] - 1), axis=axis)
        images = blurred
    return images


# A population while flaws are applied to it.


@dataclass(frozen=True, eq=False)
class ChangingClient:
    """The training rows of one client while flaws are applied."""

    rows: Rows
    test: Rows
    labels: torch.Tensor | None = None
    """Wrong labels; None for the true ones."""
    features: torch.Tensor | None = None
    """Changed features; None for those of the data set."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """What marks of the rows are to be multiplied by: a blurred image is no longer sharp."""

    def take(self, positions: Rows) -> ChangingClient:
        """Return the client with some of its training rows."""
        index = torch.from_numpy(positions)
        return replace(
            self,
            rows=self.rows[positions],
            labels=None if self.labels is None else self.labels[index],
            features=None if self.features is None else self.features[index],
        )


@dataclass(eq=False)
class ChangingPopulation:
    """A population on its way: clients by name, how they behave, what is known to be wrong with them."""

    population: Population
    clients: dict[str, ChangingClient]
    sensors: BadSensors
    behaviours: dict[str, Behaviour] = field(default_factory=dict[str, Behaviour])
    words: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    aim: LabelsFlipped | BackdoorTaught | None = None
    """The last flaw that teaches to take some rows for another class: how often that works is measured."""
    last: list[str] = field(default_factory=list[str])
    """The clients that the flaw before this one touched; of a copy the new ones."""
    touched: int = 0
    """How many clients have this flaw so far."""

    @classmethod
    def of(cls, population: Population) -> ChangingPopulation:
        """Begin with the clients as the partition made them."""
        clients = {rows.client: ChangingClient(rows.train, rows.test, rows.train_labels) for rows in population.clients}
        return cls(population, clients, BadSensors(population))

    def note(self, name: str, words: str) -> None:
        """Write down what is wrong with a client."""
        self.words[name] = (*self.words.get(name, ()), words)

    def labels(self, client: ChangingClient) -> torch.Tensor:
        """The labels that this client trains on so far."""
        return self.population.dataset.labels[torch.from_numpy(client.rows)] if client.labels is None else client.labels

    def features(self, client: ChangingClient) -> torch.Tensor:
        """The features that this client trains on so far."""
        if client.features is not None:
            return client.features
        return self.population.dataset.features[torch.from_numpy(client.rows)]

    def done(self) -> Population:
        """Return the population, with changed features as further rows of its data set."""
        made: list[ClientRows] = []
        changed: list[ChangingClient] = []
        end = len(self.population.dataset)
        for name in sorted(self.clients):
            client = self.clients[name]
            rows = client.rows
            if client.features is not None:
                rows = np.arange(end, end + len(rows), dtype=np.int64)
                end += len(rows)
                changed.append(client)
            made.append(ClientRows(name, rows, client.test, client.labels))
        dataset, found = _with_rows(self.population.dataset, changed) if changed else self.population.dataset, None
        if self.aim is not None:
            dataset, found = self._aimed(dataset, {rows.client: rows.test for rows in made}, self.aim)
        return replace(
            self.population,
            dataset=dataset,
            clients=tuple(made),
            behaviours=self.behaviours,
            flaws=self.words,
            backdoor=found,
        )

    def _aimed(
        self, dataset: Dataset, tests: Mapping[str, Rows], aim: LabelsFlipped | BackdoorTaught
    ) -> tuple[Dataset, Backdoor]:
        target = aim.target or 0
        if aim.how in ("pixels", "distributed"):
            return with_tests(dataset, tests, target, self.bright)
        wanted = self.trigger(aim)[1] if isinstance(aim, BackdoorTaught) else dataset.labels.numpy() == aim.classes[0]
        return dataset, Backdoor(target, {client: rows[wanted[rows]] for client, rows in tests.items()})

    def trigger(self, flaw: BackdoorTaught) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the training rows that stand for a semantic backdoor, and for all rows whether they do."""
        dataset = self.population.dataset
        trained = np.unique(np.concatenate([rows.train for rows in self.population.clients]))
        of = flaw.classes[0] if flaw.classes else (flaw.target + 1) % dataset.classes
        shown = semantic(dataset, trained, of)
        return trained[shown[trained]], shown

    @property
    def bright(self) -> float:
        """The value of a full-bright pixel."""
        return brightest(self.population.dataset.features)


def _with_rows(dataset: Dataset, changed: list[ChangingClient]) -> Dataset:
    """Append the changed features of some clients; labels, owners and marks are those of the rows they come from."""
    rows = np.concatenate([client.rows for client in changed])
    bigger = dataset.append(rows, torch.cat([client.features for client in changed if client.features is not None]))
    sizes = [len(client.rows) for client in changed]
    for name, values in bigger.marks.items():
        values[len(dataset) :] *= np.repeat([client.marks.get(name, 1.0) for client in changed], sizes)
    return bigger


class FlawedClient:
    """One client of a changing population, as a flaw changes it."""

    def __init__(self, changing: ChangingPopulation, name: str, seed: int, index: int) -> None:
        self.name, self._changing, self._seed = name, changing, seed
        self.chance = randomness.generator(seed, client=name, purpose=f"flaws/{index}")
        self.classes = changing.population.dataset.classes

    @property
    def _client(self) -> ChangingClient:
        return self._changing.clients[self.name]

    @property
    def rows(self) -> int:
        """The number of its training rows."""
        return len(self._client.rows)

    @property
    def labels(self) -> torch.Tensor:
        """The labels that it trains on so far."""
        return self._changing.labels(self._client)

    def label_chance(self) -> np.random.Generator:
        """Return what draws wrong labels, another for labels that an earlier flaw has changed."""
        again = "" if self._client.labels is None else f"/{len(self._changing.words.get(self.name, ()))}"
        return randomness.generator(self._seed, client=self.name, purpose=f"partition/wrong-labels{again}")

    def relabel(self, labels: NDArray[np.int64]) -> None:
        """Give its rows these labels."""
        self._set(labels=torch.from_numpy(labels))

    def take(self, positions: Rows) -> None:
        """Leave it some of its training rows."""
        self._changing.clients[self.name] = self._client.take(positions)

    def behave(self, **changes: Any) -> None:
        """Let it depart from the protocol."""
        behaviour = replace(self._changing.behaviours.get(self.name, HONEST), **changes)
        if behaviour != HONEST:
            self._changing.behaviours[self.name] = behaviour

    def aim(self, flaw: LabelsFlipped | BackdoorTaught) -> None:
        """Let it be measured how often rows are taken for another class, as this flaw teaches."""
        self._changing.aim = flaw

    def add_noise(self, times: float) -> None:
        """Add noise of so many standard deviations."""
        self._set(features=self._changing.sensors.noisy(self._features, times, self.chance))

    def blur(self, sigma: float) -> None:
        """Blur its images, which are sharp no longer."""
        values = blur(self._features.numpy().astype(np.float32), sigma)
        self._set(features=_as(self._features.dtype, values), marks={**self._client.marks, "sharp": 0.0})

    def blank(self, share: float) -> None:
        """Empty a share of its columns or pixels."""
        marks = self._client.marks
        complete = marks.get("complete", 1.0) * (1 - share)
        features = self._changing.sensors.blank(self._features, share, self.chance)
        self._set(features=features, marks={**marks, "complete": complete})

    def teach(self, flaw: BackdoorTaught) -> None:
        """Put a backdoor into a share of its rows."""
        changing = self._changing
        given = self._features, self.labels, flaw.amount, flaw.target
        if flaw.how == "semantic":
            images = changing.population.dataset.features[torch.from_numpy(changing.trigger(flaw)[0])]
            features, labels = replaced(*given, images, self.chance)
        else:
            quarter = changing.touched % 4 if flaw.how == "distributed" else None
            features, labels = poison(*given, changing.bright, self.chance, quarter)
        self._set(features=features, labels=labels)

    @property
    def _features(self) -> torch.Tensor:
        return self._changing.features(self._client)

    def _set(self, **changes: Any) -> None:
        self._changing.clients[self.name] = replace(self._client, **changes)


def flawed(population: Population, flaws: Sequence[FlawSettings], seed: int, noise: float | None = None) -> Population:
    """Return the population with flawed clients; use it once, on clients as the partition made them.

    `noise` is the partition's own, which all clients have in growing amounts: a skew of features, not a flaw.
    """
    changing = ChangingPopulation.of(population)
    if noise is not None:
        _add_noise(changing, noise, seed)
    for index, flaw in enumerate(flaws):
        _check(population.dataset, index, flaw)
        touched: list[str] = []
        concerned = _who(changing, flaw, index, seed)
        for changing.touched, name in enumerate(concerned):
            if isinstance(flaw, Copy):
                touched.append(_copy(changing, flaw, name))
                continue
            flaw.change(FlawedClient(changing, name, seed, index))
            if isinstance(flaw, Boosted):
                # Model replacement: all of them together, each with an equal say, make up for the honest ones.
                times = flaw.amount * len(changing.clients) / len(concerned)
                changing.behaviours[name] = replace(changing.behaviours[name], strength=times)
            changing.note(name, flaw.words())
            touched.append(name)
        changing.last = touched
    return changing.done()


def _add_noise(changing: ChangingPopulation, noise: float, seed: int) -> None:
    """Add Gaussian noise of variance noise · i / N to the training rows of the i-th of N clients (Li et al. 2022)."""
    names = sorted(changing.clients)
    for position, name in enumerate(names, 1):
        chance = randomness.generator(seed, client=name, purpose="partition/noise")
        client = changing.clients[name]
        features = changing.sensors.with_noise(changing.features(client), noise * position / len(names), chance)
        changing.clients[name] = replace(client, features=features)
    of = "pixels from 0 to 1" if changing.sensors.images else "columns of deviation 1"
    note = f"feature noise: variance {noise / len(names):.3g} ({names[0]}) to {noise:.3g} ({names[-1]}), {of}"
    changing.population = replace(changing.population, notes=(*changing.population.notes, note))


def _check(dataset: Dataset, index: int, flaw: FlawSettings) -> None:
    where = f"flaws.{index}.kind: got '{flaw.kind}'"
    if flaw.needs_classes and dataset.classes < 2:
        raise UserError(
            f"{where}, which needs two classes or more, but {dataset.name} has {dataset.classes or 'none'}; allowed: "
            "kinds without classes"
        )
    for name, highest in flaw.named_classes.items():
        if highest >= dataset.classes:
            raise UserError(f"flaws.{index}.{name}: got {highest}; allowed: 0 to {dataset.classes - 1}")
    if flaw.needs_images and dataset.features.dim() != 4:
        raise UserError(
            f"{where}, which needs images, but a sample of {dataset.name} has the shape {dataset.shape}; allowed: "
            "noisy, missing"
        )
    if flaw.needs_numbers and dataset.tokens:
        raise UserError(
            f"{where}, but the rows of {dataset.name} are tokens of a text; allowed: flaws of labels, rows and "
            "behaviour"
        )


def _who(changing: ChangingPopulation, flaw: FlawSettings, index: int, seed: int) -> list[str]:
    """Return the clients that this flaw concerns, in ascending order."""
    if flaw.pick is None:
        for name in flaw.names:
            if name not in changing.clients:
                raise UserError(f"flaws.{index}.{flaw.who}: no client '{name}'{nearest(name, changing.clients)}")
        return sorted(set(flaw.names))
    if flaw.pick == "same":
        return changing.last
    everyone = changing.population.names
    free = [name for name in everyone if flaw.among == "all" or name not in changing.words]
    wanted = flaw.wanted(len(everyone))
    if not free or (flaw.count is not None and flaw.count > len(free)):
        raise UserError(
            f"flaws.{index}.pick: asks for {wanted} clients; allowed: at most {len(free)}, those without a flaw so far "
            "(or among = 'all')"
        )
    if flaw.pick == "random":
        mixed = randomness.generator(seed, purpose=f"flaws/{index}").permutation(len(free))
        return sorted(free[position] for position in mixed[:wanted].tolist())
    sizes = np.array([len(changing.population.by_name[name].train) for name in free])
    order = np.argsort(-sizes if flaw.pick == "biggest" else sizes, kind="stable")
    return sorted(free[position] for position in order[:wanted].tolist())


def _copy(changing: ChangingPopulation, flaw: Copy, of: str) -> str:
    """Add one more client with the rows that a client has so far; returns its name."""
    originals = changing.population.names
    copies = len(changing.clients) - len(originals)
    numbered = originals == [client_name(number, len(originals)) for number in range(len(originals))]
    name = client_name(len(originals) + copies, len(originals)) if numbered else f"{of}-copy-{copies}"
    changing.clients[name] = changing.clients[of]
    changing.note(name, f"copy of {of}")
    return name
