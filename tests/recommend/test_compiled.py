"""The compiled loops of FPL: the draws to the last bit, the slow reference's numbers, and what makes them quick."""

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from benchmarks.recommend import Ours
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.recommend.conftest import two_tastes
from tests.recommend.fpl_cases import FACTORS, USERS, draw, few_histories, slow_round, start
from tests.warm import ROOT, command_environment

from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.recommend import engines, fpl, parallel, sampling, sequential
from steelyard.recommend.baselines.bpr_mf import BprMf
from steelyard.recommend.fpl import Learning
from steelyard.recommend.interactions import Interactions
from steelyard.recommend.interactions import build as table_of
from steelyard.recommend.sampling import Histories, round_keys, user_keys
from steelyard.report.recommender import open_run
from steelyard.runs.reader import History

pytest.importorskip("numba", reason="numba is not installed")

from steelyard.recommend import compiled
from steelyard.recommend.simd import LANES, MOST_BLOCKS, blocks_of, padded

LEARNING = Learning(0.3, FACTORS)
EVERYONE = np.arange(USERS)


@settings(max_examples=60)
@given(
    taken=st.lists(st.sets(st.integers(0, 10), min_size=1, max_size=11), min_size=1, max_size=6),
    count=st.integers(1, 7),
    decoys=st.sampled_from([0.0, 0.5, 2.0]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_what_is_drawn_sent_and_counted_is_equal_to_the_last_bit(
    taken: list[set[int]], count: int, decoys: float, share: float, seed: int
) -> None:
    # Of twelve items up to eleven are taken: negatives are often drawn again, some by the last resort.
    pairs = [(f"u{user}", str(item)) for user, items in enumerate(taken) for item in sorted(items)]
    histories = Histories.of(table_of(*zip(*pairs, strict=True), all_items=[str(i) for i in range(12)]))
    if decoys:
        histories = histories.with_decoys(decoys, seed)
    users = np.random.default_rng(seed).integers(histories.users, size=9)
    keys = round_keys(user_keys(seed, histories.names, "triples")[users], np.arange(9))
    slow, fast = (module.draw_triples(histories, users, keys, count) for module in (sampling, compiled))
    assert fast.positives.dtype == slow.positives.dtype == fast.negatives.dtype
    for name in ("positives", "negatives", "real"):  # of three whole numbers, not computed ones
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name))
    shares = np.full(9, share)
    sent = fpl.sent_positives(keys, shares, slow.positives)
    np.testing.assert_array_equal(compiled.sent_positives(keys, shares, slow.positives), sent)
    np.testing.assert_array_equal(compiled.distinct_rows(slow, sent), parallel.distinct_rows(slow, sent))


@pytest.mark.parametrize(("count", "factors"), [(1, FACTORS), (5, 7), (5, 70)])  # 70: two parts a row
def test_rounds_of_one_user_meet_the_slow_reference_in_double_precision(count: int, factors: int) -> None:
    histories = few_histories()
    table, vectors = (part.astype(np.float64) for part in start(histories, factors=factors))
    visitors = np.random.default_rng(2).integers(USERS, size=60)
    triples, sent = draw(histories, visitors, count, round=np.arange(60), share=0.6)
    new, own, _ = slow_round(table, vectors, visitors, triples, sent, LEARNING, in_turn=True)
    compiled.sequential_rounds(table, vectors, visitors, triples, sent, LEARNING)
    np.testing.assert_allclose(vectors, own, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(table, new, rtol=1e-9, atol=1e-12)


def test_a_cohort_meets_the_slow_reference_in_double_precision() -> None:
    histories = few_histories()
    table, vectors = (part.astype(np.float64) for part in start(histories))
    triples, sent = draw(histories, EVERYONE, 6, share=0.5)
    done = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING)
    rows = fpl.changes(table, triples, sent, done.gradients, LEARNING)
    _, moved, told = slow_round(table, vectors, EVERYONE, triples, sent, LEARNING)
    np.testing.assert_allclose(done.vectors, moved, rtol=1e-9, atol=1e-12)
    found = np.zeros((USERS, *table.shape))
    np.add.at(found, (rows.owners, rows.rows), rows.values)
    expected = np.zeros_like(found)
    for user, changes in enumerate(told):
        expected[user, list(changes)] = list(changes.values())
    # `fpl.changes` rounds the decays to float32.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("decoys", [0.0, 1.0])
def test_both_engines_agree_in_single_precision_and_pieces_change_nothing(decoys: float) -> None:
    histories = few_histories().with_decoys(decoys, 3)
    table, vectors = start(histories)
    triples, sent = draw(histories, EVERYONE, 6, share=0.5)
    slow = fpl.local_pass(table, vectors, triples, LEARNING)
    fast = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING)
    pieces = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING, threads=3, piece=12)
    for name in ("vectors", "gradients", "losses"):
        assert getattr(fast, name).dtype == np.float32
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=2e-5, atol=2e-6)
        # The same loop over one user at a time, whoever is in the piece.
        assert np.array_equal(getattr(fast, name), getattr(pieces, name))
    users = np.tile(EVERYONE, 4)
    results = []
    for rounds in (sequential.sequential_rounds, compiled.sequential_rounds):
        mine, own = table.copy(), vectors.copy()
        losses = rounds(mine, own, users, triples.select(users), sent[users], LEARNING)
        assert losses.dtype == mine.dtype == own.dtype == np.float32
        results.append((mine, own, losses))
    for slow_part, fast_part in zip(*results, strict=True):
        np.testing.assert_allclose(fast_part, slow_part, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("wild", [np.nan, 1e30])
def test_a_step_that_runs_away_is_seen_as_such(wild: float) -> None:
    histories = few_histories()
    table, vectors = start(histories)
    triples, _ = draw(histories, EVERYONE, 6)
    table[triples.positives[2, 0]] = wild
    table[triples.negatives[2, 0]] = -wild
    slow = fpl.local_pass(table, vectors, triples, LEARNING)
    fast = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING)
    assert np.array_equal(np.isfinite(fast.gradients), np.isfinite(slow.gradients))
    assert np.isfinite(fast.vectors[2]).all() == np.isfinite(wild)


# ---------------------------------------------------------------- engines of runs


def tastes(folder: Path, **fpl_settings: Any) -> dict[str, Any]:
    path = folder / "tastes.tsv"
    # Eight training items of a catalogue of 22: a third of the negatives is drawn again.
    rows = two_tastes(users=12, items=22, taken=10)
    path.write_text("user\titem\trating\ttime\n" + "".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows))
    return {
        "kind": "recommend",
        "name": "tastes",
        "seed": 3,
        "interactions": {"path": str(path)},
        "fpl": {"factors": 6, "learning_rate": 0.1, **fpl_settings},
        "rounds": {"epochs": 3},
    }


@pytest.mark.parametrize(
    ("mode", "epoch", "share", "spread"),
    [("sFPL", "formula", 1.0, 0.0), ("sFPL+", "tables", 0.4, 0.1), ("pFPL+", "tables", 0.4, 0.1)],
)
def test_runs_end_alike(tmp_path: Path, mode: str, epoch: str, share: float, spread: float) -> None:
    options = {"mode": mode, "epoch": epoch, "pi": share, "bias_spread": spread}
    ended = []
    for engine in ("numpy", "compiled"):
        run(build(tastes(tmp_path, engine=engine, **options)), out=tmp_path / engine)
        assert History(tmp_path / engine).info["engine_choice"] == engine
        finished = open_run(tmp_path / engine)
        ended.append({"model": finished.model, **finished.clients.snapshot()})
    for name, slow in ended[0].items():
        # Some hundred steps in float32, each with products in another order.
        np.testing.assert_allclose(ended[1][name].numpy(), slow.numpy(), rtol=2e-4, atol=2e-5)


def test_a_resumed_run_keeps_its_engine_and_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "COMPILED_FROM", 1)
    experiment = build(tastes(tmp_path, mode="pFPL", pi=0.5))
    whole = open_run(run(experiment, out=tmp_path / "whole"))

    def stop(round: int, _: object) -> None:
        if round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, out=tmp_path / "stopped", progress=stop)
    monkeypatch.setattr(engines, "COMPILED_FROM", 1 << 40)  # another machine might choose otherwise
    resumed = open_run(resume(tmp_path / "stopped"))
    assert History(tmp_path / "stopped").info["engine_choice"] == "compiled"
    assert np.array_equal(resumed.model.numpy(), whole.model.numpy())


def test_without_numba_auto_is_numpy_and_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.choose_engine("auto", 1 << 30).name == "compiled"
    assert engines.choose_engine("auto", 10).name == "numpy"
    assert engines.choose_engine("numpy", 1 << 30).name == "numpy"
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert engines.choose_engine("auto", 1 << 30).name == "numpy"
    assert_refused(lambda: engines.choose_engine("compiled", 10), "fpl.engine", "'compiled'", "numba")


def test_the_baseline_bpr_mf_uses_the_same_engines() -> None:
    rows = two_tastes(users=12, items=22, taken=10)
    train = table_of([row[0] for row in rows], [row[1] for row in rows])
    slow, fast = (BprMf(train, 5, Learning(0.1, 6), engine) for engine in ("numpy", "compiled"))
    for model in (slow, fast):
        model.epoch()
    np.testing.assert_allclose(fast.table, slow.table, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(fast.vectors, slow.vectors, rtol=2e-4, atol=2e-5)


# ---------------------------------------------------------------- parts of rows

WIDEST = LANES * MOST_BLOCKS


@pytest.mark.parametrize("width", [1, 8, 9, WIDEST, WIDEST + 1, 5 * WIDEST, 10_001])
def test_rows_are_some_parts_of_equal_length_and_little_is_filled_up(width: int) -> None:
    wide = padded(np.ones((2, width), np.float32))
    part = LANES * len(blocks_of(width))
    assert part <= WIDEST
    assert wide.shape[1] % part == 0
    assert width <= wide.shape[1] < width + LANES * (wide.shape[1] // part)
    assert wide[:, :width].all()
    assert not wide[:, width:].any()


# ---------------------------------------------------------------- quick and small


def calls_of_an_epoch(ours: Ours) -> int:
    """Count the functions of Python and of C that one epoch calls, in all its threads."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        found[event] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        ours.epoch()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return found["call"] + found["c_call"]


def test_an_epoch_calls_nothing_for_single_triples() -> None:
    calls: dict[int, int] = {}
    for each in (400, 800):
        # 300 users took so many of 2,000 items.
        names = (np.array([f"{number:04d}" for number in range(count)]) for count in (300, 2000))
        items = np.argsort(np.random.default_rng(0).random((300, 2000)), axis=1)[:, :each]
        ours = Ours(Interactions(*names, np.repeat(np.arange(300), each), items.ravel(), np.ones(300 * each)))
        assert (ours.clients.engine.name, ours.rounds, ours.epoch_triples) == ("compiled", 1, 300 * each)
        ours.epoch()
        calls[each] = calls_of_an_epoch(ours)
    # Threads take triples in blocks, of which there are more then.
    assert calls[800] - calls[400] < 300 * 400 / 100
    assert 0 < calls[400] < 300 * 10


@pytest.mark.slow
def test_three_epochs_of_all_ratings_take_less_than_a_gigabyte(shared: Any) -> None:
    shared("movielens_1m/ratings.dat.gz")
    command = [sys.executable, "-m", "benchmarks.recommend", "--memory"]
    done = subprocess.run(command, cwd=ROOT, env=command_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 100 < float(done.stdout) < 1000
