"""A baseline through a well-kept library: `implicit` for BPR. It needs the extra 'recommend'."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_key
from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"baseline: needs {name.split('.')[0]}; install it with pip install 'steelyard[recommend]'"
        ) from None


def bpr(
    train: Interactions, seed: int = 1, factors: int = 20, rate: float = 0.05, decay: float = 0.0025, epochs: int = 50
) -> Scores:
    """BPR by `implicit`, centralised: negatives come from what others took, so popular items are pushed down more.

    Two threads may write the same row in one moment, so runs with the same seed agree only nearly.
    """
    library = _library("implicit.bpr")
    # One BLAS thread, since implicit brings its own; NumPy read the environment long ago.
    with threadpool_limits(1, "blas"), warnings.catch_warnings():
        # The library hands itself a matrix in a form that it then warns about.
        warnings.filterwarnings("ignore", message="Method expects CSR input")
        model = library.BayesianPersonalizedRanking(
            factors=factors,
            learning_rate=rate,
            regularization=decay,
            iterations=epochs,
            num_threads=2,
            random_state=stream_key(seed, 0, "", "bpr baseline") % (1 << 31),
        )
        model.fit(matrix(train), show_progress=False)

    def scores(users: Codes) -> Floats:
        return np.asarray(model.user_factors[users] @ model.item_factors.T, dtype=np.float64)

    return scores
