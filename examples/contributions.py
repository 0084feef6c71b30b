"""Who contributed what: four hospitals, and the third one has entered every diagnosis the wrong way round.

Prints the accuracy and draws what each hospital added to the model, with intervals.
"""

from steelyard import Experiment

experiment = Experiment.load("hospitals", ["rounds.count=10", "training.learning_rate=0.02"]).changed(
    {
        "flaws": [{"kind": "labels-flipped", "clients": ["switzerland"], "amount": 1.0}],
        "contributions": {"measure": "loss", "method": "shapley"},
    }
)
result = experiment.run()
print(result)
result.plot("contributions").save("contributions.svg")
print("the values as a table: steelyard contributions", result.folder)
