"""AdaFed's regression on images (paper 001 §3.2): count the cells on drawn images of a microscope.

    python -m benchmarks.cell_images --out OUT --seeds 5
    python -m benchmarks.cell_images --out OUT --seeds 5 --blurred 0.3

The paper names the task and gives neither images nor figures. Here an image has 28 by 28 pixels, 1 to 20 round cells
that may overlap, and noise of the sensor. Ten clients hold images with about as many cells each, as the patients of the
recipe `adafed-regression` are shared out; `--blurred` puts the microscopes of a share of them out of focus. Weights are
1/(1 + MAPE) on the server's images (`adafed-weights`), with Barron's loss adapted besides (`adafed`), or sizes
(`fedavg`). Images that weigh do not report. `steelyard table OUT` shows the means over seeds.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks.kit import Out, start
from steelyard import Experiment
from steelyard.data import Dataset, in_memory

SIDE, MOST, SCALE = 28, 20, 3.0
"""Pixels a side, the most cells on an image, and the error in cells at which Barron's loss begins to bend."""
RULES = ("fedavg", "adafed-weights", "adafed")


def cells(seed: int, images: int) -> Dataset:
    """Return images of cells with their number as the target."""
    chance = np.random.default_rng([seed, images])
    counts = chance.integers(1, MOST + 1, images)
    along = np.arange(SIDE, dtype=np.float32)
    pixels = chance.normal(0.0, 0.05, (images, 1, SIDE, SIDE)).astype(np.float32)
    for image, count in zip(pixels[:, 0], counts, strict=True):
        across, down = chance.uniform(2, SIDE - 2, (2, count, 1))
        radius = chance.uniform(1.0, 1.8, (count, 1))
        rows, columns = (np.exp(-(((along - centre) / radius) ** 2)) for centre in (down, across))
        image += (rows.T @ columns).astype(np.float32)
    return in_memory(np.clip(pixels, 0.0, 2.0), counts.astype(np.float32), name="cells")


def experiment(rounds: int, blurred: float) -> Experiment:
    """Return the recipe for patients with images, a small network and a scale of Barron's loss in cells."""
    flaws = [{"kind": "blurred", "pick": "random", "share": blurred, "amount": 2.0}] if blurred else []
    loss = {f"{rule}.loss.scale": SCALE for rule in ("weighing", "beside.adafed-weights", "beside.fedavg")}
    changes = {
        "name": "cell-images",
        "data.source": "memory",
        "data.task": "regression",
        "data.normalise": "unit",
        "model.name": "cnn",
        "training.optimiser": "adam",
        "training.learning_rate": 0.002,
        "training.epochs": 2,
        "training.batch_size": 20,
        "rounds.count": rounds,
        "flaws": flaws,
        **loss,
    }
    loaded = Experiment.load("adafed-regression").changed(changes)
    assert isinstance(loaded, Experiment)
    return loaded


def main(
    out: Out,
    seeds: int = 5,
    rounds: int = 15,
    images: int = 1000,
    blurred: Annotated[float, typer.Option(help="share of the clients whose images are out of focus")] = 0.0,
) -> None:
    """Draw, train, print."""
    drawn = partial(cells, images=images)
    print(experiment(rounds, blurred).compare(RULES, seeds, out, dataset=drawn, progress=False))


if __name__ == "__main__":
    start(main)
