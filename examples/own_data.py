"""Tensors of one's own: twenty sensors, each with its own drift, two classes."""

import numpy as np

from steelyard import Experiment, in_memory

chance = np.random.default_rng(0)
owners = np.repeat(np.arange(20), 60)
labels = chance.integers(0, 2, len(owners))
features = chance.normal(size=(len(owners), 6)) + labels[:, None] + 0.3 * owners[:, None] / 20

experiment = Experiment.model_validate(
    {
        "name": "sensors",
        "data": {"source": "memory"},
        "partition": {"scheme": "natural"},
        "model": {"name": "logistic"},
        "training": {"learning_rate": 0.1, "epochs": 2, "batch_size": 20},
        "rounds": {"count": 10, "fraction": 0.5},
        "weighing": {"criteria": ["CB", "DS", "MD"], "priority": "CB>MD>DS"},
        "beside": {"fedavg": {"criteria": ["DS"]}},
    }
)
result = experiment.run(dataset=in_memory(features, labels, owners))
for rule in result.summary["rules"]:
    print(f"{rule['rule']:>9}: accuracy {rule['accuracy']:.1%}")
