"""FPL through the one loop: modes, weights on users, resume, commands."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.warm import warm_command

from steelyard.api import resume
from steelyard.errors import UserError
from steelyard.experiment import running
from steelyard.experiment.loading import build, load, to_toml
from steelyard.experiment.parts import federations_of, plan_of
from steelyard.experiment.recommend import RecommendDescription
from steelyard.messages import Question, Task
from steelyard.recommend.fpl import Schedule
from steelyard.recommend.parallel import PairRows
from steelyard.report.recommender import open_run
from steelyard.result import Result
from steelyard.runs.reader import History

USERS, TRAIN = 24, 24 * 8


def changed(description: dict, **sections) -> RecommendDescription:
    document = {key: dict(value) if isinstance(value, dict) else value for key, value in description.items()}
    for name, value in sections.items():
        document[name] = {**document.get(name, {}), **value}
    return build(document)


def run(*arguments: Any, **options: Any) -> Result:
    return Result(running.run(*arguments, **options))


@pytest.mark.parametrize(
    ("mode", "cohort", "triples", "per_epoch", "rounds"),
    [("pFPL+", USERS, 8, 1, 4), ("pFPL", USERS, 1, 8, 32), ("sFPL+", 1, 8, USERS, 4), ("sFPL", 1, 1, TRAIN, 4)],
)
def test_all_modes_run_through_the_loop_and_learn(description, tmp_path, mode, cohort, triples, per_epoch, rounds):
    experiment = changed(description, fpl={"mode": mode}, rounds={"epochs": 30})
    assert experiment.schedule() == Schedule(cohort, triples, per_epoch)
    assert cohort * triples * per_epoch == TRAIN
    result = run(experiment, out=tmp_path / "run")
    history = result.history.rounds
    assert history["round"].max() == rounds / 4 * 30
    measured = history[history["accuracy"].notna()]
    assert len(measured) == 31  # the first model and each epoch
    # With two tastes told apart, 12 of 40 items are left to guess from; by chance the score is about 0.06.
    assert measured["accuracy"].iloc[-1] > 0.15
    finished = open_run(tmp_path / "run")
    sent = finished.communication()
    assert sent["sent_vectors_down"] == 30 * per_epoch * cohort * 40
    assert 0 < sent["sent_vectors_up"] <= 30 * per_epoch * cohort * triples * 2
    assert sent["tcc_vectors"] == pytest.approx(30 * per_epoch * cohort * (40 + triples * 2))


@pytest.mark.parametrize("mode", ["pFPL+", "sFPL"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(description, tmp_path, mode):
    experiment = changed(description, fpl={"mode": mode, "pi": 0.5})
    whole = run(experiment, out=tmp_path / "whole")

    def stop(round, _):
        if round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, out=tmp_path / "part", progress=stop)
    again = resume(tmp_path / "part")
    first, second = open_run(whole.folder), open_run(again.folder)
    assert torch.equal(first.model, second.model)
    kept, put_back = first.clients.snapshot(), second.clients.snapshot()
    assert kept.keys() == put_back.keys()
    assert all(torch.equal(kept[name], put_back[name]) for name in kept)
    assert whole.history.rounds["accuracy"].tolist() == again.history.rounds["accuracy"].tolist()


def test_users_are_weighed_by_criteria_beside_the_plain_sum(description, tmp_path):
    experiment = build(
        {
            **description,
            "weighing": {"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD"},
            "beside": {"sum": {"criteria": ["EQ"]}},
        }
    )
    result = run(experiment, out=tmp_path / "run")
    clients = result.history.clients
    weighed = clients[(clients["rule"] == "LD>DS>MD") & (clients["round"] == 1)]
    plain = clients[(clients["rule"] == "sum") & (clients["round"] == 1)]
    assert weighed["raw_DS"].tolist() == [8.0] * USERS
    assert weighed["raw_LD"].tolist() == [1.0] * USERS  # each taste is one category
    assert weighed["raw_MD"].between(0, 1, inclusive="neither").all()
    assert weighed["weight"].nunique() > 1
    assert plain["weight"].to_numpy() == pytest.approx(1 / USERS)
    assert plain["bytes"].min() > 0
    # The two rules start from one model and see the same cohorts, but end with different ones.
    assert not torch.equal(open_run(result.folder).model, open_run(result.folder, "sum").model)


def one_task(experiment: RecommendDescription, names: list[str], round: int = 1) -> tuple:
    clients, server = experiment.assemble()
    task = Task("EQ", experiment.seed, round, tuple(names), server.initial(experiment.seed))
    return clients, clients.train([task])[0]


def test_own_share_of_each_user_from_a_column(description):
    experiment = changed(description, interactions={"pi_column": "pi"})
    clients, updates = one_task(experiment, [f"u{u:02d}" for u in range(USERS)])
    assert clients.users.shares.tolist() == [0.0] + [0.5] * (USERS - 1)
    assert isinstance(updates.payload, PairRows)
    assert not updates.payload.sent[0].any()
    assert updates.payload.sent[1:].any()


def test_a_users_update_does_not_depend_on_who_else_is_asked(description):
    experiment = changed(description, fpl={"pi": 0.5})
    _, alone = one_task(experiment, ["u07"])
    _, together = one_task(experiment, ["u03", "u07", "u11"])
    np.testing.assert_array_equal(alone.payload.gradients[0], together.payload.gradients[1])
    np.testing.assert_array_equal(alone.payload.sent[0], together.payload.sent[1])
    assert alone.bytes_sent[0] == together.bytes_sent[1]


def test_strangers_and_users_without_items_fail_with_a_reason(description, tmp_path):
    path = tmp_path / "odd.tsv"
    everything = [f"all\ti{i}\t{i}" for i in range(5)]
    path.write_text("user\titem\ttime\n" + "\n".join([*everything, "few\ti0\t1", "few\ti1\t2"]) + "\n")
    experiment = changed(
        {**description, "interactions": {"path": str(path), "split": "newest"}}, fpl={"learning_rate": 0.1}
    )
    _, updates = one_task(experiment, ["all", "few", "nobody"])
    assert updates.clients == ("all", "few")
    assert [(f.client, f.reason) for f in updates.failures] == [("nobody", "not registered")]
    histories = experiment.run_data().histories
    assert histories.sizes.tolist() == [4, 1]


def test_a_user_with_nothing_to_learn_from_fails_with_a_reason(description):
    """One user has no training item, one has every item of the catalogue and so no negative."""
    from dataclasses import replace

    from steelyard.recommend.clients import RecommendClients
    from steelyard.recommend.sampling import Histories

    experiment = changed(description)
    users = experiment.run_data().users
    count = users.histories.catalogue
    starts = np.array([0, 0, count, count + 2])
    items = np.concatenate([np.arange(count), [3, 5]]).astype(np.int32)
    odd = Histories(("empty", "full", "usual"), count, starts, items, np.zeros(3, dtype=np.int64))
    truth = replace(users.truth, users=3)
    clients = RecommendClients(
        *(replace(users, histories=odd, truth=truth, shares=np.ones(3)), experiment.run_data().learning),
        experiment.local_round(),
    )
    task = Task("EQ", 3, 1, ("empty", "full", "usual"), experiment.assemble()[1].initial(3))
    updates = clients.train([task])[0]
    assert updates.clients == ("usual",)
    assert {f.client: f.reason for f in updates.failures} == {
        "empty": "no training items",
        "full": "has every item: none is left as a negative",
    }


def test_rules_are_compared_over_seeds_on_users_too(description, tmp_path):
    experiment = changed(description, rounds={"epochs": 2})
    result = run(
        build({**to_document(experiment), "beside": {"DS": {"criteria": ["DS"]}}}), out=tmp_path / "run", seeds=[1, 2]
    )
    first, second = open_run(result.folder, "EQ", 1), open_run(result.folder, "EQ", 2)
    assert not torch.equal(first.model, second.model)
    assert first.clients.snapshot().keys() == second.clients.snapshot().keys()
    assert len(first.clients.snapshot()) == 8  # vectors and traffic of two rules with two seeds


def to_document(experiment: RecommendDescription) -> dict:
    return experiment.model_dump(mode="json", exclude_none=True)


def test_a_learning_rate_that_runs_away_is_refused_not_crashed(description, tmp_path):
    experiment = changed(description, fpl={"learning_rate": 1e6}, rounds={"epochs": 8, "min_clients": 0})
    history = run(experiment, out=tmp_path / "run").history
    assert history.clients["failure"].dropna().str.contains("NaN or infinity").any()
    assert np.isfinite(history.rounds["accuracy"].dropna()).all()


def test_candidates_are_scored_each_and_users_count_once(description):
    experiment = changed(description)
    clients, server = experiment.assemble()
    first = server.initial(3)
    answer = clients.evaluate([Question("EQ", 3, 0, torch.stack([first, -first]))])[0]
    assert answer.scores.shape == (2, USERS)
    assert answer.samples.tolist() == [1] * USERS
    assert answer.overall()[0] == pytest.approx(answer.scores[0].mean())
    assert set(answer.metrics) == {"ndcg@10", "precision@10", "recall@10", "hit_rate@10", "f1_per_user@10"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"fpl": {"mode": "custom"}}, "fpl.triples: got None"),
        ({"fpl": {"triples": 3}}, "fpl.triples: got 3 with mode = 'pFPL+'"),
        ({"fpl": {"pi": 1.5}}, "fpl.pi"),
        ({"fpl": {"mode": "sFPL"}, "weighing": {"criteria": ["DS"]}}, "nothing is weighed"),
        ({"weighing": {"criteria": ["CB"]}}, "CB has no meaning for users"),
        ({"fpl": {"mod": "pFPL"}}, "did you mean 'mode'"),
    ],
)
def test_bad_descriptions_are_named(description, sections, message):
    with pytest.raises(UserError) as error:
        changed(description, **sections)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"interactions": {"path": "nowhere.tsv"}}, "nowhere.tsv"),
        ({"interactions": {"category_column": "colour"}}, "category_column: got 'colour'; allowed"),
        ({"interactions": {"pi_column": "kind"}}, "pi_column: 'kind' is"),
        ({"interactions": {"core": 99}}, "nothing is left"),
        ({"ranking": {"threshold": 9.0}}, "no user has a relevant test item"),
    ],
)
def test_data_that_does_not_fit_is_named(description, sections, message):
    with pytest.raises(UserError) as error:
        changed(description, **sections).assemble()
    assert message in str(error.value)


def test_custom_cohorts_and_triples(description, tmp_path):
    experiment = changed(description, fpl={"mode": "custom", "triples": 2}, rounds={"epochs": 2, "fraction": 0.25})
    assert experiment.schedule() == Schedule(users=6, triples=2, rounds_per_epoch=16)
    assert plan_of(experiment).rounds == 32
    history = run(experiment, out=tmp_path / "run").history
    assert set(history.rounds["cohort"][1:]) == {6}
    # Single clients are recorded once an epoch, so that many short rounds do not fill the disk.
    assert sorted(set(history.clients["round"])) == [16, 32]


def test_rounds_in_place_of_epochs(description, tmp_path):
    experiment = changed(description, fpl={"mode": "pFPL"}, rounds={"count": 3})
    history = run(experiment, out=tmp_path / "run").history
    assert history.rounds["round"].tolist() == [0, 1, 2, 3]
    assert history.rounds["accuracy"].notna().all()


def test_recipes_load_and_come_back_from_toml():
    from steelyard.settings import parse

    for name in ("fpl-ml1m", "fpl-amazon", "fpl-foursquare"):
        experiment = load(name)
        assert isinstance(experiment, RecommendDescription)
        assert build(parse(to_toml(experiment), name)) == experiment
        assert federations_of(experiment)[0].rule_name == "EQ"


def steelyard(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return warm_command(*arguments, folder=folder, timeout=120)


def test_from_the_command_line(description, tmp_path):
    (tmp_path / "tastes.toml").write_text(to_toml(changed(description)))
    ran = steelyard("run", "tastes.toml", "--set", "fpl.pi=0.5", "--out", "here", "--format", "json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["status"] == "finished"
    shown = steelyard("recommend", "top", "here", "--user", "u01", "--format", "json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert [row["rank"] for row in json.loads(shown.stdout)["list"]] == list(range(1, 11))
    report = steelyard("recommend", "report", "here", "--cutoff", "10,1", "--format", "json", folder=tmp_path)
    document = json.loads(report.stdout)
    assert list(document["metrics"]) == ["10", "1"]
    assert set(document["metrics"]["10"]["bias_disparity"]) == {"first", "second"}
    wrote = steelyard("recommend", "lists", "here", "--out", "lists.tsv", folder=tmp_path)
    assert wrote.returncode == 0, wrote.stderr
    steelyard("recommend", "split", "tastes.tsv", "--out", "split", folder=tmp_path)
    files = ["--train", "split/train.tsv", "--test", "split/test.tsv", "--catalogue", "split/catalogue.tsv"]
    judged = steelyard(
        *("recommend", "evaluate", *files, "--recommendations", "lists.tsv", "--format", "json"), folder=tmp_path
    )
    assert json.loads(judged.stdout)["10"]["ndcg"] == pytest.approx(document["metrics"]["10"]["ndcg"], abs=1e-9)
    wrong = steelyard("recommend", "top", "here", "--user", "zoe", folder=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "--user: got 'zoe'" in wrong.stderr
    assert History(tmp_path / "here").info["status"] == "finished"
