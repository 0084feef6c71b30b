"""Users who decide what they share: a small shop, half of each user's likes sent, and what a curious server reads.

Prints the ranking quality over the rounds and one user's list, and draws what the server knows after some rounds.
"""

from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from steelyard import Experiment
from steelyard.experiment.run_audits import watch

# Sixty users of two tastes, fifteen likes each.
draw = np.random.default_rng(0)
likes = pd.DataFrame(
    {"user": f"u{user:02d}", "item": f"item-{item:02d}", "time": time}
    for user in range(60)
    for time, item in enumerate(draw.choice(np.arange(30) + 30 * (user % 2), size=15, replace=False))
)
likes.to_csv("likes.tsv", sep="\t", index=False)
Path("shop.toml").write_text("""
kind = "recommend"
name = "shop"
[interactions]
path = "likes.tsv"
[fpl]
mode = "pFPL+"
factors = 8
learning_rate = 0.1
pi = 0.5
mask = "persistent"
[rounds]
epochs = 20
evaluate_every = 5
""")

experiment = Experiment.load("shop.toml")
result = experiment.run()
print("accuracy of a recommender is nDCG@10, the mean over users:")
print(result.history.rounds[["round", "accuracy"]].dropna().to_string(index=False))
for row in result.recommender(user="u00").list(cutoff=3).items:
    print(f"u00, rank {row.rank}: {row.title}")

protections = {
    "everything sent": {"fpl.pi": 1.0, "fpl.mask": "round"},
    "half, drawn each round": {"fpl.pi": 0.5, "fpl.mask": "round"},
    "half, once for all": {"fpl.pi": 0.5, "fpl.mask": "persistent"},
}
rows = [
    {"protection": name, "round": seen.round, "read": seen.sign.recall}
    for name, fields in protections.items()
    for seen in watch(experiment.changed(fields), [1, 2, 5, 10, 20])
]
chart = alt.Chart(pd.DataFrame(rows)).mark_line(point=True)
chart = chart.encode(
    alt.X("round"), alt.Y("read").axis(format="%").title("likes that the server knows"), alt.Color("protection")
)
chart.properties(width=420, height=260).save("recommender.svg")
