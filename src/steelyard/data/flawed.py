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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError, nearest
from steelyard.data.dataset import HONEST, Backdoor, Behaviour, ClientRows, Dataset, Population, Rows
from steelyard.data.flaws import NEEDS_CLASSES, FlawSettings
from steelyard.data.schemes import client_name


def stamped(features: torch.Tensor, brightest: float) -> torch.Tensor:
    """Return images [rows, channels, height, width] with the pattern on all of them."""
    side = max(2, features.shape[-2] // 9)
    found = features.clone()
    found[..., -side:, -side:] = brightest
    return found


def brightest(features: torch.Tensor) -> float:
    """Return the value of a full-bright pixel: 255 for bytes, else the greatest that there is."""
    return 255.0 if features.dtype == torch.uint8 else float(features.max())


def poison(
    features: torch.Tensor, labels: torch.Tensor, share: float, target: int, bright: float, chance: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's rows with the pattern on a share of them, drawn at random and rounded, labelled `target`."""
    chosen, features, labels = _drawn(len(labels), share, chance), features.clone(), labels.clone()
    features[chosen] = stamped(features[chosen], bright)
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
    index = torch.from_numpy(distinct)
    bigger = replace(
        dataset,
        features=torch.cat([dataset.features, stamped(dataset.features[index], bright)]),
        labels=torch.cat([dataset.labels, dataset.labels[index]]),
        owners=None if dataset.owners is None else np.concatenate([dataset.owners, dataset.owners[distinct]]),
        held_out=None if dataset.held_out is None else np.concatenate([dataset.held_out, dataset.held_out[distinct]]),
        marks={name: np.concatenate([values, values[distinct]]) for name, values in dataset.marks.items()},
    )
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

    def spoilt(self, features: torch.Tensor, flaw: FlawSettings, chance: np.random.Generator) -> torch.Tensor:
        """Return spoilt features [rows, ...] of the same type; `flaw` is noisy, blurred or missing."""
        if flaw.kind == "noisy":
            return self._noisy(features, flaw.size * self._range.deviation, chance)
        values = features.numpy().astype(np.float32)
        values = blur(values, flaw.size) if flaw.kind == "blurred" else self._missing(values, flaw.size, chance)
        return _as(features.dtype, values)

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
    aim: FlawSettings | None = None
    """The last flaw that teaches to take some rows for another class: how often that works is measured."""
    last: list[str] = field(default_factory=list[str])
    """The clients that the flaw before this one touched; of a copy the new ones."""

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

    def _aimed(self, dataset: Dataset, tests: Mapping[str, Rows], aim: FlawSettings) -> tuple[Dataset, Backdoor]:
        target = aim.target or 0
        if aim.how == "pixels":
            return with_tests(dataset, tests, target, self.bright)
        wanted = self.trigger(aim)[1] if aim.how == "semantic" else dataset.labels.numpy() == aim.classes[0]
        return dataset, Backdoor(target, {client: rows[wanted[rows]] for client, rows in tests.items()})

    def trigger(self, flaw: FlawSettings) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the training rows that stand for a semantic backdoor, and for all rows whether they do."""
        dataset = self.population.dataset
        trained = np.unique(np.concatenate([rows.train for rows in self.population.clients]))
        of = flaw.classes[0] if flaw.classes else ((flaw.target or 0) + 1) % dataset.classes
        shown = semantic(dataset, trained, of)
        return trained[shown[trained]], shown

    @property
    def bright(self) -> float:
        """The value of a full-bright pixel."""
        return brightest(self.population.dataset.features)


def _with_rows(dataset: Dataset, changed: list[ChangingClient]) -> Dataset:
    """Append the changed features of some clients; labels, owners and marks are those of the rows they come from."""
    rows = np.concatenate([client.rows for client in changed])
    marks = {name: np.concatenate([values, values[rows]]) for name, values in dataset.marks.items()}
    for name, values in marks.items():
        values[len(dataset) :] *= np.repeat(
            [client.marks.get(name, 1.0) for client in changed], [len(client.rows) for client in changed]
        )
    features = [client.features for client in changed if client.features is not None]
    return replace(
        dataset,
        features=torch.cat([dataset.features, *features]),
        labels=torch.cat([dataset.labels, dataset.labels[torch.from_numpy(rows)]]),
        owners=None if dataset.owners is None else np.concatenate([dataset.owners, dataset.owners[rows]]),
        held_out=None if dataset.held_out is None else np.concatenate([dataset.held_out, dataset.held_out[rows]]),
        marks=marks,
    )


def in_words(flaw: FlawSettings, of: str = "") -> str:
    """Say in a few words what is wrong with a client that has this flaw; `of` is the client that a copy copies."""
    if flaw.kind == "labels-flipped" and flaw.how == "class":
        return f"class {flaw.classes[0]} labelled {flaw.target} ({100 * flaw.size:g}%)"
    size, percent, many = f"{flaw.size:g}", f"{100 * flaw.size:g}%", "" if flaw.size == 1 else "s"
    named = ", ".join(map(str, flaw.classes))
    since = "" if flaw.from_round is None else f" from round {flaw.from_round}"
    return {
        "labels-flipped": f"labels flipped {'in pairs ' if flaw.how == 'pairs' else ''}({percent})",
        "noisy": f"noise of {size} standard deviation{many}",
        "blurred": f"blurred (sigma {size})",
        "missing": f"features missing ({percent})",
        "rows-repeated": f"rows repeated {size} times",
        "classes-missing": f"classes {named} missing" if named else f"classes missing ({percent})",
        "few-steps": f"few steps ({percent} of the rows)",
        "stale": f"model {size} round{many} old",
        "copy": f"copy of {of}",
        "own-model": "trains its own model",
        "free-rider": "colluding free rider" if flaw.how == "colluding" else "free rider",
        "claims-size": f"claims {size} times its size{since}",
        "claims-criteria": f"inflates its criteria{since}",
        "reversed": f"update reversed, {size} times",
        "gaussian": f"update of noise, {size} times",
        "alie": f"ALIE ({size} standard deviations)",
        "ipm": f"IPM ({size} times)",
        "min-max": "min-max",
        "adaptive": f"adaptive ({flaw.how})",
        "boosted": f"boosted to replace the model{'' if flaw.size == 1 else f', {size} times'}",
        "bias": f"bias of class {flaw.target} pushed, {size} times",
        "backdoor": f"{'semantic ' if flaw.how == 'semantic' else ''}backdoor to class {flaw.target} "
        f"({percent} of the rows)",
    }[flaw.kind]


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
        for name in concerned:
            if flaw.kind == "copy":
                touched.append(_copy(changing, flaw, name))
            else:
                chance = randomness.generator(seed, client=name, purpose=f"flaws/{index}")
                _change(changing, flaw, name, chance, seed)
                if flaw.kind == "boosted":
                    # Model replacement: all of them together, each with an equal say, make up for the honest ones.
                    times = flaw.size * len(changing.clients) / len(concerned)
                    changing.behaviours[name] = replace(changing.behaviours[name], strength=times)
                changing.note(name, in_words(flaw))
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
    if flaw.kind in NEEDS_CLASSES and dataset.classes < 2:
        raise UserError(
            f"flaws.{index}.kind: got '{flaw.kind}', which needs two classes or more, but {dataset.name} has "
            f"{dataset.classes or 'none'}; allowed: kinds without classes"
        )
    if flaw.classes and max(flaw.classes) >= dataset.classes:
        raise UserError(f"flaws.{index}.classes: got {max(flaw.classes)}; allowed: 0 to {dataset.classes - 1}")
    if flaw.target is not None and flaw.target >= dataset.classes:
        raise UserError(f"flaws.{index}.target: got {flaw.target}; allowed: 0 to {dataset.classes - 1}")
    if flaw.kind in ("blurred", "backdoor") and dataset.features.dim() != 4:
        raise UserError(
            f"flaws.{index}.kind: got '{flaw.kind}', which needs images, but a sample of {dataset.name} has the shape "
            f"{dataset.shape}; allowed: noisy, missing"
        )
    if flaw.kind in ("noisy", "missing") and dataset.tokens:
        raise UserError(
            f"flaws.{index}.kind: got '{flaw.kind}', but the rows of {dataset.name} are tokens of a text; allowed: "
            "flaws of labels, rows and behaviour"
        )


def _who(changing: ChangingPopulation, flaw: FlawSettings, index: int, seed: int) -> list[str]:
    """Return the clients that this flaw concerns, in ascending order."""
    if flaw.pick is None:
        for name in flaw.names:
            if name not in changing.clients:
                where = "of" if flaw.kind == "copy" else "clients"
                raise UserError(f"flaws.{index}.{where}: no client '{name}'{nearest(name, changing.clients)}")
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


def _copy(changing: ChangingPopulation, flaw: FlawSettings, of: str) -> str:
    """Add one more client with the rows that a client has so far; returns its name."""
    originals = changing.population.names
    copies = len(changing.clients) - len(originals)
    numbered = originals == [client_name(number, len(originals)) for number in range(len(originals))]
    name = client_name(len(originals) + copies, len(originals)) if numbered else f"{of}-copy-{copies}"
    changing.clients[name] = changing.clients[of]
    changing.note(name, in_words(flaw, of))
    return name


def _change(
    changing: ChangingPopulation, flaw: FlawSettings, name: str, chance: np.random.Generator, seed: int
) -> None:
    """Give one client one flaw: change its rows, or how it behaves."""
    client, behaviour = changing.clients[name], changing.behaviours.get(name, HONEST)
    match flaw.kind:
        case "labels-flipped":
            client = _flip(changing, client, flaw, name, seed)
        case "noisy" | "blurred" | "missing":
            features = changing.sensors.spoilt(changing.features(client), flaw, chance)
            client = replace(client, features=features, marks=_marked(client.marks, flaw))
        case "rows-repeated":
            client = client.take(_repeated(len(client.rows), flaw.size, chance))
        case "classes-missing":
            client = client.take(_without_classes(changing.labels(client).numpy(), flaw, name, chance))
        case "few-steps":
            behaviour = replace(behaviour, work=flaw.size)
        case "stale":
            behaviour = replace(behaviour, stale=int(flaw.size))
        case "own-model":
            behaviour = replace(behaviour, own_model=True)
        case "free-rider":
            behaviour = replace(behaviour, free_rider=True, pretends=flaw.how == "colluding")
        case "claims-size":
            behaviour = replace(behaviour, claims=flaw.size, lies_from=flaw.from_round or 1)
        case "claims-criteria":
            behaviour = replace(behaviour, claims=flaw.size, inflates=flaw.size, lies_from=flaw.from_round or 1)
        case "reversed" | "gaussian" | "alie" | "ipm" | "min-max" | "boosted" | "bias":
            behaviour = replace(behaviour, attack=flaw.kind, strength=flaw.size, target=flaw.target or 0)
        case "adaptive":
            behaviour = replace(behaviour, attack="adaptive", family=flaw.how or "all")
        case "backdoor":
            changing.aim = flaw
            given = changing.features(client), changing.labels(client), flaw.size, flaw.target or 0
            if flaw.how == "semantic":
                images = changing.population.dataset.features[torch.from_numpy(changing.trigger(flaw)[0])]
                features, labels = replaced(*given, images, chance)
            else:
                features, labels = poison(*given, changing.bright, chance)
            client = replace(client, features=features, labels=labels)
        case "copy":
            raise AssertionError("a copy is a client of its own")
    changing.clients[name] = client
    if behaviour != HONEST:
        changing.behaviours[name] = behaviour


def _marked(marks: Mapping[str, float], flaw: FlawSettings) -> dict[str, float]:
    """Return what the marks that criteria read become: blurred images are not sharp, missing columns not complete."""
    match flaw.kind:
        case "blurred":
            return {**marks, "sharp": 0.0}
        case "missing":
            return {**marks, "complete": marks.get("complete", 1.0) * (1 - flaw.size)}
        case _:
            return dict(marks)


def _flip(
    changing: ChangingPopulation, client: ChangingClient, flaw: FlawSettings, name: str, seed: int
) -> ChangingClient:
    """Replace the labels of some rows by one of the other classes: any, all equally likely, or the next one."""
    classes = changing.population.dataset.classes
    again = "" if client.labels is None else f"/{len(changing.words.get(name, ()))}"
    chance = randomness.generator(seed, client=name, purpose=f"partition/wrong-labels{again}")
    labels: NDArray[np.int64] = changing.labels(client).numpy().copy()
    if flaw.how == "class":
        changing.aim = flaw
        mine = np.flatnonzero(labels == flaw.classes[0])
        labels[chance.permutation(mine)[: round(flaw.size * len(mine))]] = flaw.target or 0
        return replace(client, labels=torch.from_numpy(labels))
    chosen = chance.permutation(len(labels))[: round(flaw.size * len(labels))]
    steps = 1 if flaw.how == "pairs" else chance.integers(1, classes, size=len(chosen))
    labels[chosen] = (labels[chosen] + steps) % classes
    return replace(client, labels=torch.from_numpy(labels))


def _repeated(rows: int, times: float, chance: np.random.Generator) -> Rows:
    """Return which rows a client has that keeps one in `times`, each repeated until there are as many as before."""
    kept = chance.permutation(rows)[: max(1, round(rows / times))]
    return np.sort(np.resize(kept, rows)).astype(np.int64)


def _without_classes(labels: NDArray[np.int64], flaw: FlawSettings, name: str, chance: np.random.Generator) -> Rows:
    """Return the rows that are left when a client loses some of its classes; one class always stays."""
    present = np.unique(labels)
    count = min(max(1, round(flaw.size * len(present))), len(present) - 1)
    missing = np.array(flaw.classes) if flaw.classes else chance.permutation(present)[:count]
    rows = np.flatnonzero(~np.isin(labels, missing)).astype(np.int64)
    if not len(rows):
        raise UserError(
            f"flaws.classes: {in_words(flaw)} leaves {name} without a row; allowed: classes beside which it has others"
        )
    return rows
