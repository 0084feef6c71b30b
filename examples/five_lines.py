"""The shortest run: load a recipe, run it, look at the history."""

from steelyard import Experiment

result = Experiment.load("quickstart", ["rounds.count=10"]).run()
print(result.history.rounds[["rule", "round", "accuracy"]].tail(4))
print(result.history.clients[["rule", "round", "client", "raw_LD", "score", "weight"]].tail(4))
