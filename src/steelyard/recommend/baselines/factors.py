"""Matrix factorisation: BPR-MF, kaHFM, MF, `implicit`'s BPR, SVD, and FCF, which is federated."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from steelyard.base.errors import UserError
from steelyard.base.logs import doing
from steelyard.base.randomness import generator, stream_key
from steelyard.recommend.baselines import Baseline, Count, Rate, Weight, Width
from steelyard.recommend.baselines.neighbours import Profile, matrix, profiles, tf_idf
from steelyard.recommend.fpl import Learning, initial_table, initial_vector
from steelyard.recommend.histories import Floats32, Histories, Keys, round_keys, user_keys
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import Floats, Scores
from steelyard.weighing.policy import Adam

# BPR-MF as the thesis has it: S. Rendle et al., *BPR: Bayesian Personalized Ranking from Implicit Feedback*, 2009. A
# step draws a user evenly, one of her items and one that she did not take, evenly too, and moves the user's vector,
# both items and their biases by stochastic gradient descent; an epoch has as many steps as there are interactions.
# `implicit`'s BPR draws negatives from what others took, which pushes popular items down.


class BprModel:
    """A model in training, epoch by epoch; use it where a run is looked at on the way, else the baseline `BprMf`.

    A step of BPR is a round of FPL with one user, one triple and everything sent, so the machinery is that of sFPL.
    """

    def __init__(self, train: Interactions, seed: int, learning: Learning) -> None:
        self.histories, self.seed, self.learning = Histories.of(train), seed, learning
        names = self.histories.names
        self.table = initial_table(seed, self.histories.catalogue, learning.factors)
        self.vectors = np.stack([initial_vector(seed, name, learning.factors) for name in names])
        self._keys = user_keys(seed, names, "bpr-mf")
        sizes = self.histories.sizes
        self._drawn = np.flatnonzero((sizes > 0) & (sizes < self.histories.catalogue))
        self.epochs = 0

    def turns(self, epoch: int) -> tuple[Codes, Keys]:
        """Return the user of each step of an epoch, and the key of her draw; as many steps as interactions."""
        count = self.histories.total if len(self._drawn) else 0
        turns = generator(self.seed, epoch, "", "bpr-mf turns").integers(max(len(self._drawn), 1), size=count)
        users = self._drawn[turns]
        return users, round_keys(self._keys[users], (epoch - 1) * count + np.arange(count))

    def epoch(self) -> None:
        """Take as many steps as there are interactions, each on what the one before left."""
        # For speed of start, and in an extra.
        from steelyard.recommend.compiled import draw_triples, sequential_rounds

        self.epochs += 1
        users, keys = self.turns(self.epochs)
        triples = draw_triples(self.histories, users, keys, 1)
        everything = np.ones((len(users), 1), dtype=np.bool_)
        sequential_rounds(self.table, self.vectors, users, triples, everything, self.learning)

    def train(self, epochs: int) -> None:
        """Go through some epochs and say where it is."""
        for epoch in range(1, epochs + 1):
            with doing(f"epoch {epoch} of {epochs}"):
                self.epoch()

    def scores(self, users: Codes) -> Floats32:
        """Return b_i + q_i·p_u of all items for these users."""
        return self.vectors[users] @ self.table[:, :-1].T + self.table[:, -1]


class BprMf(Baseline, named="bpr-mf"):
    """BPR-MF with evenly drawn negatives; the weights of regularisation follow from the rate, as in FPL (§4.5.3)."""

    factors: Width = 20
    rate: Rate = 0.05
    decay: Weight | None = None
    """λ of users and positive items, a tenth of it for negative ones (chapter 6); default: rate / 20 (chapter 4)."""
    epochs: Count = 50

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        user, negative = (None, None) if self.decay is None else (self.decay, self.decay / 10)
        model = BprModel(train, seed, Learning(self.rate, self.factors, user, user, negative))
        model.train(self.epochs)
        return model.scores


# MF is ŷ_ui = σ(μ + b_u + b_i + q_iᵀ p_u), trained pair by pair: S. Rendle, W. Krichene, L. Zhang, J. Anderson, *Neural
# Collaborative Filtering vs. Matrix Factorization Revisited*, RecSys 2020. An interaction is a 1; so many items drawn
# evenly from all, hers too, are 0. Steps are those of stochastic gradient descent, and everything decays, biases too.


class Mf(Baseline, named="mf"):
    """MF in the version of Rendle et al.; use it as the thesis' row MF (Tables 6.1 to 6.3)."""

    factors: Width = 16
    rate: Rate = 0.01
    decay: Weight = 0.01
    """λ of factors and biases."""
    negatives: Count = 4
    epochs: Count = 50

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        from steelyard.recommend.compiled import pointwise_pass  # For speed of start, and in an extra.

        chance = generator(seed, 0, "", "mf baseline")
        count, catalogue = len(train), len(train.items)
        tables = [np.zeros((rows, self.factors + 1), dtype=np.float32) for rows in (len(train.users), catalogue)]
        for table in tables:
            table[:, :-1] = chance.normal(0.0, 0.1, (len(table), self.factors))
        mean, constants = np.zeros(1, np.float32), np.array([self.rate, 1 - self.rate * self.decay], np.float32)
        users = np.concatenate([train.user, np.repeat(train.user, self.negatives)])
        for epoch in range(1, self.epochs + 1):
            with doing(f"epoch {epoch} of {self.epochs}"):
                items = np.concatenate([train.item, chance.integers(catalogue, size=self.negatives * count)])
                order = chance.permutation(len(users))
                pointwise_pass(users, items, *tables, mean, order, count, constants)
        of_users, of_items = tables
        return lambda users: of_users[users, :-1] @ of_items[:, :-1].T + of_items[:, -1]


# kaHFM: V. W. Anelli et al., *How to Make Latent Factors Interpretable by Feeding Factorization Machines with Knowledge
# Graphs*, ISWC 2019. An item's vector begins as the TF-IDF of its features, a user's as the mean over her items; both
# are then trained as in BPR-MF, so that a factor keeps the meaning of its feature.


class Kahfm(Baseline, named="kahfm"):
    """BPR-MF that begins from what is known of items; use it as the thesis' row kaHFM (Tables 6.1 to 6.3)."""

    of_features = True
    rate: Rate = 0.05
    epochs: Count = 30
    batch: Count | None = None
    """Steps of Adam on so many triples together, without decay, as the authors' program takes; default: one by one."""
    profile: Profile = "sum"

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        model = informed(train, self.needed(features), seed, self.rate, self.profile)
        if self.batch is None:
            model.train(self.epochs)
        else:
            _with_adam(model, self.epochs, self.batch)
        return model.scores


def informed(train: Interactions, features: ItemFeatures, seed: int, rate: float, profile: Profile = "sum") -> BprModel:
    """Return BPR-MF before its first step, with a factor for each feature."""
    model = BprModel(train, seed, Learning(rate, features.features))
    items = tf_idf(features)
    sizes = np.maximum(model.histories.sizes, 1)[:, None]
    model.table = np.hstack([items.toarray(), np.zeros((features.items, 1))]).astype(np.float32)
    model.vectors = (profiles(train, items, profile).toarray() / sizes).astype(np.float32)
    return model


def _with_adam(model: BprModel, epochs: int, batch: int) -> None:
    """Train with Adam on batches of triples: the loss of a batch is the sum of −ln σ(x̂)."""
    import torch  # For speed of start: other factors need none.

    from steelyard.recommend.compiled import draw_triples

    table, vectors = (torch.from_numpy(each).requires_grad_() for each in (model.table, model.vectors))
    optimiser = torch.optim.Adam([table, vectors], lr=model.learning.rate, eps=1e-7)
    for epoch in range(1, epochs + 1):
        with doing(f"epoch {epoch} of {epochs}"):
            users, keys = model.turns(epoch)
            drawn = draw_triples(model.histories, users, keys, 1)
            for begin in range(0, len(users), batch):
                part = slice(begin, begin + batch)
                liked, others = (table[each[part, 0]] for each in (drawn.positives, drawn.negatives))
                apart = liked - others
                margins = apart[:, -1] + (apart[:, :-1] * vectors[users[part]]).sum(dim=1)
                optimiser.zero_grad()
                torch.nn.functional.softplus(-margins).sum().backward()
                optimiser.step()


# SVD: matrix factorisation of ratings (thesis Eq. 2.4), r̃_ui = μ + b_u + b_i + q_iᵀ p_u. μ is the mean of all ratings,
# b_u and b_i how far a user's and an item's own stray from it; the vectors are found by alternating least squares on
# what that leaves. It predicts ratings: where all are 1, it has nothing to learn.


class Svd(Baseline, named="svd"):
    """Matrix factorisation of ratings (Eq. 2.4); use it where ratings differ and are to be predicted."""

    factors: Width = 20
    decay: Weight = 0.1
    epochs: Count = 15

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        ratings = matrix(train, "kept").astype(np.float64)
        mean, of_users, of_items = baseline_predictor(ratings)
        left = ratings.copy()
        user = np.repeat(np.arange(ratings.shape[0]), np.diff(ratings.indptr))
        left.data -= mean + of_users[user] + of_items[ratings.indices]
        by_item = left.T.tocsr()
        items = generator(seed, 0, "", "svd baseline").normal(0.0, 0.1, (ratings.shape[1], self.factors))
        vectors = np.zeros((ratings.shape[0], self.factors))
        for epoch in range(1, self.epochs + 1):
            with doing(f"epoch {epoch} of {self.epochs}"):
                vectors = least_squares(left, items, self.decay)
                items = least_squares(by_item, vectors, self.decay)
        return lambda users: mean + of_users[users][:, None] + of_items + vectors[users] @ items.T


def baseline_predictor(ratings: Any) -> tuple[float, Floats, Floats]:
    """Return μ, b_u and b_i: the mean, and how far users and then items stray from it on average."""
    mean = float(ratings.data.mean()) if ratings.nnz else 0.0
    strayed = ratings.copy()
    strayed.data -= mean
    of_users = _row_means(strayed)
    strayed.data -= np.repeat(of_users, np.diff(strayed.indptr))
    return mean, of_users, _row_means(strayed.T.tocsr())


def least_squares(left: Any, others: Floats, decay: float) -> Floats:
    """Return for each row the vector v that minimises Σ (e - vᵀ q)² + decay · n · |v|² over its n entries."""
    found = np.zeros((left.shape[0], others.shape[1]))
    ridge = decay * np.eye(others.shape[1])
    for row in np.flatnonzero(np.diff(left.indptr)):
        entries = slice(left.indptr[row], left.indptr[row + 1])
        theirs = others[left.indices[entries]]
        found[row] = np.linalg.solve(theirs.T @ theirs + len(theirs) * ridge, theirs.T @ left.data[entries])
    return found


def _row_means(values: Any) -> Floats:
    sums = np.asarray(values.sum(axis=1), dtype=np.float64).reshape(-1)
    return sums / np.maximum(np.diff(values.indptr), 1)


# FCF, federated collaborative filtering (Ammad-ud-din et al., 2019): implicit matrix factorisation, federated.
# Confidence c_ui = 1 + w·r_ui with r_ui = 1 for items taken. Each device solves for its own vector in closed form from
# the item factors, and sends the gradient of every item's factors; the server sums the gradients and steps with Adam.


class Fcf(Baseline, named="fcf"):
    """FCF with all users in every round."""

    factors: Width = 20
    rate: Rate = 0.1
    epochs: Count = 30
    confidence: Weight = 4.0
    """w"""
    decay: Weight = 1.0
    """λ"""

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        taken, weights = matrix(train), (self.confidence, self.decay)
        table = generator(seed, 0, "", "fcf items").normal(0.0, 0.1, (len(train.items), self.factors))
        adam = Adam(table.shape, (0.9, 0.999))
        for epoch in range(1, self.epochs + 1):
            with doing(f"epoch {epoch} of {self.epochs}"):
                gradient = item_gradient(taken, table, user_vectors(taken, table, *weights), *weights)
            table = adam.step(table, gradient, self.rate)
        vectors = user_vectors(taken, table, *weights)
        return lambda users: vectors[users] @ table.T


def user_vectors(taken: Any, table: Floats, confidence: float, decay: float) -> Floats:
    """Return each user's vector (Qᵀ C_u Q + λ I)⁻¹ Qᵀ C_u r_u; QᵀQ is the same for all, her items add to it."""
    common = table.T @ table + decay * np.eye(table.shape[1])
    found = np.empty((taken.shape[0], table.shape[1]))
    for user in range(taken.shape[0]):
        mine = table[taken.indices[taken.indptr[user] : taken.indptr[user + 1]]]
        found[user] = np.linalg.solve(common + confidence * mine.T @ mine, (1 + confidence) * mine.sum(axis=0))
    return found


def item_gradient(taken: Any, table: Floats, vectors: Floats, confidence: float, decay: float) -> Floats:
    """Return Σ_u −2 c_ui (r_ui − q_i·p_u) p_u + 2 λ q_i for every item: what the devices' gradients sum to.

    Untaken items contribute q_i·p_u p_u, which sums to Q (PᵀP) without visiting them one by one.
    """
    users = np.repeat(np.arange(taken.shape[0]), np.diff(taken.indptr))
    met = vectors[users]
    predicted = np.einsum("rf,rf->r", met, table[taken.indices])
    pull = ((1 + confidence) * (1 - predicted) + predicted)[:, None] * met
    sums = np.zeros_like(table)
    np.add.at(sums, taken.indices, pull)
    return 2 * (table @ (vectors.T @ vectors) - sums + decay * table)


class Bpr(Baseline, named="bpr"):
    """BPR by `implicit`, centralised: negatives come from what others took, so popular items are pushed down more.

    Two threads may write the same row in one moment, so runs with the same seed agree only nearly.
    """

    factors: Width = 20
    rate: Rate = 0.05
    decay: Weight = 0.0025
    epochs: Count = 50

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        try:
            library = importlib.import_module("implicit.bpr")
        except ImportError:
            raise UserError("baseline: needs implicit; install it with pip install 'steelyard[recommend]'") from None
        # One BLAS thread, since implicit brings its own; NumPy read the environment long ago.
        with threadpool_limits(1, "blas"), warnings.catch_warnings():
            # The library hands itself a matrix in a form that it then warns about.
            warnings.filterwarnings("ignore", message="Method expects CSR input")
            model = library.BayesianPersonalizedRanking(
                factors=self.factors,
                learning_rate=self.rate,
                regularization=self.decay,
                iterations=self.epochs,
                num_threads=2,
                random_state=stream_key(seed, 0, "", "bpr baseline") % (1 << 31),
            )
            model.fit(matrix(train), show_progress=False)
        return lambda users: np.asarray(model.user_factors[users] @ model.item_factors.T, dtype=np.float64)
