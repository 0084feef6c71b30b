"""KGFlex on MovieLens 1M with features of one and two hops: seconds of an epoch and of ranking all users, peak memory.

    python -m benchmarks.kgflex --format json

An epoch is whole rounds of the loop (draw, local passes, admit, weigh, combine) without evaluation, as many triples as
there are training interactions; ranking gives every user her ten best of all unseen items. The last line is one JSON
document.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import replace
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks.kit import Format, machine, peak_mb, start, timed
from steelyard.experiment.loading import load
from steelyard.experiment.parts import federations_of, plan_of
from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend.kgflex.clients import KgflexClients
from steelyard.rounds.loop import one_round


def measured(recipe: str, epochs: int, threads: int) -> dict[str, Any]:
    """Run some epochs and a ranking, and return their seconds."""
    experiment = load(recipe, [f"fpl.threads={threads}"])
    assert isinstance(experiment, RecommendDescription)
    begun = time.perf_counter()
    clients, server = experiment.assemble()
    assert isinstance(clients, KgflexClients)
    read = time.perf_counter() - begun
    begun = time.perf_counter()
    selection = clients.knowledge(experiment.seed).selection
    selected = time.perf_counter() - begun
    federation = federations_of(experiment)[0]
    states = {federation.name: federation.start(server)}
    # The loop tests the model in rounds that evaluate_every names and in its last: here it shall do neither.
    plan = replace(plan_of(experiment), rounds=1 << 30, evaluate_every=1 << 30)
    seconds: list[float] = []
    each, round = experiment.schedule().rounds_per_epoch, 0
    for _ in range(epochs):
        begun = time.perf_counter()
        for _ in range(each):
            round += 1
            one_round([federation], states, clients, server, plan, round)
        seconds.append(time.perf_counter() - begun)
    model = states[federation.name].parameters
    ranked = timed(lambda: clients.lists(federation.name, experiment.seed, model, 10)).clock
    return {
        "recipe": recipe,
        "users": selection.users,
        "features": str(clients.parts.features),
        "features_per_user": round_to(selection.sizes.mean()),
        "reading_seconds": round_to(read),
        "selection_seconds": round_to(selected),
        "epoch_seconds": round_to(statistics.median(seconds)),
        "ranking_seconds": round_to(ranked),
        "peak_gigabytes": round_to(peak_mb() / 1024),
        "threads": threads,
        "machine": machine(),
    }


def round_to(value: float) -> float:
    """Round to what can be read off a clock."""
    return round(float(value), 2)


def main(recipe: str = "kgflex-ml1m", epochs: int = 3, threads: int = 2, format: Format = "text") -> None:
    """Measure and print."""
    found = measured(recipe, epochs, threads)
    if format == "text":
        for name, value in found.items():
            print(f"{name:<22}{value}")
    print(json.dumps(found))


if __name__ == "__main__":
    start(main)
