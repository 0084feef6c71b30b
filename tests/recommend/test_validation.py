"""A validation split: settings are chosen on a part of the training rows, and the test set stays unseen."""

from pathlib import Path

import pytest
from tests.warm import warm_command

from steelyard.errors import UserError
from steelyard.experiment import running
from steelyard.experiment.loading import build as described
from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend import splits
from steelyard.recommend.interactions import build
from steelyard.result import Result

USERS = 24


def changed(description: dict, **interactions) -> RecommendDescription:
    return described({**description, "interactions": {**description["interactions"], **interactions}})


def scores(experiment: RecommendDescription, folder: Path) -> list[float]:
    return Result(running.run(experiment, out=folder)).history.rounds["accuracy"].dropna().tolist()


def test_validation_is_the_newest_of_each_users_training_part():
    # Anna has 10 rows at times 0 to 9, Bob 5: of the training part (8 and 4) a quarter is 2 and 1.
    users, items = ["anna"] * 10 + ["bob"] * 5, [f"i{k}" for k in [*range(10), *range(5)]]
    data = build(users, items, time=[*range(10), *range(5)])
    whole = splits.temporal(data, 0.2)
    parts = splits.validation(whole.train, 0.25)
    named = {name: data.items[side.item[side.user == 0]].tolist() for name, side in vars(parts).items()}
    assert named == {"train": [f"i{k}" for k in range(6)], "test": ["i6", "i7"]}
    assert data.items[parts.test.item[parts.test.user == 1]].tolist() == ["i3"]
    assert whole.test.item.tolist() == [8, 9, 4]
    assert parts.train.items.tolist() == data.items.tolist()  # one numbering for all three


def test_validation_without_times_is_drawn_and_differs_from_the_test_draw():
    data = build(["anna"] * 40, [f"i{k:02d}" for k in range(40)])
    first = splits.validation(data, 0.5)
    assert len(first.train) == len(first.test) == 20
    assert first.test.item.tolist() == splits.validation(data, 0.5).test.item.tolist()
    assert first.test.item.tolist() != splits.random(data, 0.5, 42).test.item.tolist()


def test_where_test_rows_are_drawn_validation_rows_are_drawn_too(description):
    """A user's latest rows are another task than rows from anywhere; settings are chosen on the task of the test."""
    newest = changed(description, validation=0.25, split="temporal").run_data().split
    drawn = changed(description, validation=0.25, split="shuffled").run_data().split
    assert (newest.test.time.min(), newest.train.time.max()) == (1006, 1005)
    assert drawn.test.time.min() < drawn.train.time.max()
    again = changed(description, validation=0.25, split="shuffled").run_data().split
    assert drawn.test.item.tolist() == again.test.item.tolist()


def test_a_validation_run_neither_trains_on_nor_sees_the_test_set(description, tastes, tmp_path):
    description["ranking"] = {"threshold": 3}
    usual = changed(description).run_data().split
    experiment = changed(description, validation=0.25)
    split = experiment.run_data().split
    pairs = {name: set(zip(side.user.tolist(), side.item.tolist(), strict=True)) for name, side in vars(split).items()}
    tested = set(zip(usual.test.user.tolist(), usual.test.item.tolist(), strict=True))
    assert len(pairs["test"]) == USERS * 2  # of 8 training rows each
    assert len(pairs["train"]) == USERS * 6
    assert not (pairs["test"] | pairs["train"]) & tested
    # Whatever the test rows hold, the run is the same: here the two last of each user are no longer liked.
    first = scores(experiment, tmp_path / "first")
    rows = [line.split("\t") for line in tastes.read_text().splitlines()]
    for row in rows[1:]:
        row[2] = "1" if row[3] in ("1008", "1009") else row[2]
    changed_file = tmp_path / "changed.tsv"
    changed_file.write_text("\n".join("\t".join(row) for row in rows) + "\n")
    again = changed(description, validation=0.25, path=str(changed_file))
    assert len(first) == 5  # the first model and four epochs
    assert scores(again, tmp_path / "second") == first


def test_validation_that_leaves_nobody_to_test_is_refused(description):
    with pytest.raises(UserError, match=r"no user has a relevant validation item.*larger validation share"):
        changed(description, validation=0.05).run_data()


def test_the_split_command_writes_the_validation_rows_apart(tastes, tmp_path):
    command = ["recommend", "split", str(tastes), "--out", str(tmp_path / "cut")]
    done = warm_command(*command, "--validation", "0.25", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: 144, validation: 48, test: 48 interactions" in done.stdout
    rows = {name: (tmp_path / "cut" / f"{name}.tsv").read_text().splitlines() for name in ("train", "validation")}
    times = {name: {line.split("\t")[3] for line in lines[1:]} for name, lines in rows.items()}
    assert times == {"train": {f"100{k}" for k in range(6)}, "validation": {"1006", "1007"}}
    refused = warm_command(*command[:-1], tmp_path / "other", "--validation", "1.5", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "1.5" in refused.stderr
