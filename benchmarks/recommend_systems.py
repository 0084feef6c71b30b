"""One system on one data set: trained, looked at after the epochs asked for, and written down as a line of JSON.

A task is a plain dictionary: data, use ("validation", "test", "newest"), system, settings, seed, and the epochs after
which to look.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

# Many processes at once: each computes on one core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.fpl_compiled import CompiledFpl
from benchmarks.recommend_data import Data, load, scratch
from steelyard.recommend.baselines import BASELINES
from steelyard.recommend.fpl import MODES, EpochKind, Learning
from steelyard.recommend.judging import Judge
from steelyard.recommend.lists import Scores, best_unseen
from steelyard.recommend.metrics import bias_disparity, measure
from steelyard.recommend.ranking import View
from steelyard.recommend.sampled import Sampled

CUTOFF = 10
UPDATED = (1, 10, 100, 500, 1000)
SHOWN = (1, 10, 50, 100, 250)
Task = dict[str, Any]
Line = dict[str, Any]


def key(task: Task) -> str:
    """Return what names a task, so that a finished one is not done again."""
    settings = ",".join(f"{name}={value}" for name, value in sorted(task["settings"].items()))
    epochs = "-".join(map(str, task.get("epochs", ())))
    return f"{task['data']}/{task['use']}/{task['system']}/{settings}/{task['seed']}/{epochs}"


def perform(task: Task) -> list[Line]:
    """Do a task; one line per epoch looked at, or one in all."""
    import torch

    torch.set_num_threads(1)
    begun = time.perf_counter()
    data = load(task["data"], task["use"])
    lines: list[Line] = []
    for epoch, scores, more in _trained(task, data):
        lists, _ = best_unseen(data.histories, scores, CUTOFF)
        view = data.ground.view(lists, CUTOFF)
        found = more | (figures(view) if task["use"] == "test" else _plain(view))
        if task["use"] == "newest":
            among = Judge(data.users, CUTOFF, sampled=Sampled()).measure(scores)
            found |= {f"sampled_{name}": float(values.mean()) for name, values in among.items()}
        stamp = {"task": key(task), "epoch": epoch, "seconds": round(time.perf_counter() - begun, 2)}
        lines.append({name: task[name] for name in ("data", "use", "system", "settings", "seed")} | stamp | found)
    return lines


def _trained(task: Task, data: Data) -> Iterator[tuple[int | None, Scores, Line]]:
    """Give the scores after each epoch that is asked for, with what else is known of the run."""
    settings, seed = dict(task["settings"]), int(task["seed"])
    if "rounds" in settings:  # FCF's own number of epochs; a task's are those after which to look
        settings["epochs"] = settings.pop("rounds")
    if task["system"] not in MODES and task["system"] != "bpr-mf":
        yield None, BASELINES[task["system"]](data.split.train, seed=seed, **settings), {}
        return
    central = task["system"] == "bpr-mf"
    mode = MODES["sFPL" if central else task["system"]]
    counted = cast(EpochKind, settings.get("epoch", "formula"))
    run = CompiledFpl(
        data.histories,
        mode.schedule(data.histories.users, data.histories.total, counted),
        Learning(settings["rate"], settings["factors"]),
        share=settings.get("pi", 1.0),
        seed=seed,
        folder=scratch(),
        bias_spread=settings.get("bias_spread", 0.0),
        central=central,
    )
    for epoch in range(1, max(task["epochs"]) + 1):
        run.epoch()
        if epoch in task["epochs"]:
            yield epoch, cast(Callable[..., Any], run.scores), {} if central else _sent(run, settings, counted, mode)


def _sent(run: CompiledFpl, settings: Line, counted: EpochKind, mode: Any) -> Line:
    """Return TCC so far by the thesis' formula, and how the updates sent are spread over items (Figure 4.4)."""
    sizes = (run.histories.users, run.histories.catalogue, run.histories.total)
    cost = mode.cost_per_epoch(*sizes, settings.get("pi", 1.0), counted)
    updates = np.sort(run.updates)[::-1]
    spread = {str(k): round(float(updates[k - 1] / updates.sum()), 8) for k in UPDATED if k <= len(updates)}
    return {"tcc": cost * run.epochs, "updates": spread}


def figures(view: View) -> Line:
    """Return the metrics of a view, hits by user, bias disparity of the largest categories and the popularity curve."""
    found = _plain(view)
    if view.ground.categories:
        bias = bias_disparity(view)
        size = np.bincount(view.ground.member_category, minlength=len(bias.categories))
        largest = np.argsort(-size, kind="stable")[:10]
        found["bias"] = {bias.categories[i]: round(float(bias.disparity[i]), 3) for i in largest}
    shown = np.sort(view.times_shown)[::-1]
    found["shown"] = {str(k): round(float(shown[:k].sum() / max(shown.sum(), 1)), 4) for k in SHOWN}
    # One character per user with a test item, 0 to 9 and a for ten: enough for paired tests of P@10.
    found["hits"] = "".join("0123456789a"[count] for count in view.hit_counts[view.judged].tolist())
    return found


def _plain(view: View) -> Line:
    return {name: float(f"{value:.6g}") for name, value in measure(view).items()}
