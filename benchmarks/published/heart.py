"""FLamby's heart disease (Ogier du Terrail et al. 2022) as FLamby runs it: `python -m benchmarks.published.heart OUT`.

Four hospitals, FLamby's rows, 13 inputs standardised by each one's training rows, logistic regression, batches of 4,
100 updates a round, 15 rounds. A line of JSON a method goes to OUT/D.jsonl: accuracy after the last round, by hospital
and seed. Its published deviations are of five seeds; more seeds here say where the mean lies.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.kit import Kept, start
from steelyard import in_memory
from steelyard.data.dataset import Dataset
from steelyard.data.files import find
from steelyard.experiment.loading import build
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.experiment.running import run
from steelyard.runs.history import History

NUMBERS = ["age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"]
SERVER = "beta1=0.9,tau=1e-8"
METHODS = {
    "FedAvg": (0.001, "fedavg"),
    "FedProx": (0.001, "fedprox(mu=0.01)"),
    "SCAFFOLD": (0.001, "scaffold"),
    "FedAdam": (0.01, f"fedadam(server_rate=0.01,beta2=0.999,{SERVER})"),
    "FedYogi": (0.003162, f"fedyogi(server_rate=0.01,beta2=0.999,{SERVER})"),
    "FedAdagrad": (0.003162, f"fedadagrad(server_rate=0.316228,{SERVER})"),
}
"""Learning rate of the clients, and the rule, as FLamby tuned them."""


def patients() -> Dataset:
    """Return FLamby's 740 rows with its 13 inputs: categories less their first level, scaled hospital by hospital."""
    path = find(Path("heart_disease"), "the heart disease of four hospitals") / "heart_disease.csv"
    table: Any = pd.read_csv(path)
    table = table[table["flamby"].isin(["train", "test"])].reset_index(drop=True)
    inputs: Any = pd.get_dummies(
        table[[*NUMBERS, "cp", "restecg"]], columns=["cp", "restecg"], drop_first=True, dtype=float
    )
    test = (table["flamby"] == "test").to_numpy()
    for hospital in table["hospital"].unique():
        mine = (table["hospital"] == hospital).to_numpy()
        known = inputs[mine & ~test]
        deviation = known.std().replace(0.0, 1.0).fillna(1.0)
        inputs.loc[mine] = (inputs[mine] - known.mean()) / deviation
    ill = (table["target"] > 0).to_numpy().astype(np.int64)
    return in_memory(inputs.to_numpy(np.float32), ill, table["hospital"].to_numpy(str), held_out=test, name="heart")


def measure(method: str, seeds: int, rounds: int) -> dict[str, object]:
    """Run one method with all seeds and return its accuracies."""
    rate, rule = METHODS[method]
    document = {
        "name": "heart",
        "seed": 42,
        "data": {"source": "memory"},
        "partition": {"scheme": "given", "test": "held-out", "minimum": 1},
        "model": {"name": "logistic", "outputs": 1},
        "training": {"learning_rate": rate, "updates": 100, "batch_size": 4},
        "rounds": {"count": rounds, "fraction": 1.0},
        "weighing": {"criteria": ["DS"]},
        "store": {"checkpoint_every": 1000},
    }
    experiment = with_rules(build(document), [rule])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = run(experiment, out=Path(folder) / "run", seeds=seeds_of(experiment, seeds), dataset=patients())
        tests: Any = History(done).evaluations
    last = tests[tests["round"] == tests["round"].max()]
    found = {str(name): rows.sort_values("seed")["score"].round(5).tolist() for name, rows in last.groupby("client")}
    return {"table": "D", "method": method, "accuracy": found, "seconds": round(time.monotonic() - begun, 1)}


def main(out: Path, seeds: int = 20, rounds: int = 15) -> None:
    """Run the methods one after another."""
    kept = Kept(out / "D.jsonl")
    kept.path.unlink(missing_ok=True)
    for method in METHODS:
        kept.add(measure(method, seeds, rounds))


if __name__ == "__main__":
    start(main)
