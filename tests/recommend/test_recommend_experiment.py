"""FPL through the one loop: modes, weights on users, resume, noise on devices, refusals, commands."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import kit
from tests.kit import assert_refused, named
from tests.privacy.seeded_source import SeededSource

from steelyard.experiment import running
from steelyard.experiment.loading import build, to_toml
from steelyard.experiment.recommend import RecommendDescription
from steelyard.messages.updates import Task
from steelyard.privacy.accounting import Release, spent
from steelyard.recommend import sparse
from steelyard.recommend.fpl import Schedule
from steelyard.recommend.run_data import load_run_data
from steelyard.recommend.sparse import PairRows, SparseRows
from steelyard.report.recommender import open_run
from steelyard.result import Result

USERS, TRAIN = 24, 24 * 8


def changed(description: dict, **sections: Any) -> RecommendDescription:
    return build(kit.changed(description, **sections))


def run(*arguments: Any, **options: Any) -> Result:
    return Result(running.run(*arguments, **options))


@pytest.mark.parametrize(
    ("mode", "epoch", "cohort", "triples", "per_epoch"),
    [
        ("pFPL+", "formula", USERS, 8, 1),
        ("sFPL", "formula", 1, 1, TRAIN),
        ("pFPL+", "tables", USERS, 8, 8),
        ("sFPL+", "tables", 1, 8, TRAIN),
    ],
)
def test_all_modes_run_through_the_loop_and_learn(description, tmp_path, mode, epoch, cohort, triples, per_epoch):
    epochs = 30 if epoch == "formula" else 4
    experiment = changed(description, fpl={"mode": mode, "epoch": epoch}, rounds={"epochs": epochs})
    assert experiment.schedule() == Schedule(cohort, triples, per_epoch)
    result = run(experiment, out=tmp_path / "run")
    history = result.history.rounds
    # A round of one user counts as part of a round, all of an epoch's.
    assert history["round"].max() == epochs * (1 if cohort == 1 else per_epoch)
    measured = history[history["accuracy"].notna()]
    assert len(measured) == epochs + 1  # the first model and each epoch
    # With two tastes told apart, 12 of 40 items are left to guess from; by chance the score is about 0.06.
    assert measured["accuracy"].iloc[-1] > 0.15
    sent = open_run(tmp_path / "run").communication()
    assert sent["sent_vectors_down"] == epochs * per_epoch * cohort * 40
    assert 0 < sent["sent_vectors_up"] <= epochs * per_epoch * cohort * triples * 2


def test_users_are_weighed_by_criteria_beside_the_plain_sum(description, tmp_path):
    experiment = changed(
        description,
        weighing={"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD"},
        beside={"sum": {"criteria": ["EQ"]}},
        rounds={"epochs": 2},
    )
    result = run(experiment, out=tmp_path / "run")
    clients = result.history.clients.query("round == 1")
    weighed, plain = clients[clients["rule"] == "LD>DS>MD"], clients[clients["rule"] == "sum"]
    assert weighed["raw_DS"].tolist() == [8.0] * USERS
    assert weighed["raw_LD"].tolist() == [1.0] * USERS  # each taste is one category
    assert weighed["raw_MD"].between(0, 1, inclusive="neither").all()
    assert weighed["weight"].nunique() > 1
    assert plain["weight"].to_numpy() == pytest.approx(1 / USERS)
    assert not torch.equal(*(open_run(result.folder, rule).model for rule in ("LD>DS>MD", "sum")))


def one_task(experiment: RecommendDescription, names: list[str], round: int = 1) -> tuple:
    clients, server = experiment.assemble()
    task = Task("EQ", experiment.seed, round, tuple(names), server.initial(experiment.seed))
    return clients, clients.train([task])[0]


def test_own_share_of_each_user_from_a_column(description):
    experiment = changed(description, interactions={"pi_column": "pi"})
    clients, updates = one_task(experiment, [f"u{u:02d}" for u in range(USERS)])
    assert clients.users.shares.tolist() == [0.0] + [0.5] * (USERS - 1)
    assert isinstance(updates.payload, PairRows)
    assert not updates.payload.sent[0].any()
    assert updates.payload.sent[1:].any()


NOISY = {"local": {"clip": 1.0, "noise": 20.0}}
CENTRAL = {"central": {"clip": 1.0, "noise": 1.0}}
ONLINE = {"criteria": ["DS", "LD"], "adjust": {"strategy": "online"}}


@pytest.mark.parametrize(
    ("sections", "parts"),
    named(
        [
            ("one user", {"fpl": {"mode": "sFPL"}, "weighing": {"criteria": ["DS"]}}, ["nothing is weighed"]),
            ("a criterion", {"weighing": {"criteria": ["CB"]}}, ["CB has no meaning for users", "EQ, DS, LD"]),
            ("untested", {"fpl": {"epoch": "tables"}, "weighing": ONLINE}, ["weighing.adjust"]),
            ("noise of one", {"fpl": {"mode": "sFPL"}, "privacy": NOISY}, ["privacy.local", "one user"]),
            (
                "no score",
                {"ranking": {"protocol": "sampled", "score": "recall"}},
                ["ranking.score", "'recall'", "ndcg"],
            ),
            ("an algorithm", {"algorithm": {"name": "scaffold"}}, ["algorithm.name", "'scaffold'"]),
            ("noise at the server", {"privacy": CENTRAL}, ["privacy.central"]),
        ]
    ),
)
def test_bad_descriptions_are_named(description, sections, parts):
    assert_refused(lambda: changed(description, **sections), *parts)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"interactions": {"path": "nowhere.tsv"}}, ["nowhere.tsv"]),
        ({"ranking": {"threshold": 9.0}}, ["no user has a relevant test item"]),
    ],
)
def test_data_that_does_not_fit_is_named(description, sections, parts):
    assert_refused(changed(description, **sections).assemble, *parts)


def test_custom_cohorts_and_rounds_in_place_of_epochs(description, tmp_path):
    fpl = {"mode": "custom", "triples": 2}
    experiment = changed(description, fpl=fpl, rounds={"epochs": 2, "fraction": 0.25})
    assert experiment.schedule() == Schedule(users=6, triples=2, rounds_per_epoch=16)
    history = run(experiment, out=tmp_path / "run").history
    assert set(history.rounds["cohort"][1:]) == {6}
    # Single clients are recorded once an epoch, so that many short rounds do not fill the disk.
    assert sorted(set(history.clients["round"])) == [16, 32]


def test_from_the_command_line(description, tmp_path, command, refused):
    (tmp_path / "tastes.toml").write_text(to_toml(changed(description)))

    def answer(*words: str) -> dict:
        done = command(*words, "--format", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert answer("run", "tastes.toml", "--set", "fpl.pi=0.5", "--out", "here")["status"] == "finished"
    shown = command("run", "tastes.toml", "--set", "fpl.pi=0.5", "--out", "again").stdout
    assert len(answer("recommend", "list", "here", "--user", "u01")["items"]) == 10
    metrics = answer("recommend", "report", "here", "--cutoff", "10,1")["metrics"]
    # What `run` prints of its lists is what the report has, beside two systems that learn nothing.
    names = ("precision", "recall", "ndcg", "hit_rate", "item_coverage", "gini")
    own = [metrics["10"][name] for name in names]
    assert " ".join(
        ["this run", *(f"{each:.4f}" if isinstance(each, float) else f"{each:,}" for each in own)]
    ) in " ".join(shown.split())
    assert "most popular 0." in " ".join(shown.split())
    assert command("recommend", "list", "here", "--out", "lists.tsv").returncode == 0
    command("recommend", "split", "tastes.tsv", "--out", "split")
    files = ["--train", "split/train.tsv", "--test", "split/test.tsv", "--catalogue", "split/catalogue.tsv"]
    judged = answer("recommend", "evaluate", *files, "--recommendations", "lists.tsv")
    assert judged["10"]["ndcg"] == pytest.approx(metrics["10"]["ndcg"], abs=1e-9)
    assert "--user: got 'zoe'" in refused("recommend", "list", "here", "--user", "zoe")


# ---------------------------------------------------------------- noise on the devices


def rows_of() -> SparseRows:
    owners, rows = np.array([0, 0, 1], dtype=np.int32), np.array([1, 3, 0], dtype=np.int32)
    return SparseRows(2, owners, rows, np.array([[3.0, 0.0], [0.0, 4.0], [0.3, 0.4]], dtype=np.float32), 0.1)


def test_a_users_change_is_clipped_and_lies_under_noise_on_every_row():
    told = rows_of().with_noise(5, 1.0, 1e-6, SeededSource(1))
    # User 0: (3, 4) over two rows, length 5, clipped to 1; user 1: length 0.5, as it is.
    expected = np.zeros((2, 5, 2))
    expected[0, 1, 0], expected[0, 3, 1], expected[1, 0] = 0.6, 0.8, (0.3, 0.4)
    assert told.values.reshape(2, 5, 2) == pytest.approx(expected, abs=1e-5)
    assert told.rows.tolist() == [0, 1, 2, 3, 4] * 2
    wide = rows_of().with_noise(5000, 1.0, 0.5, SeededSource(2))
    # 20,000 draws: a standard error of half a percent, and four of them.
    assert wide.values.std() == pytest.approx(0.5, rel=0.02)
    broken = rows_of()
    broken.values[0, 1] = np.nan  # Then nothing clips the rest of user 0's change: it is not told.
    assert np.abs(broken.with_noise(5, 1.0, 1e-6, SeededSource(1)).values.reshape(2, 5, 2)[0]).max() < 1e-4


def test_a_run_with_noise_shows_what_it_spends(description: dict, tmp_path: Path):
    noisy = changed({**description, "rounds": {"count": 3}}, fpl={"mode": "pFPL"}, privacy=NOISY)
    history = run(noisy, out=tmp_path / "run").history
    assert history.rounds["epsilon"].iloc[-1] == pytest.approx(spent({Release(20.0): 3}, 1e-5))


# ---------------------------------------------------------------- what users offer to criteria


@given(st.integers(0, 4), st.integers(0, 12), st.integers(0, 2**31), st.sampled_from([sparse.GRAM_BLOCK, 2]))
def test_the_gram_matrix_equals_the_products_of_whole_tables(users: int, count: int, seed: int, block: int):
    chance = np.random.default_rng(seed)
    count = count if users else 0
    owners = np.sort(chance.integers(0, max(users, 1), count)).astype(np.int32)
    rows = chance.integers(0, 5, count).astype(np.int32)
    payload = SparseRows(users, owners, rows, chance.normal(size=(count, 3)).astype(np.float32), 0.5)
    tables = np.zeros((users, 5, 3))
    np.add.at(tables, (owners, rows), payload.values)
    moved = 0.5 * tables.reshape(users, 15)
    with mock.patch.object(sparse, "GRAM_BLOCK", block):
        found = payload.gram(torch.zeros(15))
    # What a user sends for one item is summed in float32.
    assert found == pytest.approx(moved @ moved.T, rel=1e-5, abs=1e-5)


def test_an_edited_file_and_another_folder_are_read_again(
    description: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal settings are no equal data: a file is edited, and a relative path means another file elsewhere."""
    rows = Path(description["interactions"]["path"]).read_text().splitlines(keepends=True)
    found = []
    for folder, kept in (("a", rows), ("a", rows[:-8]), ("b", rows[:-16])):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "ratings.csv").write_text("".join(kept))
        monkeypatch.chdir(tmp_path / folder)
        given = changed(description, interactions={"path": "ratings.csv"})
        found.append(load_run_data(given.interactions, given.items, given.fpl, given.ranking))
    assert [len(each.data.user) for each in found] == [len(rows) - 1, len(rows) - 9, len(rows) - 17]
    again = load_run_data(given.interactions, given.items, given.fpl, given.ranking)
    assert again is found[-1], "an untouched file is read once"
