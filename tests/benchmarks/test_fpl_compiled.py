"""The compiled FPL of the big tables is the package's own, up to the rounding of sums."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmarks.fpl_compiled import CompiledFpl
from tests.recommend.conftest import two_tastes

from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.recommend.baselines.bpr_mf import BprMf
from steelyard.recommend.fpl import MODES, Learning
from steelyard.recommend.interactions import build as table_of
from steelyard.recommend.sampling import Histories
from steelyard.report.recommender import open_run

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.mark.parametrize(
    ("mode", "epoch", "share", "spread"),
    [
        ("sFPL", "formula", 1.0, 0.0),
        ("sFPL+", "tables", 0.4, 0.1),
        ("pFPL", "formula", 0.4, 0.0),
        ("pFPL+", "tables", 1.0, 0.1),
        ("pFPL+", "formula", 0.0, 0.0),
    ],
)
def test_it_ends_where_a_run_of_the_same_seed_ends(tmp_path: Path, mode: str, epoch: str, share: float, spread: float):
    path = tmp_path / "tastes.tsv"
    # Eight training items of a catalogue of 22: a third of the negatives is drawn again.
    rows = two_tastes(users=12, items=22, taken=10)
    path.write_text("user\titem\trating\ttime\n" + "".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows))
    fpl = {"factors": 6, "learning_rate": 0.1}
    experiment = build(
        {
            "kind": "recommend",
            "name": "tastes",
            "seed": 3,
            "interactions": {"path": str(path)},
            "fpl": fpl | {"mode": mode, "epoch": epoch, "pi": share, "bias_spread": spread},
            "rounds": {"epochs": 3},
        }
    )
    run(experiment, out=tmp_path / "run")
    finished = open_run(tmp_path / "run")
    prepared = experiment.prepare()
    compiled = CompiledFpl(
        *(prepared.histories, experiment.schedule(), prepared.learning),
        share=share,
        seed=3,
        folder=tmp_path,
        bias_spread=spread,
    )
    before = compiled.vectors.copy()
    for _ in range(3):
        compiled.epoch()
    np.testing.assert_allclose(compiled.table, finished.model.numpy().reshape(22, 7), rtol=2e-4, atol=2e-5)
    vectors = finished.clients.snapshot()[f"vectors/{finished.federation}"].numpy()
    np.testing.assert_allclose(compiled.vectors, vectors, rtol=2e-4, atol=2e-5)
    assert np.abs(compiled.vectors - before).max() > 0.01
    visits = 3 * experiment.schedule().rounds_per_epoch * experiment.schedule().users * experiment.schedule().triples
    assert visits <= compiled.updates.sum() <= 2 * visits
    assert (compiled.updates.sum() == visits) == (share == 0)
    assert (compiled.updates.sum() == 2 * visits) == (share == 1)


def test_its_central_form_is_the_baseline_bpr_mf(tmp_path: Path):
    rows = two_tastes(users=12, items=22, taken=10)
    train = table_of([row[0] for row in rows], [row[1] for row in rows])
    learning, histories = Learning(0.1, 6), Histories.of(train)
    schedule = MODES["sFPL"].schedule(histories.users, histories.total)
    compiled = CompiledFpl(histories, schedule, learning, share=1.0, seed=5, folder=tmp_path, central=True)
    model = BprMf(train, 5, learning)
    for _ in range(3):
        compiled.epoch()
        model.epoch()
    np.testing.assert_allclose(compiled.table, model.table, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(compiled.vectors, model.vectors, rtol=2e-4, atol=2e-5)
