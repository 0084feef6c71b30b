"""The compiled loops of FPL: the draws to the last bit, the slow reference's numbers, and what makes them quick."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused, changed
from tests.recommend.fpl_cases import FACTORS, USERS, draw, few_histories, start

from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.recommend import engines, fpl, parallel, sequential
from steelyard.recommend import histories as drawing
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Histories, round_keys, user_keys
from steelyard.recommend.interactions import build as table_of
from steelyard.report.recommender import open_run
from steelyard.runs.history import History

pytest.importorskip("numba", reason="numba is not installed")

from steelyard.recommend import compiled

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
    slow, fast = (module.draw_triples(histories, users, keys, count) for module in (drawing, compiled))
    for name in ("positives", "negatives", "real"):  # of three whole numbers, not computed ones
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name))
    shares = np.full(9, share)
    sent = fpl.sent_positives(keys, shares, slow.positives)
    np.testing.assert_array_equal(compiled.sent_positives(keys, shares, slow.positives), sent)
    np.testing.assert_array_equal(compiled.distinct_rows(slow, sent), parallel.distinct_rows(slow, sent))


@pytest.mark.parametrize(("decoys", "factors"), [(0.0, FACTORS), (1.0, 70)])  # 70: two parts a row
def test_both_engines_agree_in_single_precision_and_pieces_change_nothing(decoys: float, factors: int) -> None:
    histories = few_histories().with_decoys(decoys, 3)
    table, vectors = start(histories, factors=factors)
    learning = Learning(0.3, factors)
    triples, sent = draw(histories, EVERYONE, 6, share=0.5)
    slow = fpl.local_pass(table, vectors, triples, learning)
    fast = compiled.local_pass_in_blocks(table, vectors, triples, learning)
    pieces = compiled.local_pass_in_blocks(table, vectors, triples, learning, threads=3, piece=12)
    for name in ("vectors", "gradients", "losses"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=2e-5, atol=2e-6)
        # The same loop over one user at a time, whoever is in the piece.
        assert np.array_equal(getattr(fast, name), getattr(pieces, name))
    users = np.tile(EVERYONE, 4)
    results = []
    for rounds in (sequential.sequential_rounds, compiled.sequential_rounds):
        mine, own = table.copy(), vectors.copy()
        losses = rounds(mine, own, users, triples.select(users), sent[users], learning)
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


def test_a_resumed_run_keeps_its_engine_and_its_bits(
    description: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "COMPILED_FROM", 1)
    experiment = build(changed(description, fpl={"mode": "pFPL", "pi": 0.5}))
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
    other = open_run(run(experiment, out=tmp_path / "numpy"))
    # Some hundred steps in float32, each with products in another order.
    np.testing.assert_allclose(other.model.numpy(), whole.model.numpy(), rtol=2e-4, atol=2e-5)


def test_without_numba_auto_is_numpy_and_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.choose_engine("auto", 1 << 30).name == "compiled"
    assert engines.choose_engine("auto", 10).name == "numpy"
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert engines.choose_engine("auto", 1 << 30).name == "numpy"
    assert_refused(lambda: engines.choose_engine("compiled", 10), "fpl.engine", "'compiled'", "numba")


# ---------------------------------------------------------------- parts of rows


# ---------------------------------------------------------------- quick and small
