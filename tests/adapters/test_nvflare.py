"""NVFlare's aggregator that weighs: bad answers left out, types kept, the real simulator."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.kit import assert_refused, of_diff
from tests.warm import ROOT, warm_script

pytest.importorskip("nvflare")

from nvflare.apis.client_engine_spec import ClientEngineSpec
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

from steelyard.adapters.importing import import_files
from steelyard.adapters.swarm import HANDED_ON
from steelyard.nvflare import ServerRows, WeighedAggregator
from steelyard.runs.glance import glance
from steelyard.runs.history import History

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


def aggregated(aggregator: WeighedAggregator, answers: Sequence[FLModel], sent: Mapping[str, Any] = SENT) -> Any:
    send(aggregator, sent)
    for each in answers:
        aggregator.accept_model(each)
    return aggregator.aggregate_model()


@pytest.mark.parametrize("kind", ["FULL", "DIFF"])
def test_by_size_it_is_nvflares_own_average(kind: str) -> None:
    answers = [answer(c, model(v), n, {"loss": v}, kind) for c, v, n in (*CLIENTS, ("c", 5, 7))]
    ours, theirs = aggregated(WeighedAggregator("DS"), answers, model(4.0)), BaseFedAvg.aggregate_fn(answers)
    assert ours.params_type == theirs.params_type
    assert ours.metrics == pytest.approx(theirs.metrics)
    assert theirs.params is not None
    for name, array in theirs.params.items():
        assert ours.params[name] == pytest.approx(array, abs=1e-6)


def test_a_criterion_may_stand_in_the_meta_and_another_key_may_hold_the_size() -> None:
    aggregator = WeighedAggregator("LD>DS", size="rows")
    answers = [answer(c, model(1), None, rows=n, LD=d) for c, n, d in (("a", 30, 2), ("b", 10, 9))]
    aggregated(aggregator, answers)
    assert aggregator.rounds[0].measures == {"a": {"LD": 2, "DS": 30}, "b": {"LD": 9, "DS": 10}}


def test_an_answer_that_cannot_be_weighed_is_left_out() -> None:
    aggregator = WeighedAggregator("q>DS", metrics=["q"])
    bad = {
        "criterion q": answer("a", model(1), 10, {"q": "much"}),
        "meta NUM_STEPS_CURRENT_ROUND is missing": answer("b", model(1), None, {"q": 1}),
        "array b cannot be read": answer("c", model(1, b=[[1], [1, 2]]), 9, {"q": 1}),
        "sent no arrays by name": answer("d", [1.0], 10, {"q": 1}),
    }
    found = aggregated(aggregator, [*bad.values(), answer("e", model(3), 10, {"q": torch.tensor([1.0])})])
    assert (found.params["w"][0, 0], found.metrics) == (3.0, {"q": 1.0})
    reasons = aggregator.rounds[0].reasons
    assert sorted(reasons) == list("abcd")
    assert [(client, reason) for client, reason in zip("abcd", bad, strict=True) if reason not in reasons[client]] == []
    kept = aggregated(aggregator, [*bad.values()], model(7.0))
    assert kept.params_type == ParamsType.FULL
    assert (kept.params["w"] == 7).all()


def test_rounds_do_not_leak_into_one_another() -> None:
    aggregator = WeighedAggregator("DS")
    assert_refused(lambda: aggregator.accept_model(answer("a", model(1))), "aggregator", "not seen")
    send(aggregator)
    aggregator.accept_model(answer("a", model(9)))
    found = aggregated(aggregator, [answer("b", model(2))])
    assert found.params["w"][0, 0] == pytest.approx(2.0)
    assert [list(each.weights) for each in aggregator.rounds] == [["b"]]


def test_tensors_come_back_as_tensors_of_their_type() -> None:
    def of(value: int) -> dict[str, Any]:
        return {
            "w": torch.full((3,), value, dtype=torch.bfloat16),
            "d": torch.full((2,), value, dtype=torch.float64),
            "seen": torch.tensor(2**40 + value),
            "plain": np.full(2, value, np.float16),
        }

    sent = of(0)
    found = aggregated(WeighedAggregator("DS"), [answer("a", of(1), 1), answer("b", of(5), 3)], sent).params
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in sent.items()}
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in of(4).items()}


def test_scatter_and_gather_knows_clients_by_their_authenticated_name() -> None:
    aggregator = WeighedAggregator("DS")
    context = send(aggregator)
    for client, value in (("site-1", 1.0), ("site-2", 3.0)):
        share = DXO(DataKind.WEIGHTS, model(value), {"NUM_STEPS_CURRENT_ROUND": 5, "client_name": "x"}).to_shareable()
        share.set_peer_props({ReservedKey.IDENTITY_NAME: client})
        assert aggregator.accept(share, context)
    found = aggregator.aggregate(context)
    assert set(aggregator.rounds[0].weights) == {"site-1", "site-2"}
    assert found["DXO"]["data"]["w"][0, 0] == pytest.approx(2.0)


class Rows(ServerRows):
    """Rows that a job can write down."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(torch.nn.Linear(2, 2), np.zeros((count, 2), np.float32), [0] * count)


def test_a_recipe_writes_it_into_a_job(tmp_path: Path) -> None:
    """What NVFlare writes is what was asked for, and no file of ours but this one component is copied."""
    (tmp_path / "client.py").write_text("")
    FedAvgRecipe(
        name="job",
        model={"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 2}},
        min_clients=2,
        train_script=str(tmp_path / "client.py"),
        aggregator=WeighedAggregator("VP>q/max", rows=Rows(3), metrics=["q"], temporary="/data/spill"),
    ).export(str(tmp_path / "jobs"))
    (config,) = (tmp_path / "jobs").rglob("config_fed_server.json")
    (workflow,) = json.loads(config.read_text())["workflows"]
    written = workflow["args"]["aggregator"]
    assert written["path"] == "steelyard.nvflare.WeighedAggregator"
    assert written["args"]["rows"].pop("path").endswith(".Rows")
    expected = {"rule": "VP>q/max", "rows": {"args": {"count": 3}}, "metrics": ["q"], "temporary": "/data/spill"}
    assert written["args"] == expected
    copied = {path.name for path in (tmp_path / "jobs").rglob("custom/steelyard/**/*.py")}
    assert copied <= {"nvflare.py"}


def test_the_diff_of_the_page_makes_a_weighed_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text("")
    net = {"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 2}}
    names: dict[str, Any] = {"FedAvgRecipe": FedAvgRecipe, "Net": lambda: net}
    exec(of_diff("nvflare-job.md"), names)
    names["recipe"].export("jobs")
    (config,) = Path("jobs").rglob("config_fed_server.json")
    (workflow,) = json.loads(config.read_text())["workflows"]
    assert workflow["args"]["aggregator"]["args"] == {"rule": "AG>DS/max", "folder": "/runs/hospitals"}


def test_without_nvflare_one_line_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.modules['nvflare'] = None\nimport steelyard.nvflare\n")
    ended = warm_script(script, folder=tmp_path, fresh=True)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.endswith("pip install 'steelyard[nvflare]'")


"""Of the simulator's clients: the first two label each digit as the next; where we weigh, the last one sends NaN."""


def test_a_job_leaves_a_run_folder_that_says_where_it_failed_and_can_go_on(tmp_path: Path) -> None:
    """Metrics are clients' tests of the model that they got: those of a round belong to the round before."""
    aggregator = WeighedAggregator("DS", folder=str(tmp_path / "run"))
    base = SENT
    for number in (1, 2, 3):
        answers = [answer(c, model(v), n, {"accuracy": 0.1 * number * v}, "DIFF") for c, v, n in CLIENTS]
        found = aggregated(aggregator, answers, base)
        base = {name: base[name] + array for name, array in found.params.items()}
    context = FLContext()
    context.set_prop(FLContextKey.EVENT_DATA, "the disk is full", private=True, sticky=False)
    aggregator.handle_event(EventType.FATAL_SYSTEM_ERROR, context)
    aggregator.handle_event(EventType.END_RUN, FLContext())
    history = History(tmp_path / "run")
    table = history.clients[history.clients["round"] == 3].set_index("client")
    assert table["weight"].dropna().to_dict() == pytest.approx(aggregator.rounds[2].weights, abs=1e-15)
    assert history.rounds["accuracy"].iloc[1:3].tolist() == pytest.approx([0.4, 0.6])
    assert (history.chain.round, history.chain.problem) == (3, "")
    assert glance(tmp_path, "run").state == "stopped"
    assert "the disk is full" in history.info["stopped"]
    again = WeighedAggregator("DS", folder=str(tmp_path / "run"))
    answers = [answer(c, model(v), n) for c, v, n in CLIENTS]
    assert_refused(lambda: aggregated(again, answers), "folder", "the model of round 3")
    again = WeighedAggregator("DS", folder=str(tmp_path / "run"))
    aggregated(again, answers, base)
    again.handle_event(EventType.END_RUN, FLContext())
    assert (History(tmp_path / "run").last_round, glance(tmp_path, "run").state) == (4, "finished")


CLIENTS = (("a", 1, 10), ("b", 3, 30))


def site(name: str, rule: str, folder: Path) -> WeighedAggregator:
    """The aggregator of a swarm's site, as its job starts."""
    made, context = WeighedAggregator(rule, folder=str(folder)), FLContext()
    made.panics = []  # type: ignore[attr-defined]
    made.system_panic = lambda reason, fl_ctx: made.panics.append(reason)  # type: ignore[attr-defined,method-assign]
    context.set_prop(ReservedKey.ENGINE, Mock(spec=ClientEngineSpec), private=True, sticky=False)
    context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    made.handle_event(EventType.START_RUN, context)
    return made


def swarm_round(aggregator: WeighedAggregator, own: str, learnt: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Aggregate at one site as its controller does, whose own answer says nothing of who sends it."""
    context, mine = FLContext(), FLContext()
    context.set_prop(AppConstants.GLOBAL_MODEL, dict(learnt), private=True, sticky=True)
    mine.set_prop(ReservedKey.IDENTITY_NAME, own, private=False, sticky=False)
    for at, client in enumerate(SITES):
        grown = {
            name: value + number * (at + 1) * (-1.0 if at == 2 else 1.0) for name, value in learnt["weights"].items()
        }
        meta = {
            "NUM_STEPS_CURRENT_ROUND": 10 * (at + 1),
            MetaKey.INITIAL_METRICS: {"accuracy": 0.1 * number + 0.01 * at},
        }
        share = DXO(DataKind.WEIGHTS, grown, meta).to_shareable()
        if client == own:
            context.set_prop(ReservedKey.PEER_CTX, mine, private=True, sticky=False)
        else:
            share.set_peer_props({ReservedKey.IDENTITY_NAME: client})
        assert aggregator.accept(share, context)
    found = from_shareable(aggregator.aggregate(context))
    return {"weights": found.data, "meta": found.get_meta_props()}


SITES = ("site-1", "site-2", "site-3")


@pytest.mark.parametrize("rule", ["cgsv", "AG>DS/max"])
def test_sites_of_a_swarm_weigh_as_one_server_and_their_journals_are_one_run(rule: str, tmp_path: Path) -> None:
    server, model = WeighedAggregator(rule), {"weights": {n: v.astype(np.float64) for n, v in SENT.items()}, "meta": {}}
    sites = {name: site(name, rule, tmp_path / "sites") for name in SITES}
    plain = model
    for number, own in enumerate(("site-2", "site-1", "site-2", "site-3"), 1):
        model, plain = swarm_round(sites[own], own, model, number), swarm_round(server, "site-1", plain, number)
        assert sites[own].rounds[-1].weights == server.rounds[-1].weights
        assert set(server.rounds[-1].weights) == set(SITES)
    assert plain["meta"].keys() == model["meta"].keys() - {HANDED_ON}  # A server hands nothing on to its clients.
    files = sorted((tmp_path / "sites").iterdir())
    assert [file.name for file in files] == ["site-1.jsonl", "site-2.jsonl", "site-3.jsonl"]
    assert import_files(files, tmp_path / "run") == 4
    history = History(tmp_path / "run")
    assert (history.last_round, history.chain.problem) == (4, "")
    for number, combined in enumerate(server.rounds, 1):
        table = history.clients[history.clients["round"] == number].set_index("client")
        assert table["weight"].dropna().to_dict() == combined.weights
    # What clients say of a model when they get it belongs to the round before; of the last one nobody said anything.
    assert history.rounds["accuracy"].tolist()[1:4] == pytest.approx([0.2 + 0.04 / 3, 0.3 + 0.04 / 3, 0.4 + 0.04 / 3])
    assert math.isnan(history.rounds["accuracy"].iloc[-1])
    text = files[1].read_text()
    files[1].write_text(text.replace('"reason": ""', '"reason": "late"', 1))
    assert_refused(lambda: import_files(files, tmp_path / "other"), "round 2 follows another round 1")
    files[1].write_text(text)
    assert_refused(lambda: import_files(files[:1], tmp_path / "other"), "begins with round 2")
    again = site("site-2", rule, tmp_path / "sites")
    assert again.panics == [f"folder: {files[1]} holds rounds of another job; allowed: a new folder"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("handed", ["{", '{"round": -1}', '{"round": 3, "memory": [], "digest": ""}'])
def test_what_a_site_hands_on_is_read_or_left_out(
    handed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = site("site-1", "cgsv", tmp_path)
    swarm_round(made, "site-1", {"weights": SENT, "meta": {HANDED_ON: handed}}, 1)
    assert "cannot be read" in caplog.text
    assert set(made.rounds[0].weights) == set(SITES)


@pytest.mark.slow
def test_the_real_simulator_runs_a_job_that_is_weighed(tmp_path: Path) -> None:
    job = Path(__file__).parent / "nvflare_job" / "job.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(job), str(tmp_path), "quality"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280, env=environment, cwd=job.parent)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    assert said.count("left out site-4: model holds NaN or infinity") == 3
    # In each round 1, 2 and 3 are added, weighed by 1, 1/2 and 1/3: 3 / (11/6).
    (saved,) = tmp_path.rglob("server.npy")
    assert np.load(saved) == pytest.approx(np.full((2, 3), 3 * 18 / 11), rel=1e-6)
    history = History(tmp_path / "run")
    assert (history.last_round, history.chain.problem) == (3, "")
    weights = history.clients[history.clients["round"] == 3].set_index("client")["weight"].dropna()
    assert weights.to_dict() == pytest.approx({"site-1": 6 / 11, "site-2": 3 / 11, "site-3": 2 / 11})
    assert set(history.failures_after(0)["client"]) == {"site-4"}
    assert glance(tmp_path, "run").state == "finished"
