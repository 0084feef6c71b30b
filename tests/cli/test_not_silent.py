"""Slips that were once taken in silence, or blamed on something else: each is one line that names what is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.bad_cases import LEARN
from tests.conftest import CommandLine

from steelyard import Experiment, in_memory, weigh
from steelyard.clients.flower.register import Entry, enter
from steelyard.clients.node import NodeConfig
from steelyard.data.flaw_settings import FlawSettings
from steelyard.data.partition import share_out
from steelyard.data.settings import DataSettings, PartitionSettings
from steelyard.errors import UserError
from steelyard.experiment.node_rows import check_own
from steelyard.federate.certificates import make_key
from steelyard.learning.losses import resolve
from steelyard.learning.models import build
from steelyard.messages import LossState
from steelyard.recommend.settings import KgflexSettings
from steelyard.rounds.soundness import Exploded

Refused = Callable[..., str]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(LEARN.replace('"t"', '"small"'))
    return path


def rows(**fields: Any) -> Any:
    return in_memory(np.random.default_rng(1).normal(size=(40, 3)), np.arange(40) % 2, **fields)


def test_empty_experiments_and_points_of_a_grid(refused: Refused, small: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("# nothing yet\n")
    assert "empty.toml: holds no field; allowed: an experiment" in refused("run", "empty.toml")
    rate = "training.learning_rate"
    line = refused("sweep", small, "--over", f"{rate}=0.1,,0.2")
    assert "--over: got '0.1,,0.2', in which a value is empty; allowed: a value between all commas" in line
    line = refused("sweep", small, "--over", f"{rate}=0.1,0.2", "--set", f"{rate}=0.3")
    assert f"--set: {rate} is in --over too, which would change it again; allowed: one of the two" in line
    line = refused("sweep", small, "--over", f"{rate}=0.1,0.2", "--validation", "0.00001", "--quiet")
    assert "partition.validation: got 1e-05, less than one of 1,437 training rows; allowed: a larger share" in line


def test_rules_and_runs_that_are_there_twice(steelyard: CommandLine, refused: Refused, small: Path) -> None:
    assert "--rules: 'DS' is there twice; allowed: each rule once" in refused("compare", small, "--rules", "DS,DS")
    assert "one of /share, /max, /rank" in refused("compare", small, "--rules", "DS/max/max")
    assert steelyard("run", small, "--out", "r").returncode == 0
    assert "RUNS: got r, r; allowed: each run once" in refused("report", "r", "r")
    described = Experiment.load(small)
    with pytest.raises(UserError, match="'DS' is there twice"):
        described.compare(["DS", "DS"])
    with pytest.raises(UserError, match="rules: got an empty list; allowed: at least one rule, or None"):
        described.compare([])


def test_another_experiment_in_the_folder_of_a_run(steelyard: CommandLine, small: Path, tmp_path: Path) -> None:
    assert steelyard("run", small, "--out", "r").returncode == 0
    assert "not as the run wrote it" not in steelyard("table", "r").stderr
    own = tmp_path / "r" / "experiment.toml"
    own.write_text(own.read_text().replace('name = "small"', 'name = "other"'))
    for arguments in (("table", "r"), ("report", "r")):
        done = steelyard(*arguments)
        assert done.returncode == 0
        assert (
            "r/experiment.toml: is not as the run wrote it: name: 'small' when the run began, 'other' now"
            in done.stderr
        )


def test_a_page_over_no_folder(refused: Refused) -> None:
    assert "nowhere: no such folder; allowed: a folder of runs" in refused("watch", "nowhere", "--port", "0")


def test_a_table_without_names_of_clients(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("DS,LD\n3,1\n1,2\n")
    with pytest.raises(
        UserError, match=r"has no column 'client', and 'DS' holds numbers, not names; allowed: a column"
    ):
        weigh(path)
    path.write_text("site,DS\nnorth,1\nsouth,2\n")
    assert weigh(path).clients == ("north", "south")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry("../x", "key"), "--name: got '../x'; allowed: a name, no path"),
        (Entry("", "key"), "--name: got ''; allowed: 1 to 200 printable"),
        (Entry("a", "key", ("b", "b")), "--client: got b, b; allowed: each client once"),
        (Entry("a", "key", ("",)), "--client: got ''; allowed: 1 to 200 printable"),
        (Entry("a", "key", ("\x1b[2J",)), r"--client: got '\x1b[2J'; allowed: 1 to 200 printable"),
        (Entry("old", "key"), "--name: 'old' is another key's; allowed: another name, or `--remove old` first"),
    ],
)
def test_names_in_the_register_of_a_server(tmp_path: Path, entry: Entry, message: str) -> None:
    file = tmp_path / "register.json"
    enter(file, Entry("old", "its key"))
    with pytest.raises(UserError) as caught:
        enter(file, entry)
    assert message in str(caught.value)
    enter(file, Entry("old", "its key", ("north", "Zürich 2")))


def test_an_empty_name_is_not_the_name_of_the_file(refused: Refused, tmp_path: Path) -> None:
    make_key(tmp_path / "clinic")
    line = refused("federate", "register", "server", "clinic.pub", "--name", "")
    assert "--name: got ''; allowed: 1 to 200 printable characters" in line
    assert "--remove: no node ''" in refused("federate", "register", "server", "clinic.pub", "--remove", "")


def test_a_node_whose_data_are_not_there(tmp_path: Path) -> None:
    config = {"client": "north", "data": str(tmp_path / "none.csv")}
    with pytest.raises(UserError, match=r"^node config data: found no '.*none\.csv'; allowed: a file or folder"):
        check_own(NodeConfig.read(config))
    (tmp_path / "none.csv").write_text("x")
    check_own(NodeConfig.read(config))


def test_limits_that_keep_no_feature() -> None:
    with pytest.raises(UserError, match=r"limits: got .*; allowed: at least one number above 0, or no feature is kept"):
        KgflexSettings(limits=(0, 0))
    assert KgflexSettings(limits=(0, 5)).limits == (0, 5)


def test_a_flaw_of_a_class_that_there_is_not() -> None:
    flaw = FlawSettings(kind="classes-missing", classes=(77,), clients=("client-001",))
    with pytest.raises(UserError, match=r"^flaws\.0\.classes: got 77; allowed: 0 to 1$"):
        share_out(rows(), PartitionSettings(clients=2), 1, [flaw])


@pytest.mark.parametrize(
    ("classes", "outputs", "allowed"), [(2, 3, "1 or 2"), (10, 1, "10"), (0, 2, "1"), (10, 13, "10")]
)
def test_a_network_with_other_outputs_is_to_blame_and_not_the_loss(classes: int, outputs: int, allowed: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.outputs: got {outputs} for .*; allowed: {allowed}$"):
        resolve(LossState("auto"), classes, outputs)
    with pytest.raises(UserError, match=r"^model\.outputs: got 3 for 2 classes"):
        resolve(LossState("cross-entropy"), 2, 3)


def test_models_of_other_precisions() -> None:
    def half(outputs: int) -> torch.nn.Module:
        return torch.nn.Linear(3, outputs).half()

    with pytest.raises(UserError, match=r"has parameters of torch\.float16; allowed: torch\.float32"):
        build(half, (3,), 2, 1)


def test_a_recommender_hears_of_no_field_of_others() -> None:
    assert "training." not in str(Exploded("FPL", 3, "the global model is no longer finite"))


def test_a_large_image_is_not_called_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    from steelyard.data import load

    for name in ("cats", "dogs"):
        (tmp_path / "own" / name).mkdir(parents=True)
        image.new("L", (64, 64)).save(tmp_path / "own" / name / "a.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 1000)
    settings = DataSettings(source="images", path=tmp_path / "own", labels="folder", size=8)
    with pytest.raises(
        UserError, match=r"image '.*a\.png' is too large \(.*4096 pixels.*\); expected a smaller picture"
    ):
        load(settings)
    with pytest.raises(UserError) as caught:
        load(DataSettings(source="images", path=tmp_path / "none"))
    assert "CelebA" not in str(caught.value)


class Sequence(torch.nn.Module):
    """A small LSTM, which torch cannot map over clients."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.cells, self.last = torch.nn.LSTM(1, 4, batch_first=True), torch.nn.Linear(4, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x[:, :, None])[0][:, -1])


def test_nobody_is_asked_to_file_an_issue_about_torch(tmp_path: Path) -> None:
    experiment = Experiment.load("quickstart", ["rounds.count=1"])
    fields: dict[str, Any] = {"data": {"source": "memory"}, "partition": {"clients": 2}, "rounds": {"count": 1}}
    experiment = Experiment(**fields, model={"name": Sequence}, compute={"engine": "vmap"})
    with warnings.catch_warnings(record=True) as caught:
        experiment.run(tmp_path / "run", dataset=rows())
    assert not [warning for warning in caught if "issue" in str(warning.message)]
