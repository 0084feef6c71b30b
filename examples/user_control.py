"""Users who decide what they share: FPL on a small shop, with each user's own π, and what a curious server reads."""

from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from steelyard import Experiment
from steelyard.experiment.recommend_audit import watch
from steelyard.report.recommender import open_run

# Sixty users of two tastes; every third keeps all her likes to herself, the others share half of them.
chance = np.random.default_rng(0)
folder = Path(mkdtemp())
lines = ["user\titem\ttime\tpi"]
for user in range(60):
    taste = np.arange(30) + 30 * (user % 2)
    for time, item in enumerate(chance.choice(taste, size=15, replace=False)):
        lines.append(f"u{user:02d}\titem-{item:02d}\t{time}\t{0.0 if user % 3 == 0 else 0.5}")
(folder / "likes.tsv").write_text("\n".join(lines) + "\n")
(folder / "shop.toml").write_text(
    """
kind = "recommend"
name = "shop"
seed = 1
[interactions]
path = "likes.tsv"
pi_column = "pi"
[fpl]
mode = "pFPL+"
factors = 8
learning_rate = 0.1
mask = "persistent"
[rounds]
epochs = 20
evaluate_every = 5
""".replace("likes.tsv", (folder / "likes.tsv").as_posix())
)

experiment = Experiment.load(folder / "shop.toml")
result = experiment.run(folder / "run")
measured = result.history.rounds[["round", "accuracy"]].dropna()
print("accuracy of a recommender is nDCG@10, the mean over users:")
print(measured.to_string(index=False))
for row in open_run(folder / "run").top("u00", 3):
    print(f"u00, rank {row['rank']}: {row['title']}{' (taken later)' if row['in_test'] else ''}")
for seen in watch(experiment, [1, 20]):  # type: ignore[arg-type]
    print(f"after {seen['round']} rounds the server has read {seen['sign']['recall']:.0%} of all likes")
