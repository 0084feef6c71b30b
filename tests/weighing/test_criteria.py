import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from steelyard.errors import UserError
from steelyard.messages import DenseModels, ServerTest
from steelyard.weighing import criteria
from steelyard.weighing.criteria import CohortView, LocalData, client_criterion
from steelyard.weighing.plugins import load_module


def local(labels: list[int], **more: object) -> LocalData:
    return LocalData("a", torch.tensor(labels), 2, **more)  # type: ignore[arg-type]


def view(divergence: list[float], accuracy: list[float] | None = None) -> CohortView:
    test = ServerTest(np.array(accuracy or []), np.zeros((0, 0)))
    return CohortView(np.ones(len(divergence), dtype=np.int64), lambda: np.array(divergence), lambda: test)


def test_counts_on_the_client() -> None:
    data = local([0, 1, 1, 1, 0])
    assert criteria.get("DS").on_client(data) == 5
    assert criteria.get("LD").on_client(data) == 2
    assert criteria.get("CB").on_client(data) == pytest.approx(2 / 3)
    assert criteria.get("CB").on_client(local([1, 1])) == 0
    assert criteria.get("CB").on_client(local([0, 0])) == 0


def test_sharpness_is_the_share_marked_sharp() -> None:
    data = local([0, 1, 1, 0], marks={"sharp": np.array([1.0, 0.0, 1.0, 1.0])})
    assert criteria.get("IS").on_client(data) == 0.75
    with pytest.raises(UserError, match="sharp"):
        criteria.get("IS").on_client(local([0]))


def test_model_divergence_of_the_spec() -> None:
    found = criteria.get("MD").on_server(view([0, 1, 3, 8]))
    assert found == pytest.approx([1, 0.707107, 0.5, 0.333333], abs=5e-7)


def test_divergence_runs_over_all_parameters_together() -> None:
    models = DenseModels(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
    assert models.divergence(torch.zeros(3)) == pytest.approx([5, 0])


def test_who_measures_is_visible() -> None:
    by = {name: criterion.measured_by for name, criterion in criteria.known().items()}
    assert {name for name in ("DS", "LD", "CB", "IS") if by[name] == "client"} == {"DS", "LD", "CB", "IS"}
    assert by["MD"] == by["VP"] == "server"


def test_a_criterion_of_ones_own_may_be_boolean() -> None:
    @client_criterion("PLUGGED", about="device", description="on mains power")
    def plugged(data: LocalData) -> bool:
        return data.device.get("plugged", 0) > 0

    assert criteria.get("PLUGGED").on_client(local([0], device={"plugged": 1.0})) == 1.0
    assert criteria.get("PLUGGED").on_client(local([0])) == 0.0
    assert plugged(local([0])) is False


def test_a_script_and_an_entry_point_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from steelyard import client_criterion\n"
        "@client_criterion('{name}', description='mine')\n"
        "def measure_{name}(local): return 1.0\n"
    )
    script = tmp_path / "mine.py"
    script.write_text(text.format(name="SCRIPTED"))
    load_module(str(script))
    assert criteria.get("SCRIPTED").description == "mine"

    (tmp_path / "offered_criteria.py").write_text(text.format(name="OFFERED"))
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[steelyard.criteria]\nmine = offered_criteria\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    from steelyard.weighing import plugins

    plugins.load_entry_points.cache_clear()
    assert criteria.get("OFFERED").measured_by == "client"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'DS'"):
        criteria.get("ds")
    with pytest.raises(UserError, match="no such file"):
        load_module(str(tmp_path / "none.py"))
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_module(str(broken))

    @client_criterion("NEGATIVE")
    def negative(data: LocalData) -> float:
        return -1.0

    assert negative(local([0])) == -1
    with pytest.raises(UserError, match="NEGATIVE"):
        criteria.get("NEGATIVE").on_client(local([0]))


def test_what_a_client_cannot_have_measured_is_refused() -> None:
    assert criteria.get("CB").refusal(0.5) is None
    assert "CB = 1.5" in (criteria.get("CB").refusal(1.5) or "")
    assert criteria.get("DS").refusal(1e9) is None
    for value in (float("nan"), float("inf"), -1.0):
        assert criteria.get("DS").refusal(value) is not None
