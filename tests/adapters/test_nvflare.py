"""NVFlare's aggregator that weighs: bad answers left out, types kept, the real simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.kit import assert_refused
from tests.warm import ROOT, warm_script

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

import steelyard
from steelyard.nvflare import ServerRows, WeighedAggregator
from steelyard.runs.glance import glance
from steelyard.runs.reader import History

SENT: dict[str, Any] = {"w": np.zeros((2, 3), dtype=np.float32), "b": np.zeros(2, dtype=np.float32)}


def model(value: float, **changed: Any) -> dict[str, Any]:
    return {"w": np.full((2, 3), value, np.float32), "b": np.full(2, value, np.float32), **changed}


def answer(client: str, params: Any, steps: Any = 10, metrics: Any = None, kind: str = "FULL", **meta: Any) -> FLModel:
    """What the controller hands to an aggregator."""
    steps = {} if steps is None else {"NUM_STEPS_CURRENT_ROUND": steps}
    return FLModel(ParamsType(kind), params, metrics=metrics, meta={"client_name": client, **steps, **meta})


def send(aggregator: WeighedAggregator, sent: Mapping[str, Any] = SENT) -> FLContext:
    """Begin a round as NVFlare's controllers do."""
    aggregator.reset_stats()
    context = FLContext()
    task = DXO(DataKind.WEIGHTS, dict(sent)).to_shareable()
    context.set_prop(AppConstants.TRAIN_SHAREABLE, task, private=True, sticky=False)
    aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, context)
    return context


def aggregated(aggregator: WeighedAggregator, answers: Sequence[FLModel], sent: Mapping[str, Any] = SENT) -> FLModel:
    send(aggregator, sent)
    for each in answers:
        aggregator.accept_model(each)
    return aggregator.aggregate_model()


@pytest.mark.parametrize("kind", ["FULL", "DIFF"])
def test_by_size_it_is_nvflares_own_average(kind: str) -> None:
    answers = [answer(c, model(i), n, {"loss": i}, kind) for c, i, n in (("a", 1, 30), ("b", 2, 10), ("c", 5, 7))]
    sent = model(4.0)
    ours, theirs = aggregated(WeighedAggregator("DS"), answers, sent), BaseFedAvg.aggregate_fn(answers)
    assert ours.params_type == theirs.params_type
    assert ours.metrics == pytest.approx(theirs.metrics)
    for name, array in theirs.params.items():
        assert ours.params[name] == pytest.approx(array, abs=1e-6)


def test_a_criterion_may_stand_in_the_meta_and_another_key_may_hold_the_size() -> None:
    aggregator = WeighedAggregator("LD>DS", size="rows")
    aggregated(aggregator, [answer(c, model(1), None, rows=n, LD=d) for c, n, d in (("a", 30, 2), ("b", 10, 9))])
    expected = steelyard.weigh({"a": {"LD": 2, "DS": 30}, "b": {"LD": 9, "DS": 10}}, "LD>DS").weights
    assert list(aggregator.rounds[0].weights.values()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("params", "steps", "metrics", "reason"),
    [
        (model(1), 10, {"q": "much"}, "criterion q"),
        (model(1), None, {"q": 1}, "meta NUM_STEPS_CURRENT_ROUND is missing"),
        (model(1), "many", {"q": 1}, "samples = nan"),
        (model(1, b=[[1], [1, 2]]), 9, {"q": 1}, "array b cannot be read"),
        ([1.0], 10, {"q": 1}, "sent no arrays by name"),
    ],
)
def test_an_answer_that_cannot_be_weighed_is_left_out(params: Any, steps: Any, metrics: Any, reason: str) -> None:
    aggregator = WeighedAggregator("q>DS", metrics=["q"])
    good = [answer("a", model(1), 10, {"q": 1.0}), answer("c", model(3), 10, {"q": torch.tensor([1.0])})]
    found = aggregated(aggregator, [good[0], answer("b", params, steps, metrics), good[1]])
    assert found.params["w"][0, 0] == pytest.approx(2.0)
    assert found.metrics == {"q": 1.0}
    assert list(aggregator.rounds[0].reasons) == ["b"]
    assert aggregator.rounds[0].reasons["b"].startswith(reason)


def test_nothing_to_weigh_keeps_the_model() -> None:
    aggregator = WeighedAggregator("DS")
    sent = model(7.0)
    found = aggregated(aggregator, [answer("a", model(np.nan)), answer("b", model(np.inf))], sent)
    assert found.params_type == ParamsType.FULL
    assert (found.params["w"] == 7).all()
    assert set(aggregator.rounds[0].reasons) == {"a", "b"}


def test_rounds_do_not_leak_into_one_another() -> None:
    aggregator = WeighedAggregator("DS")
    aggregated(aggregator, [answer("a", model(1)), answer("b", model(5))])
    send(aggregator)
    aggregator.accept_model(answer("a", model(9)))
    found = aggregated(aggregator, [answer("b", model(2))])
    assert found.params["w"][0, 0] == pytest.approx(2.0)
    assert [list(each.weights) for each in aggregator.rounds] == [["a", "b"], ["b"]]


def test_tensors_come_back_as_tensors_of_their_type() -> None:
    sent = {
        "w": torch.zeros(3, dtype=torch.bfloat16),
        "d": torch.zeros(2, dtype=torch.float64),
        "seen": torch.tensor(7),
        "plain": np.zeros(2, np.float16),
    }
    answers = [
        answer(
            c,
            {
                "w": torch.full((3,), v, dtype=torch.bfloat16),
                "d": torch.full((2,), v, dtype=torch.float64),
                "seen": torch.tensor(n),
                "plain": np.full(2, v, np.float16),
            },
            s,
        )
        for c, v, n, s in (("a", 1.0, 2**40, 1), ("b", 2.0, 2**40 + 4, 3))
    ]
    found = aggregated(WeighedAggregator("DS"), answers, sent).params
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in sent.items()}
    assert int(found["seen"]) == 2**40 + 3
    assert found["d"].tolist() == [1.75, 1.75]
    assert found["w"].tolist() == [1.75] * 3


def test_many_small_steps_in_bfloat16_are_not_lost_in_the_sum() -> None:
    """Summed in bfloat16, 256 + 1/50 of each of fifty would stay 256; in float32 the mean is 257."""
    sent = {"w": torch.full((2,), 256.0, dtype=torch.bfloat16)}
    answers = [
        answer(f"c{i:02}", {"w": torch.full((2,), 256.0 + 2 * (i % 2), dtype=torch.bfloat16)}) for i in range(50)
    ]
    found = aggregated(WeighedAggregator("EQ"), answers, sent).params["w"]
    assert found.tolist() == torch.tensor([257.0, 257.0]).to(torch.bfloat16).tolist()


def test_scatter_and_gather_knows_clients_by_their_authenticated_name() -> None:
    aggregator = WeighedAggregator("DS")
    context = send(aggregator)
    aggregator.reset(context)
    send(aggregator)
    for client, value in (("site-1", 1.0), ("site-2", 3.0)):
        share = DXO(DataKind.WEIGHTS, model(value), {"NUM_STEPS_CURRENT_ROUND": 5, "client_name": "x"}).to_shareable()
        share.set_peer_props({ReservedKey.IDENTITY_NAME: client})
        assert aggregator.accept(share, context)
    found = aggregator.aggregate(context)
    assert set(aggregator.rounds[0].weights) == {"site-1", "site-2"}
    assert found["DXO"]["data"]["w"][0, 0] == pytest.approx(2.0)


def test_what_cannot_work_is_refused() -> None:
    assert_refused(lambda: WeighedAggregator("VP>DS"), "VP", "no rows were given")
    assert_refused(lambda: WeighedAggregator(7), "rule", "int")  # type: ignore[arg-type]
    assert_refused(lambda: WeighedAggregator("DS").accept_model(answer("a", model(1))), "aggregator", "not seen")


@pytest.mark.parametrize("kind", ["FULL", "DIFF"])
def test_a_job_leaves_a_run_folder_that_is_read_as_any_other(kind: str, tmp_path: Path) -> None:
    """Metrics are clients' tests of the model that they got: those of a round belong to the round before."""
    aggregator = WeighedAggregator("DS", folder=str(tmp_path / "run"))
    base = SENT
    for number in (1, 2, 3):
        answers = [
            answer(c, model(v), n, {"accuracy": 0.1 * number * v}, kind) for c, v, n in (("a", 1, 10), ("b", 3, 30))
        ]
        found = aggregated(aggregator, [*answers, answer("c", model(np.nan), kind=kind)], base)
        base = found.params if kind == "FULL" else {name: base[name] + array for name, array in found.params.items()}
    aggregator.handle_event(EventType.END_RUN, FLContext())
    history = History(tmp_path / "run")
    table = history.clients[history.clients["round"] == 3].set_index("client")
    assert table["weight"].dropna().to_dict() == pytest.approx(aggregator.rounds[2].weights, abs=1e-15)
    assert set(history.failures_after(2)["client"]) == {"c"}
    assert history.rounds["accuracy"].iloc[1:3].tolist() == pytest.approx([0.4, 0.6])
    assert (history.chain.round, history.chain.problem) == (3, "")
    assert glance(tmp_path, "run").state == "finished"
    assert all(each.arrays is None for each in aggregator.rounds)


def test_a_job_that_fails_leaves_a_folder_that_says_so_and_can_go_on(tmp_path: Path) -> None:
    aggregator = WeighedAggregator("AG>DS", folder=str(tmp_path / "run"))
    answers = [answer(c, model(v), n) for c, v, n in (("a", 1, 10), ("b", 3, 30))]
    aggregated(aggregator, answers)
    context = FLContext()
    context.set_prop(FLContextKey.EVENT_DATA, "the disk is full", private=True, sticky=False)
    aggregator.handle_event(EventType.FATAL_SYSTEM_ERROR, context)
    aggregator.handle_event(EventType.END_RUN, FLContext())
    assert glance(tmp_path, "run").state == "stopped"
    assert "the disk is full" in History(tmp_path / "run").info["stopped"]
    again = WeighedAggregator("AG>DS", folder=str(tmp_path / "run"))
    aggregated(again, answers)
    again.handle_event(EventType.END_RUN, FLContext())
    assert History(tmp_path / "run").last_round == 2


class Rows(ServerRows):
    """Rows that a job can write down."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(torch.nn.Linear(2, 2), np.zeros((count, 2), np.float32), [0] * count)


def test_a_recipe_writes_it_into_a_job(tmp_path: Path) -> None:
    """What NVFlare writes is what was asked for, and no file of ours but this one component is copied."""
    (tmp_path / "client.py").write_text("")
    aggregator = WeighedAggregator("VP>q/max", rows=Rows(3), metrics=["q"], temporary="/data/spill")
    recipe = FedAvgRecipe(
        name="job",
        model={"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 2}},
        min_clients=2,
        train_script=str(tmp_path / "client.py"),
        aggregator=aggregator,
    )
    recipe.export(str(tmp_path / "jobs"))
    (config,) = (tmp_path / "jobs").rglob("config_fed_server.json")
    (workflow,) = json.loads(config.read_text())["workflows"]
    written = workflow["args"]["aggregator"]
    assert written["path"] == "steelyard.nvflare.WeighedAggregator"
    assert written["args"]["rows"].pop("path").endswith(".Rows")
    assert written["args"] == {
        "rule": "VP>q/max",
        "rows": {"args": {"count": 3}},
        "metrics": ["q"],
        "temporary": "/data/spill",
    }
    copied = {path.name for path in (tmp_path / "jobs").rglob("custom/steelyard/**/*.py")}
    assert copied <= {"nvflare.py"}


def test_without_nvflare_one_line_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.modules['nvflare'] = None\nimport steelyard.nvflare\n")
    ended = warm_script(script, folder=tmp_path, fresh=True)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.endswith("pip install 'steelyard[nvflare]'")


SIZES = (450, 450, 100, 100, 100, 100)
"""Of the simulator's clients: the first two label each digit as the next; where we weigh, the last one sends NaN."""


def write_parts(path: Path) -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.data[order] / 16, digits.target[order]
    parts = {"server_x": x[1300:1360], "server_y": y[1300:1360], "test_x": x[1360:], "test_y": y[1360:]}
    ends = np.cumsum(SIZES)
    for client, (begin, end) in enumerate(zip(ends - SIZES, ends, strict=True), 1):
        parts |= {f"x{client}": x[begin:end], f"y{client}": (y[begin:end] + (client <= 2)) % 10}
    np.savez(path, **parts)


def run(folder: Path, rule: str, transfer: str = "FULL") -> tuple[float, str]:
    """Run the job; return the accuracy of its last model on clean rows, and what the server logged."""
    folder.mkdir()
    write_parts(folder / "parts.npz")
    job = Path(__file__).parent / "nvflare_job" / "job.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(job), str(folder), rule, transfer]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=job.parent)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    (saved,) = folder.rglob("server.npy")
    model = np.load(saved)
    with np.load(folder / "parts.npz") as parts:
        scores = parts["test_x"] @ model[:, :64].T + model[:, 64]
        return float((scores.argmax(1) == parts["test_y"]).mean()), said


@pytest.mark.slow
def test_plain_averaging_follows_the_biggest(tmp_path: Path) -> None:
    accuracy, _ = run(tmp_path / "plain", "")
    assert accuracy < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["FULL", "DIFF"])
def test_weighed_by_the_servers_rows_it_learns(tmp_path: Path, transfer: str) -> None:
    accuracy, said = run(tmp_path / transfer, "power(VP)^3", transfer)
    assert accuracy > 0.85
    assert said.count("left out site-6: model holds NaN or infinity") == 3
    assert "weights by power(VP)^3" in said
    history = History(tmp_path / transfer / "run")
    assert (history.last_round, history.chain.problem) == (3, "")
    weights = history.clients[history.clients["round"] == 3].set_index("client")["weight"]
    assert weights[["site-1", "site-2"]].max() < 0.01 < weights[["site-3", "site-4", "site-5"]].min()
    assert set(history.failures_after(0)["client"]) == {"site-6"}
    assert glance(tmp_path / transfer, "run").state == "finished"
