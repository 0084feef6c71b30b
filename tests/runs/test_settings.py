"""[store]: defaults, limits, and what the fields do to a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.errors import UserError
from steelyard.runs.settings import StoreSettings
from steelyard.settings import validated


def test_defaults_write_everything() -> None:
    assert StoreSettings() == StoreSettings(folder=Path("runs"), checkpoint_every=1, clients_every=1)


@pytest.mark.parametrize("field", ["checkpoint_every", "clients_every"])
def test_rounds_are_counted_from_one(field: str) -> None:
    assert getattr(StoreSettings(**{field: 2}), field) == 2
    with pytest.raises(UserError, match=f"store: {field}: got 0; allowed: greater than or equal to 1"):
        validated(StoreSettings, {field: 0}, "store")


def test_a_misspelt_field_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'checkpoint_every'"):
        validated(StoreSettings, {"checkpoints_every": 3}, "store")
