"""Every recipe of the papers runs end to end on its own data, cut short; missing data are skipped by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from steelyard.api import Experiment
from steelyard.result import Result

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


LONG = ("adafed-2", "celeba")
"""Others read the same files and run the same code: adafed-1 and -3, celeba-small."""


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
        assert all(row["server"]["macro_f1"] >= 0 for row in result.summary["rules"])
        # As in the paper, the server weighs and reports on MNIST's whole test set.
        assert result.history.evaluations.query("round == 1")["samples"].sum() >= 9996


def test_hostile_copies_are_wrong_and_ignore_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / "mnist").is_dir():
        pytest.skip("needs mnist/")
    monkeypatch.setenv("STEELYARD_DATA", str(SHARED))
    # Plain steps: Adadelta's are too long for the small model that stands in here.
    plain = ("training.optimiser=sgd", "training.learning_rate=0.1")
    result = run("adafed-3", tmp_path / "run", "rounds.count=4", "compute.engine=stacked", *plain)
    weights = result.history.clients.query("rule == 'adafed' and round == 4").set_index("client")["raw_VP"]
    # The client whose labels are all wrong does worse than chance on the server's rows; the others do not.
    assert weights["client-007"] < 0.1
    assert weights["client-006"] < weights["client-002"]


def test_femnist_reads_leafs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    for part, count in (("train", 9), ("test", 1)):
        folder = tmp_path / "data" / "femnist" / part
        folder.mkdir(parents=True)
        users = [f"f{number:04d}_00" for number in range(12)]
        rows = {
            user: {"x": chance.random((count, 784)).round(3).tolist(), "y": chance.integers(0, 62, count).tolist()}
            for user in users
        }
        content = {"users": users, "num_samples": [count] * 12, "user_data": rows}
        (folder / "all_data.json").write_text(json.dumps(content))
    monkeypatch.setenv("STEELYARD_DATA", str(tmp_path / "data"))
    result = run("femnist", tmp_path / "run", "rounds.fraction=0.25")
    assert set(result.table["rules"]) == {"online(DS>LD>MD)", "DS>LD>MD", "fedavg"}
    assert result.history.evaluations.query("round == 1")["client"].nunique() == 12


def test_the_regression_recipe_learns_and_its_loss_adapts(tmp_path: Path) -> None:
    changes = ["rounds.count=12", "compute.device=cpu", "compute.engine=stacked"]
    result = Experiment.load("adafed-regression", changes).run(tmp_path / "run")
    rounds = result.history.rounds.query("rule == 'adafed'")
    assert rounds["accuracy"].iloc[-1] > 0.6 * rounds["accuracy"].iloc[0]
    shapes = [json.loads(text)["shape"] for text in rounds["loss"]]
    assert shapes[0] == 2.0
    assert all(-2 <= shape <= 2 for shape in shapes)
    assert len(set(shapes)) > 1
    fixed = [json.loads(text) for text in result.history.rounds.query("rule == 'fedavg'")["loss"]]
    assert {(loss["shape"], loss["scale"]) for loss in fixed} == {(2.0, 80.0)}
    assert {"mape", "mae", "rmse"} <= set(result.summary["rules"][0]["server"])
