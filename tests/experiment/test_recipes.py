"""The recipes: each runs end to end on its own data, cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.api import Experiment
from steelyard.learning.catalogue import count
from steelyard.result import Result


def test_the_authors_network_is_an_option_of_the_same_size() -> None:
    experiment = Experiment.load("mnist-noniid", ["model.name=cnn-mnist-authors", "rounds.reach=above"])
    assert count(experiment.model.name, (1, 28, 28), 10) == count("cnn-mnist", (1, 28, 28), 10) == 1_663_370
    assert experiment.rounds.above


SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


SHORT = ("rounds.count=2", "training.epochs=1", "compute.device=cpu", "compute.engine=stacked", "model.name=logistic")


FEW = ("partition.clients=12", "rounds.fraction=0.3")


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    # recipe: the file it needs, what is cut further
    "mnist-iid": ("mnist/train-images-idx3-ubyte.gz", FEW),
    "mnist-noniid": ("mnist/train-images-idx3-ubyte.gz", FEW),
    "mnist-writers": ("mnist/mnist_writers.npz", FEW),
    "unipen62": ("unipen62/unipen62_28x28.npz", FEW),
    "adafed-1": ("mnist/train-images-idx3-ubyte.gz", ()),
    "adafed-2": ("mnist/train-images-idx3-ubyte.gz", ()),
    "adafed-3": ("mnist/train-images-idx3-ubyte.gz", ()),
    "celeba": ("celeba/celeba_64.zip", FEW),
    "celeba-small": ("celeba/celeba_32.npz", FEW),
}


def run(recipe: str, out: Path, *changes: str) -> Result:
    return Experiment.load(recipe, [*SHORT, *changes]).run(out)


LONG = ("adafed-1", "adafed-2", "mnist-iid", "unipen62", "celeba")


"""Others read the same files and run the same code: adafed-3, mnist-noniid, celeba-small."""


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES])
def test_a_recipe_runs(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, changes = CASES[recipe]
    if not (SHARED / file).is_file():
        pytest.skip(f"needs {file}")
    monkeypatch.setenv("STEELYARD_DATA", str(SHARED))
    result = run(recipe, tmp_path / "run", *changes)
    assert result.summary["status"] == "finished"
    assert set(result.table["rules"]) == set(result.experiment.rules())
    if recipe.startswith("adafed"):
        sizes = result.history.clients.query("round == 1").groupby("client")["samples"].max()
        first = {"adafed-1": [5600, 11000, 5700, 11000, 11000, 5000]}
        assert sizes.tolist()[:6] == first.get(recipe, [190, 1710, 1780, 1230, 2040, 3160])
        assert len(sizes) == (8 if recipe == "adafed-3" else 6)
        # As in the paper, the server weighs and reports on MNIST's whole test set.
        assert result.history.evaluations.query("round == 1")["samples"].sum() >= 9996


def test_the_regression_recipe_learns_and_its_loss_adapts(tmp_path: Path) -> None:
    changes = ["rounds.count=12", "compute.device=cpu", "compute.engine=stacked"]
    result = Experiment.load("adafed-regression", changes).run(tmp_path / "run")
    rounds = result.history.rounds.query("rule == 'adafed'")
    assert rounds["accuracy"].iloc[-1] > 0.6 * rounds["accuracy"].iloc[0]
    shapes = [json.loads(text)["shape"] for text in rounds["loss"]]
    assert shapes[0] == 2.0
    assert len(set(shapes)) > 1
    assert {"mape", "mae", "rmse"} <= set(result.summary["rules"][0]["server"])


def test_the_recipe_weighs_four_hospitals(tmp_path: Path) -> None:
    # any folder will do: the table comes with the package
    result = Experiment.load("hospitals", ["rounds.count=8", "compute.engine=loop"]).run(tmp_path / "run")
    clients = result.history.clients.query("round == 8 and rule == 'CR>DS'").set_index("client")
    assert clients.index.tolist() == ["cleveland", "hungarian", "switzerland", "va"]
    # 46 patients of each hospital lie with the server; a quarter of the others test
    assert clients["samples"].tolist() == [193, 186, 58, 115]
    # Cleveland's records are nearly whole, the others' are not
    assert clients.loc["cleveland", "raw_CR"] > 0.99
    assert clients["raw_CR"].drop("cleveland").between(0.65, 0.85).all()
    assert clients["weight"].idxmax() == "cleveland"
    # better than always saying "ill", which is right for 55 % of all patients
    for rule in result.summary["rules"]:
        assert rule["accuracy"] > 0.65
        assert rule["server"]["accuracy"] > 0.65
