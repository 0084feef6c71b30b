"""The two data sets that come with scikit-learn: handwritten digits (classes) and diabetes (regression)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.data.dataset import Dataset
from steelyard.data.memory import in_memory
from steelyard.data.settings import DataSettings

_DIGITS = ("datasets", "data", "digits.csv.gz")
"""Where they lie in scikit-learn."""


def read_digits(settings: DataSettings) -> Dataset:
    """Return scikit-learn's 1,797 digits as 1×8×8 images between 0 and 1; use it where no download is wanted."""
    table = _digits()
    pixels = table[:, :-1].reshape(-1, 1, 8, 8) / np.float32(16)
    return in_memory(pixels, table[:, -1].astype(np.int64), classes=10, name="digits")


@cache
def _digits() -> NDArray[np.float32]:
    # For speed of start: the file is read as scikit-learn reads it, without importing that, which takes longer than
    # the first round of the quickstart.
    found = find_spec("sklearn")
    places = [] if found is None else found.submodule_search_locations or []
    path = next((path for place in places if (path := Path(place, *_DIGITS)).is_file()), None)
    if path is None:
        raise UserError("data.source: got 'digits', which come with scikit-learn, and it is not there; allowed: others")
    return np.loadtxt(path, delimiter=",", dtype=np.float32)


def read_diabetes(settings: DataSettings) -> Dataset:
    """Return scikit-learn's 442 patients, 10 scaled columns and the disease's progression; use it to try regression."""
    # For speed of start: few experiments use these data sets.
    from sklearn.datasets import load_diabetes

    bunch: Any = load_diabetes()
    target = np.asarray(bunch.target, dtype=np.float32)
    return in_memory(np.asarray(bunch.data, dtype=np.float32), target, name="diabetes")
