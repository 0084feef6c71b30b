"""Low-rank adapters on a small transformer: eight clients that each know a few tasks, adapters weighed as products.

Made here without downloads: the transformer is trained once on other rows, frozen, and the clients train LoRA alone.
Prints the accuracy with averaged factors and with FlexLoRA, and what either loses of the weighted sum of the adapters.
"""

import copy
import functools

import numpy as np
import torch
from torch import nn

from steelyard import Experiment, in_memory

TOKENS, LENGTH, CLASSES, RANK = 16, 12, 4, 4


class Adapted(nn.Module):
    """A frozen dense layer and a thin product beside it, named as PEFT names them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.lora_A.T @ self.lora_B.T


class Transformer(nn.Module):
    """Tokens and places, one block of attention, one dense layer on the mean."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, wide)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, wide))
        self.inputs, self.up, self.down = nn.Linear(wide, 3 * wide), nn.Linear(wide, 64), nn.Linear(64, wide)
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places
        query, key, value = self.inputs(x).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head((x + self.down(nn.functional.gelu(self.up(x)))).mean(dim=1))


def rows(count: int, shift: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens; the class is that of the commonest quarter of the alphabet, which `shift` turns round."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, CLASSES, count)
    often = (4 * labels[:, None] + chance.integers(0, 4, (count, LENGTH)) + shift) % TOKENS
    anything = chance.integers(0, TOKENS, (count, LENGTH))
    return np.where(chance.random((count, LENGTH)) < 0.45, often, anything), labels


@functools.cache
def pretrained() -> Transformer:
    """The transformer, trained on rows of another alphabet than the clients'."""
    torch.manual_seed(1)
    model, (x, y) = Transformer(), (torch.from_numpy(part) for part in rows(1_000, 0, 1))
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


def network() -> nn.Module:
    """The frozen transformer with adapters on its dense layers, and a head that is trained as well."""
    model = copy.deepcopy(pretrained())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in ("inputs", "up", "down"):
        setattr(model, name, Adapted(getattr(model, name)))
    model.head.requires_grad_(True)
    return model


if __name__ == "__main__":
    x, y = rows(1_600, 6, 2)
    # Each client has rows of two classes alone, so that their adapters differ.
    owners = np.array([f"client-{label // 2 * 4 + place % 4}" for place, label in enumerate(y)])
    experiment = Experiment(
        name="lora",
        data={"source": "memory"},
        partition={"scheme": "natural", "server": "fraction", "server_report": "apart"},
        model={"name": network},
        training={"optimiser": "adam", "learning_rate": 0.01, "batch_size": 20, "epochs": 2},
        rounds={"count": 6},
    )
    data = in_memory(x, y, owners, classes=CLASSES, tokens=True)
    for algorithm in ("fedavg", "flexlora"):
        result = experiment.changed({"algorithm.name": algorithm}).run(dataset=data)
        figures = {name: value.mean for name, value in result.comparison.rules[0].figures.items()}
        print(f"{algorithm}: accuracy {figures['server_accuracy']:.1%} on the server's test set")
        if "product_error" in figures:
            print(f"lost of the products' sum: {figures['product_error']:.1%}; by averages of A and of B: "
                  f"{figures['factor_error']:.1%}")  # fmt: skip
    result.report("lora.html")
    result.plot("adapters").save("lora.svg")
