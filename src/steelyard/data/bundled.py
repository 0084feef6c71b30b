"""The two data sets that come with scikit-learn: handwritten digits (classes) and diabetes (regression)."""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.data.dataset import Dataset
from steelyard.data.memory import in_memory
from steelyard.data.settings import DataSettings


def read_digits(settings: DataSettings) -> Dataset:
    """Return scikit-learn's 1,797 digits as 1×8×8 images between 0 and 1; use it where no download is wanted."""
    # For speed of start: few experiments use these data sets.
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    pixels = np.asarray(bunch.images, dtype=np.float32)[:, None] / np.float32(16)
    return in_memory(pixels, np.asarray(bunch.target, dtype=np.int64), classes=10, name="digits")


def read_diabetes(settings: DataSettings) -> Dataset:
    """Return scikit-learn's 442 patients, 10 scaled columns and the disease's progression; use it to try regression."""
    # For speed of start: few experiments use these data sets.
    from sklearn.datasets import load_diabetes

    bunch: Any = load_diabetes()
    target = np.asarray(bunch.target, dtype=np.float32)
    return in_memory(np.asarray(bunch.data, dtype=np.float32), target, name="diabetes")
