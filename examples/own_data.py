"""A table of your own: six hospitals, and what if the biggest had wrong diagnoses? Which rule notices?

Prints the verdict over three seeds and draws accuracy over the rounds. Put your own table in place of `frame`.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer

from steelyard import Experiment, in_memory

frame = load_breast_cancer(as_frame=True).frame
draw = np.random.default_rng(1)
frame["hospital"] = draw.choice(
    ["north", "south", "east", "west", "hill", "lake"], len(frame), p=[0.4, 0.2, 0.15, 0.1, 0.1, 0.05]
)

experiment = Experiment(
    name="hospitals",
    data={"source": "memory", "normalise": "standard"},
    partition={"scheme": "natural", "server": "fraction", "server_fraction": 0.15, "server_report": "apart"},
    model={"name": "logistic"},
    training={"learning_rate": 0.1, "batch_size": 10},
    rounds={"count": 10, "fraction": 1.0},
    flaws=[{"kind": "labels-flipped", "clients": ["north"]}],  # what if? With data of your own, leave this out.
    weighing={"criteria": ["VP", "LE", "DS"], "priority": "VP>LE>DS", "normalise": "max"},
)
data = in_memory(frame, label="target", owner="hospital")
result = experiment.compare(["fedavg", "EQ", "recipe", "power(VP)^3"], seeds=3, dataset=data)
print(result)
print(result.comparison.tested().sentence)
result.plot("server").save("own_data.svg")
