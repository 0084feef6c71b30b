"""The recipes: each runs end to end on its own data, cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.api import Experiment

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SHORT = ("rounds.count=2", "training.epochs=1", "compute.device=cpu", "compute.engine=stacked", "model.name=logistic")
FEW = ("partition.clients=12", "rounds.fraction=0.3")
FIRST = {"adafed-1": [5600, 11000, 5700, 11000, 11000, 5000], "adafed-3": [190, 1710, 1780, 1230, 2040, 3160]}


@pytest.mark.parametrize(
    "recipe",
    [
        *("mnist-noniid", "mnist-writers", "celeba-small"),
        *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("unipen62", "celeba", "adafed-1", "adafed-3")),
    ],
)
def test_a_recipe_runs(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / recipe.partition("-")[0].replace("adafed", "mnist")).is_dir():
        pytest.skip("needs its data")
    monkeypatch.setenv("STEELYARD_DATA", str(SHARED))
    changes = SHORT if recipe in FIRST else SHORT + FEW
    result = Experiment.load(recipe, changes).run(tmp_path / "run")
    assert result.comparison.status == "finished"
    assert {rule.rule for rule in result.comparison.rules} == set(result.experiment.rules())
    if recipe in FIRST:
        sizes = result.history.clients.query("round == 1").groupby("client")["samples"].max()
        assert sizes.tolist()[:6] == FIRST[recipe]
        # As in the paper, the server weighs and reports on MNIST's whole test set.
        assert result.history.evaluations.query("round == 1")["samples"].sum() >= 9996


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
    for rule in result.comparison.rules:
        assert rule.figures["final"].mean > 0.65
        assert rule.figures["server_accuracy"].mean > 0.65
