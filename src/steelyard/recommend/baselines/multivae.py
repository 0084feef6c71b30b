"""MultiVAE: an autoencoder of whole users, with noise in its middle.

A user's items x (divided by their length) become the mean μ and the variance σ² of a normal z; z becomes a share of
attention π(z) for each item. Trained to raise

    Σ_i x_i ln π_i(z) − β · KL(N(μ, σ²) ‖ N(0, 1))        KL = ½ Σ (μ² + σ² − ln σ² − 1)

with z drawn, half of the inputs left out at random, and β rising from 0 over the first fifth of the steps: D. Liang, R.
G. Krishnan, M. D. Hoffman, T. Jebara, *Variational Autoencoders for Collaborative Filtering*, WWW 2018.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from steelyard.base.logs import doing
from steelyard.base.randomness import stream_key
from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats

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


def vae(
    train: Interactions,
    seed: int = 1,
    hidden: int = 600,
    latent: int = 200,
    epochs: int = 50,
    batch: int = 100,
    rate: float = 0.001,
    beta: float = 0.2,
) -> Scores:
    """MultiVAE; use it as the thesis' row VAE (Tables 4.2, 4.3) or MultiVAE (Table 6.1)."""
    taken = matrix(train)
    trained = np.flatnonzero(np.diff(taken.indptr))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key(seed, 0, "", "multivae baseline"))
        model = MultiVae(taken.shape[1], hidden, latent)
        optimiser = torch.optim.Adam(model.parameters(), lr=rate)
        rising = max(1.0, _RISING * epochs * -(-len(trained) // batch))
        step = 0
        for epoch in range(1, epochs + 1):
            with doing(f"epoch {epoch} of {epochs}"):
                for users in torch.randperm(len(trained)).split(batch):
                    rows = torch.from_numpy(taken[trained[users.numpy()]].toarray())
                    mean, log_variance = model.encoded(rows)
                    drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
                    optimiser.zero_grad()
                    loss(model.decoder(drawn), rows, mean, log_variance, beta * min(1.0, step / rising)).backward()
                    optimiser.step()
                    step += 1
    model.eval()

    def scores(users: Codes) -> Floats:
        with torch.no_grad():
            return model(torch.from_numpy(taken[users].toarray())).double().numpy()

    return scores
