"""A rule of your own against the field: trust clients that agree with the others, round after round.

Prints the verdict over three seeds and draws who counted under the new rule.
"""

import numpy as np

from steelyard import CohortView, Experiment, server_criterion


@server_criterion("STEADY", description="agrees with the others, averaged over rounds")
def steady(view: CohortView) -> np.ndarray:
    """The cosine of each update with the sum of all, half of it from earlier rounds."""
    lengths = np.sqrt(np.diag(view.gram)) + 1e-12
    whole = np.sqrt(view.gram.sum()) + 1e-12
    agreement = np.maximum(view.gram.sum(axis=1) / (lengths * whole), 0)
    past = view.memory.get("STEADY", {})
    now = {client: 0.5 * past.get(client, 0.0) + value for client, value in zip(view.clients, agreement, strict=True)}
    view.remember("STEADY", {**past, **now})
    return np.array([now[client] for client in view.clients])


experiment = Experiment.load("quickstart", ["rounds.count=10"])
result = experiment.compare(["STEADY", "fedavg", "EQ", "VP>LD>DS/max", "server-only"], seeds=3)
print(result)
print(result.comparison.tested().sentence)
result.plot("weights", rule="STEADY").save("own_rule.svg")
