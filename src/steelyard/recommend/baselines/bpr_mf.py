"""BPR-MF as the thesis has it: pair-wise matrix factorisation in one place, negatives drawn evenly.

S. Rendle et al., *BPR: Bayesian Personalized Ranking from Implicit Feedback*, 2009. A step draws a user evenly, one of
her items and one that she did not take, evenly too, and moves the user's vector, both items and their biases by
stochastic gradient descent; an epoch has as many steps as there are interactions. `implicit`'s BPR (the baseline "bpr")
draws negatives from what others took, which pushes popular items down.
"""

from __future__ import annotations

import numpy as np

from steelyard.base.logs import doing
from steelyard.base.randomness import generator
from steelyard.recommend.engines import choose_engine
from steelyard.recommend.fpl import Learning, initial_table, initial_vector
from steelyard.recommend.histories import Histories, round_keys, user_keys
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.sparse import Floats32


class BprMf:
    """A model in training, epoch by epoch; use it where a run is looked at on the way, else the baseline `bpr_mf`.

    A step of BPR is a round of FPL with one user, one triple and everything sent, so the machinery is that of sFPL.
    """

    def __init__(self, train: Interactions, seed: int, learning: Learning, engine: str = "auto") -> None:
        self.histories, self.seed, self.learning = Histories.of(train), seed, learning
        # Long vectors, such as kaHFM's of thousands, take as long as many triples.
        self._engine = choose_engine(engine, self.histories.total * max(1, learning.factors // 100))
        names = self.histories.names
        self.table = initial_table(seed, self.histories.catalogue, learning.factors)
        self.vectors = np.stack([initial_vector(seed, name, learning.factors) for name in names])
        self._keys = user_keys(seed, names, "bpr-mf")
        sizes = self.histories.sizes
        self._drawn = np.flatnonzero((sizes > 0) & (sizes < self.histories.catalogue))
        self.epochs = 0

    def epoch(self) -> None:
        """Take as many steps as there are interactions, each on what the one before left."""
        self.epochs += 1
        count = self.histories.total
        if not len(self._drawn):
            return
        turns = generator(self.seed, self.epochs, "", "bpr-mf turns").integers(len(self._drawn), size=count)
        users = self._drawn[turns]
        keys = round_keys(self._keys[users], (self.epochs - 1) * count + np.arange(count))
        triples = self._engine.draw_triples(self.histories, users, keys, 1)
        everything = np.ones((count, 1), dtype=np.bool_)
        self._engine.sequential_rounds(self.table, self.vectors, users, triples, everything, self.learning)

    def train(self, epochs: int) -> None:
        """Go through some epochs and say where it is."""
        for epoch in range(1, epochs + 1):
            with doing(f"epoch {epoch} of {epochs}"):
                self.epoch()

    def scores(self, users: Codes) -> Floats32:
        """Return b_i + q_i·p_u of all items for these users."""
        return self.vectors[users] @ self.table[:, :-1].T + self.table[:, -1]


def bpr_mf(train: Interactions, seed: int = 1, factors: int = 20, rate: float = 0.05, epochs: int = 50) -> Scores:
    """BPR-MF with evenly drawn negatives; the weights of regularisation follow from the rate, as in FPL (§4.5.3)."""
    model = BprMf(train, seed, Learning(rate, factors))
    model.train(epochs)
    return model.scores
