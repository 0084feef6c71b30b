"""Networks: NeuMF, trained pair by pair, and MultiVAE, an autoencoder of whole users with noise in its middle.

NeuMF puts a product of factors and a small network side by side, ŷ_ui = σ(hᵀ [p_u ⊙ q_i, MLP(p'_u, q'_i)]): X. He et
al., *Neural Collaborative Filtering*, WWW 2017. Each interaction is a 1, and items drawn evenly from those that the
user did not take are 0. Trained by cross-entropy with Adam.

In MultiVAE a user's items x (divided by their length) become the mean μ and the variance σ² of a normal z; z becomes a
share of attention π(z) for each item. Trained to raise

    Σ_i x_i ln π_i(z) − β · KL(N(μ, σ²) ‖ N(0, 1))        KL = ½ Σ (μ² + σ² − ln σ² − 1)

with z drawn, half of the inputs left out at random, and β rising from 0 over the first fifth of the steps: D. Liang, R.
G. Krishnan, M. D. Hoffman, T. Jebara, *Variational Autoencoders for Collaborative Filtering*, WWW 2018.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, cast

import numpy as np
import torch
from pydantic import Field
from torch import nn

from steelyard.base.logs import doing
from steelyard.base.randomness import stream_key
from steelyard.recommend.baselines import Baseline, Count, Rate, Weight, Width
from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.histories import Histories, round_keys, user_keys
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import Floats, Scores


class NeuMfNetwork(nn.Module):
    """The network of the authors' program: four tables of factors, and layers of 4f, 2f and f units."""

    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.deep_user, self.deep_item = nn.Embedding(users, factors), nn.Embedding(items, factors)
        sizes = [2 * factors, 4 * factors, 2 * factors, factors]
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(2 * factors, 1)
        for part in self.modules():
            if isinstance(part, nn.Embedding | nn.Linear):
                nn.init.xavier_uniform_(part.weight)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the logit of each pair."""
        product = self.user(users) * self.item(items)
        deep = self.layers(torch.cat([self.deep_user(users), self.deep_item(items)], dim=-1))
        return cast(torch.Tensor, self.out(torch.cat([product, deep], dim=-1))).squeeze(-1)


class NeuMf(Baseline, named="neumf"):
    """NeuMF; use it as the thesis' row NeuMF (Tables 6.1 to 6.3), which `negatives=0` is: trained on ones alone."""

    factors: Width = 16
    rate: Rate = 0.001
    epochs: Count = 20
    negatives: Annotated[int, Field(ge=0, le=1000)] = 4
    batch: Count = 512

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        histories = Histories.of(train)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_key(seed, 0, "", "pointwise baseline"))
            model = NeuMfNetwork(histories.users, histories.catalogue, self.factors)
            optimiser = torch.optim.Adam(model.parameters(), lr=self.rate)
            for epoch in range(1, self.epochs + 1):
                with doing(f"epoch {epoch} of {self.epochs}"):
                    self._epoch(model, optimiser, histories, seed, epoch)

        def scores(users: Codes) -> Floats:
            everything = torch.arange(histories.catalogue)
            with torch.no_grad():
                rows = [model(torch.full_like(everything, user), everything) for user in users.tolist()]
            return torch.stack(rows).double().numpy()

        return scores

    def _epoch(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, histories: Histories, seed: int, epoch: int
    ) -> None:
        """Visit every interaction once, each with some items that its user did not take, in a new order."""
        from steelyard.recommend.compiled import draw_triples  # For speed of start, and in an extra.

        taken = np.repeat(np.arange(histories.users), histories.sizes)
        drawn = np.flatnonzero(histories.sizes[taken] < histories.catalogue)  # who took everything has no others
        users = taken[drawn]
        keys = round_keys(user_keys(seed, histories.names, "pointwise")[users], epoch * histories.total + drawn)
        others = draw_triples(histories, users, keys, self.negatives).negatives
        liked = np.stack([users, histories.items[drawn]])
        pairs = np.concatenate([liked, np.stack([np.repeat(users, self.negatives), others.reshape(-1)])], axis=1)
        wanted = torch.cat([torch.ones(len(users)), torch.zeros(others.size)])
        for rows in torch.randperm(len(wanted)).split(self.batch):
            who, what = torch.from_numpy(pairs[:, rows.numpy()]).long()
            loss = nn.functional.binary_cross_entropy_with_logits(model(who, what), wanted[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


_DROPPED, _RISING = 0.5, 0.2
"""The share of inputs that is left out, and the share of the steps over which β rises."""


class MultiVae(nn.Module):
    """The network of the paper: items, hidden, latent, hidden, items, with tanh between."""

    def __init__(self, items: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.latent = latent
        self.encoder = nn.Sequential(nn.Linear(items, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, items))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.trunc_normal_(layer.bias, std=0.001)

    def encoded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and the logarithm of the variance of each user's z."""
        kept = nn.functional.dropout(nn.functional.normalize(rows, dim=1), _DROPPED, training=self.training)
        mean, log_variance = self.encoder(kept).split(self.latent, dim=1)
        return mean, log_variance

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of all items at the mean of z; for ranking."""
        return self.decoder(self.encoded(rows)[0])


def loss(
    logits: torch.Tensor, rows: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return what is made small, on average over the users: minus the likelihood, and β times the divergence."""
    likelihood = (logits.log_softmax(dim=1) * rows).sum(dim=1)
    divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1.0).sum(dim=1)
    return (beta * divergence - likelihood).mean()


class Vae(Baseline, named="vae"):
    """MultiVAE; use it as the thesis' row VAE (Tables 4.2, 4.3) or MultiVAE (Table 6.1)."""

    hidden: Width = 600
    latent: Width = 200
    epochs: Count = 50
    batch: Count = 100
    rate: Rate = 0.001
    beta: Weight = 0.2

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        taken = matrix(train)
        trained = np.flatnonzero(np.diff(taken.indptr))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_key(seed, 0, "", "multivae baseline"))
            model = MultiVae(taken.shape[1], self.hidden, self.latent)
            optimiser = torch.optim.Adam(model.parameters(), lr=self.rate)
            rising = max(1.0, _RISING * self.epochs * -(-len(trained) // self.batch))
            step = 0
            for epoch in range(1, self.epochs + 1):
                with doing(f"epoch {epoch} of {self.epochs}"):
                    for users in torch.randperm(len(trained)).split(self.batch):
                        rows = torch.from_numpy(taken[trained[users.numpy()]].toarray())
                        mean, log_variance = model.encoded(rows)
                        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
                        optimiser.zero_grad()
                        beta = self.beta * min(1.0, step / rising)
                        loss(model.decoder(drawn), rows, mean, log_variance, beta).backward()
                        optimiser.step()
                        step += 1
        model.eval()

        def scores(users: Codes) -> Floats:
            with torch.no_grad():
                return model(torch.from_numpy(taken[users].toarray())).double().numpy()

        return scores
