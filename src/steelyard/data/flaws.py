"""Clients of unequal worth: giving some clients of a population the flaws that `[[flaws]]` describes.

Flaws are applied in the order written. Features that change are appended to the data set as rows of their own, so that
the shared samples, every test set and the server's rows stay as they are. All chance is named by the seed, the client
and the position of the flaw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError, nearest
from steelyard.data import backdoor
from steelyard.data.changing_population import ChangingClient, ChangingPopulation
from steelyard.data.dataset import HONEST, Dataset, Population, Rows
from steelyard.data.flaw_kinds import NEEDS_CLASSES
from steelyard.data.flaw_settings import FlawSettings
from steelyard.data.partition_settings import client_name


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
                features, labels = backdoor.replaced(*given, images, chance)
            else:
                features, labels = backdoor.poison(*given, changing.bright, chance)
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
