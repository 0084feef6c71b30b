"""One small hospital sends its update a thousand times too large: what plain averaging does, and what holds it.

A consortium reported it of its own federation (MediSwarm, issue 566): with 0.6 % of the rows and an update × 1,000 an
attacker moves the model 5.5 times as far as the whole way to its target. Here with digits: five hospitals, and a
sixth with 8 of 1,455 rows that wants every digit read as the next one. One round, the same updates under every rule.
"""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits

from steelyard.adapters import Reply, ServerRows, WeighedRounds

SIZES = {"aachen": 500, "bonn": 387, "cologne": 280, "dresden": 180, "essen": 100, "attacker": 8}
STRENGTH = 1000
RULES = ["DS", "capped(DS;max_shares=2)", "MD>DS/max", "power(VP)^3", "clip(DS)", "median(DS)", "multi-krum(DS)"]


def train(network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the network's arrays after some steps on all rows; the network itself stays as it is."""
    copy = torch.nn.Linear(64, 10)
    copy.load_state_dict(network.state_dict())
    steps = torch.optim.SGD(copy.parameters(), lr=0.5)
    for _ in range(40):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(copy(x), y).backward()
        steps.step()
    return {name: value.numpy().copy() for name, value in copy.state_dict().items()}


def flat(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


def main() -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target[order])
    torch.manual_seed(0)
    network = torch.nn.Linear(64, 10)
    sent = {name: value.numpy().copy() for name, value in network.state_dict().items()}

    replies, begin = [], 0
    for name, size in SIZES.items():
        rows, begin = slice(begin, begin + size), begin + size
        arrays = train(network, x[rows], y[rows])
        if name == "attacker":
            target = train(network, x[:begin], (y[:begin] + 1) % 10)
            arrays = {key: sent[key] + STRENGTH * (target[key] - sent[key]) for key in sent}
        replies.append(Reply(name, arrays, size))
    way = flat(target) - flat(sent)
    rows, test = slice(begin, begin + 60), slice(begin + 60, None)

    print(
        f"the attacker has {SIZES['attacker'] / sum(SIZES.values()):.2%} of the rows and sends its update × {STRENGTH}"
    )
    print(f"{'rule':<26}{'its weight':>11}{'moved, in ways to its target':>30}{'accuracy':>10}")
    table = []
    for rule in RULES:
        weighing = WeighedRounds(rule, ServerRows(network, x[rows], y[rows]))
        found = weighing.combine(sent, replies)
        moved = np.linalg.norm(flat(found.arrays) - flat(sent)) / np.linalg.norm(way)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in found.arrays.items()})
        accuracy = float((network(x[test]).argmax(1) == y[test]).float().mean())
        network.load_state_dict({name: torch.from_numpy(array) for name, array in sent.items()})
        print(f"{rule:<26}{found.weights.get('attacker', 0.0):>11.2%}{moved:>30.2f}{accuracy:>10.1%}")
        table.append({"rule": rule, "moved": float(moved)})
    bars = alt.Chart(pd.DataFrame(table)).mark_bar()
    bars = bars.encode(
        alt.X("moved").title("how far the model moved; 1: to the attacker's target"), alt.Y("rule", sort=None)
    )
    bars.properties(width=420, height=220).save("poisoned_update.svg")


if __name__ == "__main__":
    main()
