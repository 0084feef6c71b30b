"""The compiled loops of FPL: the same draws to the last bit, and the slow reference's numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recommend.conftest import two_tastes
from tests.recommend.fpl_cases import FACTORS, USERS, as_lists, draw, few_histories, start
from tests.recommend.fpl_reference import add, local_update

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.recommend import engines, fpl, parallel, sampling, sequential
from steelyard.recommend.baselines.bpr_mf import BprMf
from steelyard.recommend.clients import RecommendClients
from steelyard.recommend.fpl import Learning
from steelyard.recommend.interactions import build as table_of
from steelyard.recommend.sampling import Histories, round_keys, user_keys
from steelyard.report.recommender import open_run
from steelyard.runs.reader import History

compiled = pytest.importorskip("steelyard.recommend.compiled", reason="numba is not installed")
LEARNING = Learning(0.3, FACTORS)


@settings(max_examples=60, deadline=None)
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
    data = table_of([u for u, _ in pairs], [i for _, i in pairs], all_items=[str(i) for i in range(12)])
    histories = Histories.of(data)
    if decoys:
        histories = histories.with_decoys(decoys, seed)
    users = np.random.default_rng(seed).integers(histories.users, size=9)
    keys = round_keys(user_keys(seed, histories.names, "triples")[users], np.arange(9))
    slow, fast = (module.draw_triples(histories, users, keys, count) for module in (sampling, compiled))
    np.testing.assert_array_equal(fast.positives, slow.positives)
    np.testing.assert_array_equal(fast.negatives, slow.negatives)
    assert fast.positives.dtype == slow.positives.dtype == fast.negatives.dtype
    assert (fast.real is None) == (slow.real is None)
    if slow.real is not None:
        np.testing.assert_array_equal(fast.real, slow.real)
    shares = np.full(9, share)
    sent = fpl.sent_positives(keys, shares, slow.positives)
    np.testing.assert_array_equal(compiled.sent_positives(keys, shares, slow.positives), sent)
    np.testing.assert_array_equal(compiled.distinct_rows(slow, sent), parallel.distinct_rows(slow, sent))


@pytest.mark.parametrize(("count", "factors"), [(1, FACTORS), (5, FACTORS), (5, 7), (5, 70)])  # 70: two parts a row
def test_rounds_of_one_user_meet_the_slow_reference_in_double_precision(count: int, factors: int) -> None:
    histories = few_histories()
    table, vectors = (part.astype(np.float64) for part in start(histories, factors=factors))
    visitors = np.random.default_rng(2).integers(USERS, size=60)
    keys = round_keys(user_keys(1, histories.names, "t")[visitors], np.arange(60))
    triples = compiled.draw_triples(histories, visitors, keys, count)
    sent = compiled.sent_positives(keys, np.full(60, 0.6), triples.positives)
    q, b = as_lists(table)
    own = vectors.tolist()
    for index, user in enumerate(visitors.tolist()):
        passed = dict(zip(triples.positives[index].tolist(), sent[index].tolist(), strict=True))
        pairs = list(zip(triples.positives[index].tolist(), triples.negatives[index].tolist(), strict=True))
        own[user], changes = local_update(q, b, own[user], pairs, LEARNING.rate, passed.__getitem__)
        add(q, b, changes, LEARNING.rate)
    compiled.sequential_rounds(table, vectors, visitors, triples, sent, LEARNING)
    np.testing.assert_allclose(vectors, own, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(table[:, :-1], q, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(table[:, -1], b, rtol=1e-9, atol=1e-12)


def test_a_cohort_meets_the_slow_reference_in_double_precision() -> None:
    histories = few_histories()
    table, vectors = (part.astype(np.float64) for part in start(histories))
    triples, sent = draw(histories, np.arange(USERS), 6, share=0.5)
    done = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING)
    rows = fpl.changes(table, triples, sent, done.gradients, LEARNING)
    q, b = as_lists(table)
    for user in range(USERS):
        passed = dict(zip(triples.positives[user].tolist(), sent[user].tolist(), strict=True))
        pairs = list(zip(triples.positives[user].tolist(), triples.negatives[user].tolist(), strict=True))
        moved, expected = local_update(q, b, vectors[user].tolist(), pairs, LEARNING.rate, passed.__getitem__)
        np.testing.assert_allclose(done.vectors[user], moved, rtol=1e-9, atol=1e-12)
        mine = rows.owners == user
        found = {item: rows.values[mine & (rows.rows == item)].sum(axis=0) for item in rows.rows[mine].tolist()}
        assert found.keys() == expected.keys()
        for item, change in expected.items():
            # `fpl.changes` rounds the decays to float32.
            np.testing.assert_allclose(found[item], change, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("decoys", [0.0, 1.0])
def test_both_engines_agree_in_single_precision_and_pieces_change_nothing(decoys: float) -> None:
    histories = few_histories().with_decoys(decoys, 3)
    table, vectors = start(histories)
    triples, sent = draw(histories, np.arange(USERS), 6, share=0.5)
    slow = fpl.local_pass(table, vectors, triples, LEARNING)
    fast = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING)
    pieces = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING, threads=3, piece=12)
    for name in ("vectors", "gradients", "losses"):
        assert getattr(fast, name).dtype == np.float32
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=2e-5, atol=2e-6)
        assert np.array_equal(getattr(fast, name), getattr(pieces, name))
    users = np.tile(np.arange(USERS), 4)
    many = triples.select(users)
    results = []
    for rounds in (sequential.sequential_rounds, compiled.sequential_rounds, compiled.sequential_rounds):
        mine, own = table.copy(), vectors.copy()
        losses = rounds(mine, own, users, many, sent[users], LEARNING)
        assert losses.dtype == mine.dtype == own.dtype == np.float32
        results.append((mine, own, losses))
    for slow_part, fast_part, again in zip(*results, strict=True):
        np.testing.assert_allclose(fast_part, slow_part, rtol=2e-4, atol=2e-5)
        assert np.array_equal(fast_part, again)


def test_a_step_that_runs_away_is_seen_as_such() -> None:
    histories = few_histories()
    table, vectors = start(histories)
    triples, _ = draw(histories, np.arange(USERS), 6)
    table[triples.positives[2, 0]] = np.nan
    slow = fpl.local_pass(table, vectors, triples, LEARNING)
    fast = compiled.local_pass_in_blocks(table, vectors, triples, LEARNING)
    assert np.array_equal(np.isfinite(fast.gradients), np.isfinite(slow.gradients))
    assert not np.isfinite(fast.vectors[2]).any()
    large = table.copy()
    large[:] = 1e30
    large[::2] *= -1
    slow = fpl.local_pass(large, vectors, triples, LEARNING)
    fast = compiled.local_pass_in_blocks(large, vectors, triples, LEARNING)
    assert np.array_equal(np.isfinite(fast.gradients), np.isfinite(slow.gradients))


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
    [
        ("sFPL", "formula", 1.0, 0.0),
        ("sFPL+", "tables", 0.4, 0.1),
        ("pFPL", "formula", 0.4, 0.0),
        ("pFPL+", "tables", 1.0, 0.1),
        ("pFPL+", "formula", 0.0, 0.0),
    ],
)
def test_runs_end_alike(tmp_path: Path, mode: str, epoch: str, share: float, spread: float) -> None:
    options = {"mode": mode, "epoch": epoch, "pi": share, "bias_spread": spread}
    ended = []
    for engine in ("numpy", "compiled"):
        run(build(tastes(tmp_path, engine=engine, **options)), out=tmp_path / engine)
        assert History(tmp_path / engine).info["engine_choice"] == engine
        ended.append(open_run(tmp_path / engine))
    np.testing.assert_allclose(ended[1].model.numpy(), ended[0].model.numpy(), rtol=2e-4, atol=2e-5)
    slow, fast = (each.clients.snapshot() for each in ended)
    for name in slow:
        np.testing.assert_allclose(fast[name].numpy(), slow[name].numpy(), rtol=2e-4, atol=2e-5)


def test_a_resumed_run_keeps_its_engine_and_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "COMPILED_FROM", 1)
    experiment = build(tastes(tmp_path, mode="sFPL+"))
    whole = open_run(run(experiment, out=tmp_path / "whole"))
    train = RecommendClients.train

    def stop(self: RecommendClients, tasks: Any) -> Any:
        if tasks[0].round >= 3:
            raise KeyboardInterrupt
        return train(self, tasks)

    with monkeypatch.context() as stopping:
        stopping.setattr(RecommendClients, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, out=tmp_path / "stopped")
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
    with pytest.raises(UserError, match=r"fpl\.engine: got 'compiled', and numba is not installed"):
        engines.choose_engine("compiled", 10)


def test_the_baseline_bpr_mf_uses_the_same_engines() -> None:
    rows = two_tastes(users=12, items=22, taken=10)
    train = table_of([row[0] for row in rows], [row[1] for row in rows])
    slow, fast = (BprMf(train, 5, Learning(0.1, 6), engine) for engine in ("numpy", "compiled"))
    for _ in range(3):
        slow.epoch()
        fast.epoch()
    np.testing.assert_allclose(fast.table, slow.table, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(fast.vectors, slow.vectors, rtol=2e-4, atol=2e-5)
