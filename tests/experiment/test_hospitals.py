"""The recipe of the four hospitals, end to end on the table that comes with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard.api import Experiment
from steelyard.data import load
from steelyard.errors import UserError


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


def test_another_model_is_one_word(tmp_path: Path) -> None:
    changes = ["rounds.count=2", "model.name=mlp", "model.hidden=[8]", "compute.engine=loop"]
    result = Experiment.load("hospitals", changes).run(tmp_path / "run")
    data = result.experiment.data  # type: ignore[attr-defined]
    # 9 columns of numbers, 4 + 3 + 3 + 3 levels of four categories, 4 indicators
    assert load(data).shape == (26,)
    assert result.summary["status"] == "finished"


def test_a_mistake_in_the_table_is_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "t.csv").write_text("hospital;age;ill\na;63,5;1\nb;;0\n", encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\n[data]\nsource = "csv"\npath = "t.csv"\nlabels = "il"\nowner = "hospital"\n'
        '[partition]\nscheme = "natural"\n[model]\nname = "logistic"\n',
        encoding="utf-8",
    )
    line = refused("run", file)
    assert "data.labels: found no column 'il' in " in line
    assert "t.csv (did you mean 'ill'?); allowed: hospital, age, ill" in line
    line = refused("run", file, "--set", "data.labels=ill", "--set", "data.missing=refuse")
    assert "column 'age' is empty in row 2, and data.missing is 'refuse'" in line


def test_completeness_needs_a_table() -> None:
    with pytest.raises(UserError, match=r"CR needs samples marked complete, and data\.source = 'digits' has none"):
        Experiment.load("quickstart", ['weighing.criteria=["CR"]', "weighing.priority=CR"])
