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


def semantic(dataset: Dataset, trained: Rows, of: int) -> NDArray[np.bool_]:
    """Return for all rows whether they are of a class and no darker than the brightest quarter of it in training."""
    bright = dataset.features.flatten(1).to(torch.float64).mean(dim=1).numpy()
    mine = dataset.labels.numpy() == of
    known = bright[trained[mine[trained]]]
    return mine & (bright >= (np.quantile(known, 0.75) if len(known) else np.inf))


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

    def noisy(
        self, features: torch.Tensor, deviation: NDArray[np.float64] | float, chance: np.random.Generator
    ) -> torch.Tensor:
        """Return features with Gaussian noise of this deviation, of each column or of all pixels."""
        values = features.numpy().astype(np.float32)
        noise = chance.standard_normal(values.shape, dtype=np.float32)
        values = (values + noise * np.asarray(deviation).astype(np.float32)).astype(np.float32)
        if self.images and features.dtype != torch.uint8:
            values = np.clip(values, self.range.least, self.range.most).astype(np.float32)
        return _as(features.dtype, values)

    def blank(self, features: torch.Tensor, share: float, chance: np.random.Generator) -> torch.Tensor:
        """Return features of which a share of the columns or pixels hold nothing."""
        # Pixels are missing in all channels; columns of a table are its only axis.
        shape = features.shape[-2:] if self.images else features.shape[1:]
        size = math.prod(shape)
        gone = np.zeros(size, dtype=np.bool_)
        gone[chance.permutation(size)[: max(1, round(share * size))]] = True
        blank = np.float32(0) if self.images else self.range.mean.astype(np.float32)
        values = np.where(gone.reshape(shape), blank, features.numpy().astype(np.float32))
        return _as(features.dtype, values.astype(np.float32))

    @cached_property
    def range(self) -> _Range:
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


@dataclass(eq=False)
class FlawedClient:
    """One client as flaws change it: what it trains on, how it behaves, what is known to be wrong with it."""

    of: ChangingPopulation
    name: str
    train: Rows
    test: Rows
    wrong_labels: torch.Tensor | None
    """None for the true ones."""
    changed: torch.Tensor | None = None
    """Changed features; None for those of the data set."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """What marks of the rows are to be multiplied by: a blurred image is no longer sharp."""
    behaviour: Behaviour = HONEST
    flaws: tuple[str, ...] = ()
    """In words."""
    chance: np.random.Generator = field(default_factory=np.random.default_rng)
    """What draws for the flaw that is applied."""
    place: int = 0
    """How many clients have this flaw already."""

    @property
    def rows(self) -> int:
        """The number of its training rows."""
        return len(self.train)

    @property
    def classes(self) -> int:
        """The number of classes of the data."""
        return self.of.dataset.classes

    @property
    def labels(self) -> torch.Tensor:
        """The labels that it trains on so far."""
        return self.of.dataset.labels[torch.from_numpy(self.train)] if self.wrong_labels is None else self.wrong_labels

    @property
    def features(self) -> torch.Tensor:
        """The features that it trains on so far."""
        return self.of.dataset.features[torch.from_numpy(self.train)] if self.changed is None else self.changed

    def label_chance(self) -> np.random.Generator:
        """Return what draws wrong labels, another for labels that an earlier flaw has changed."""
        again = "" if self.wrong_labels is None else f"/{len(self.flaws)}"
        return randomness.generator(self.of.seed, client=self.name, purpose=f"partition/wrong-labels{again}")

    def relabel(self, labels: NDArray[np.int64]) -> None:
        """Give its rows these labels."""
        self.wrong_labels = torch.from_numpy(labels)

    def take(self, positions: Rows) -> None:
        """Leave it some of its training rows."""
        index = torch.from_numpy(positions)
        self.train = self.train[positions]
        self.wrong_labels = None if self.wrong_labels is None else self.wrong_labels[index]
        self.changed = None if self.changed is None else self.changed[index]

    def behave(self, **changes: Any) -> None:
        """Let it depart from the protocol."""
        self.behaviour = replace(self.behaviour, **changes)

    def aim(self, flaw: LabelsFlipped | BackdoorTaught) -> None:
        """Let it be measured how often rows are taken for another class, as this flaw teaches."""
        self.of.aim = flaw

    def add_noise(self, times: float) -> None:
        """Add noise of so many standard deviations."""
        sensors = self.of.sensors
        self.changed = sensors.noisy(self.features, times * sensors.range.deviation, self.chance)

    def blur(self, sigma: float) -> None:
        """Blur its images, which are sharp no longer."""
        features = self.features
        self.changed = _as(features.dtype, blur(features.numpy().astype(np.float32), sigma))
        self.marks = {**self.marks, "sharp": 0.0}

    def blank(self, share: float) -> None:
        """Empty a share of its columns or pixels."""
        self.changed = self.of.sensors.blank(self.features, share, self.chance)
        self.marks = {**self.marks, "complete": self.marks.get("complete", 1.0) * (1 - share)}

    def teach(self, flaw: BackdoorTaught) -> None:
        """Put a backdoor into a share of its rows, rounded and at least one, drawn at random."""
        features, labels = self.features.clone(), self.labels.clone()
        chosen = torch.from_numpy(self.chance.permutation(self.rows)[: max(1, round(flaw.amount * self.rows))])
        if flaw.how == "semantic":
            images = self.of.dataset.features[torch.from_numpy(self.of.trigger(flaw)[0])]
            if not len(images):
                return
            features[chosen] = images[torch.from_numpy(self.chance.integers(len(images), size=len(chosen)))]
        else:
            quarter = self.place % 4 if flaw.how == "distributed" else None
            features[chosen] = stamped(features[chosen], brightest(self.of.dataset.features), quarter)
        labels[chosen] = flaw.target
        self.changed, self.wrong_labels = features, labels


class ChangingPopulation:
    """A population on its way: its clients by name, and what its flaws teach to take for another class."""

    def __init__(self, population: Population, seed: int) -> None:
        self.population, self.dataset, self.seed = population, population.dataset, seed
        self.sensors = BadSensors(population)
        self.clients = {
            rows.client: FlawedClient(self, rows.client, rows.train, rows.test, rows.train_labels)
            for rows in population.clients
        }
        self.aim: LabelsFlipped | BackdoorTaught | None = None
        """The last flaw that teaches to take some rows for another class: how often that works is measured."""

    def add_noise(self, noise: float) -> None:
        """Add Gaussian noise of variance noise · i / N to the training rows of the i-th of N clients (Li et al. 2022).

        Its unit is the brightest pixel, or a column's deviation.
        """
        names, images = sorted(self.clients), self.sensors.images
        unit = brightest(self.dataset.features) if images else self.sensors.range.deviation
        for position, name in enumerate(names, 1):
            client, variance = self.clients[name], noise * position / len(names)
            chance = randomness.generator(self.seed, client=name, purpose="partition/noise")
            client.changed = self.sensors.noisy(client.features, math.sqrt(variance) * unit, chance)
        of = "pixels from 0 to 1" if images else "columns of deviation 1"
        note = f"feature noise: variance {noise / len(names):.3g} ({names[0]}) to {noise:.3g} ({names[-1]}), {of}"
        self.population = replace(self.population, notes=(*self.population.notes, note))

    def copy(self, of: str) -> str:
        """Add one more client with the rows that a client has so far; returns its name."""
        originals = self.population.names
        copies = len(self.clients) - len(originals)
        numbered = originals == [client_name(number, len(originals)) for number in range(len(originals))]
        name = client_name(len(originals) + copies, len(originals)) if numbered else f"{of}-copy-{copies}"
        flaws = (f"copy of {of}",)
        self.clients[name] = replace(self.clients[of], name=name, behaviour=HONEST, flaws=flaws)
        return name

    def done(self) -> Population:
        """Return the population, with changed features as further rows of its data set."""
        made: list[ClientRows] = []
        changed: list[tuple[FlawedClient, torch.Tensor]] = []
        end = len(self.dataset)
        clients = [self.clients[name] for name in sorted(self.clients)]
        for client in clients:
            rows = client.train
            if client.changed is not None:
                rows = np.arange(end, end + len(rows), dtype=np.int64)
                end += len(rows)
                changed.append((client, client.changed))
            made.append(ClientRows(client.name, rows, client.test, client.wrong_labels))
        dataset, found = _with_rows(self.dataset, changed) if changed else self.dataset, None
        if self.aim is not None:
            dataset, found = self._aimed(dataset, {rows.client: rows.test for rows in made}, self.aim)
        return replace(
            self.population,
            dataset=dataset,
            clients=tuple(made),
            behaviours={client.name: client.behaviour for client in clients if client.behaviour != HONEST},
            flaws={client.name: client.flaws for client in clients if client.flaws},
            backdoor=found,
        )

    def _aimed(
        self, dataset: Dataset, tests: Mapping[str, Rows], aim: LabelsFlipped | BackdoorTaught
    ) -> tuple[Dataset, Backdoor]:
        target = aim.target or 0
        if aim.how in ("pixels", "distributed"):
            return with_tests(dataset, tests, target, brightest(self.dataset.features))
        wanted = self.trigger(aim)[1] if isinstance(aim, BackdoorTaught) else dataset.labels.numpy() == aim.classes[0]
        return dataset, Backdoor(target, {client: rows[wanted[rows]] for client, rows in tests.items()})

    def trigger(self, flaw: BackdoorTaught) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the training rows that stand for a semantic backdoor, and for all rows whether they do."""
        trained = np.unique(np.concatenate([rows.train for rows in self.population.clients]))
        of = flaw.classes[0] if flaw.classes else (flaw.target + 1) % self.dataset.classes
        shown = semantic(self.dataset, trained, of)
        return trained[shown[trained]], shown


def _with_rows(dataset: Dataset, changed: Sequence[tuple[FlawedClient, torch.Tensor]]) -> Dataset:
    """Append the changed features of some clients; labels, owners and marks are those of the rows they come from."""
    rows = np.concatenate([client.train for client, _ in changed])
    bigger = dataset.append(rows, torch.cat([features for _, features in changed]))
    sizes = [client.rows for client, _ in changed]
    for name, values in bigger.marks.items():
        values[len(dataset) :] *= np.repeat([client.marks.get(name, 1.0) for client, _ in changed], sizes)
    return bigger


def flawed(population: Population, flaws: Sequence[FlawSettings], seed: int, noise: float | None = None) -> Population:
    """Return the population with flawed clients; use it once, on clients as the partition made them.

    `noise` is the partition's own, which all clients have in growing amounts: a skew of features, not a flaw.
    """
    changing = ChangingPopulation(population, seed)
    if noise is not None:
        changing.add_noise(noise)
    last: list[str] = []
    for index, flaw in enumerate(flaws):
        _check(population.dataset, index, flaw)
        concerned = _who(changing, flaw, index, last)
        if isinstance(flaw, Copy):
            last = [changing.copy(name) for name in concerned]
            continue
        for place, name in enumerate(concerned):
            client = changing.clients[name]
            client.chance, client.place = randomness.generator(seed, client=name, purpose=f"flaws/{index}"), place
            flaw.change(client)
            if isinstance(flaw, Boosted):
                # Model replacement: all of them together, each with an equal say, make up for the honest ones.
                client.behave(strength=flaw.amount * len(changing.clients) / len(concerned))
            client.flaws = (*client.flaws, flaw.words())
        last = concerned
    return changing.done()


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


def _who(changing: ChangingPopulation, flaw: FlawSettings, index: int, last: list[str]) -> list[str]:
    """Return the clients that this flaw concerns, in ascending order; `last`: those of the flaw before, or copies."""
    if flaw.pick is None:
        for name in flaw.names:
            if name not in changing.clients:
                raise UserError(f"flaws.{index}.{flaw.who}: no client '{name}'{nearest(name, changing.clients)}")
        return sorted(set(flaw.names))
    if flaw.pick == "same":
        return last
    everyone = changing.population.names
    free = [name for name in everyone if flaw.among == "all" or not changing.clients[name].flaws]
    wanted = flaw.wanted(len(everyone))
    if not free or (flaw.count is not None and flaw.count > len(free)):
        raise UserError(
            f"flaws.{index}.pick: asks for {wanted} clients; allowed: at most {len(free)}, those without a flaw so far "
            "(or among = 'all')"
        )
    if flaw.pick == "random":
        mixed = randomness.generator(changing.seed, purpose=f"flaws/{index}").permutation(len(free))
        return sorted(free[position] for position in mixed[:wanted].tolist())
    sizes = np.array([len(changing.population.by_name[name].train) for name in free])
    order = np.argsort(-sizes if flaw.pick == "biggest" else sizes, kind="stable")
    return sorted(free[position] for position in order[:wanted].tolist())
