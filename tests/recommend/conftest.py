"""A small world for the recommenders: two tastes, each with its own items."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def two_tastes(users: int = 24, items: int = 40, taken: int = 10, seed: int = 0) -> list[tuple[str, str, int, int]]:
    """Rows user, item, rating, time: even users take from the first half of the items, odd ones from the second."""
    random = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        half = np.arange(items // 2) + (items // 2) * (user % 2)
        for place, item in enumerate(random.choice(half, size=taken, replace=False)):
            rows.append((f"u{user:02d}", f"i{item:02d}", 5, 1000 + place))
    return rows


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """Find a real data set, or leave the test out."""

    def find(name: str) -> Path:
        for folder in (Path(os.environ.get("STEELYARD_DATA", ROOT)), ROOT / "../shared/data"):
            if (folder / name).exists():
                return (folder / name).absolute()
        pytest.skip(f"needs {name} in STEELYARD_DATA or ../shared/data")

    return find


@pytest.fixture
def tastes(tmp_path: Path) -> Path:
    path = tmp_path / "tastes.tsv"
    lines = ["user\titem\trating\ttime\tpi\tkind"]
    for user, item, rating, time in two_tastes():
        pi = "0" if user == "u00" else "0.5"
        lines.append(f"{user}\t{item}\t{rating}\t{time}\t{pi}\t{'first' if item < 'i20' else 'second'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def description(tastes: Path) -> dict:
    return {
        "kind": "recommend",
        "name": "tastes",
        "seed": 3,
        "interactions": {"path": str(tastes), "category_column": "kind"},
        "fpl": {"factors": 6, "learning_rate": 0.2},
        "rounds": {"epochs": 4},
    }
