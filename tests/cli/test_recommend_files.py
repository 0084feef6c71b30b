"""`steelyard recommend split` and `baseline` find data as experiments do, and say how far they are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import CommandLine
from tests.warm import command_environment, warm_command

from steelyard.recommend.baselines import recommend
from steelyard.recommend.interactions import build


def rows(users: int = 6, items: int = 8) -> list[tuple[str, str]]:
    return [(f"u{user}", f"i{(user + step) % items}") for user in range(users) for step in range(5)]


def test_split_looks_where_experiments_look(tmp_path: Path) -> None:
    data = tmp_path / "elsewhere"
    data.mkdir()
    lines = [f"{user}\t{item}\t1\t{time}" for time, (user, item) in enumerate(rows())]
    (data / "taken.tsv").write_text("user\titem\trating\ttime\n" + "\n".join(lines) + "\n")
    command = ("recommend", "split", "taken.tsv", "--out", "halves")
    environment = command_environment(STEELYARD_DATA=str(data))
    done = warm_command(*command, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "halves" / "train.tsv").exists()
    other = warm_command(*command[:-1], "others", folder=tmp_path, environment=command_environment())
    assert other.returncode == 2
    assert "taken.tsv" in other.stderr


def test_the_help_of_baseline_keeps_what_stands_in_brackets(steelyard: CommandLine) -> None:
    done = steelyard("recommend", "baseline", "--help")
    assert "[knowledge]" in done.stdout


@pytest.mark.parametrize("kind", ["fcf", "bpr_mf"])
def test_a_baseline_says_which_epoch_it_is_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def doing(what: str) -> Generator[None]:
        said.append(what)
        yield

    monkeypatch.setattr(f"steelyard.recommend.baselines.{kind}.doing", doing)
    users, items = zip(*rows(), strict=True)
    table = build(list(users), list(items), np.ones(len(users)).tolist())
    recommend(kind.replace("_", "-"), table, 2, 1, {"epochs": 3, "factors": 2})
    assert said == ["epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3"]
