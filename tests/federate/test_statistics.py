"""What sites tell of their columns before round 1, over the two real apps: agreed scales, owners' rules, liars."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from tests import kit
from tests.clients.flower.flower_fakes import FakeGrid, changed_answer, crowd
from tests.federate.small_experiment import assert_same_weights, node
from tests.kit import assert_refused

from steelyard import Model
from steelyard.clients.flower import wire
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.hidden_messages import HideForm
from steelyard.clients.flower.survey import read_sums, write_sums
from steelyard.clients.flower.wire import (
    COMPARE,
    STATISTICS,
    FindingsForm,
    IntroductionForm,
    SaidFinding,
    StatisticsForm,
)
from steelyard.clients.node import NodeConfig, Terms
from steelyard.data.site_sums import SiteSums, scales
from steelyard.experiment.loading import RUN_FILE, build, read_experiment
from steelyard.experiment.resuming import accept_experiment
from steelyard.experiment.running import run
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.book import ASKED
from steelyard.federate.client_app import NodeFault, node_clients
from steelyard.federate.own_model import take
from steelyard.federate.received import FILE
from steelyard.federate.server_app import agreed, clients_behind, federate
from steelyard.messages.updates import Task
from steelyard.result import Result
from steelyard.runs.history import History

SITES = ("north", "south", "west")
READING = {"source": "csv", "labels": "y", "owner": "site", "held_out": "part", "classes": 2}
EXPERIMENT: dict[str, Any] = {
    "data": {**READING, "path": "own.csv", "normalise": "standard"},
    "partition": {"scheme": "given", "test": "held-out"},
    "model": {"name": "logistic"},
    "training": {"batch_size": "full", "learning_rate": 0.1},
    "rounds": {"count": 2, "fraction": 1.0},
    "federate": {"nodes": 3, "timeout": 60.0},
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites of unequal size, centre and spread, each with columns in its own order, and one file of all."""
    folder, rng = tmp_path_factory.mktemp("sites"), np.random.default_rng(4)
    parts: list[pd.DataFrame] = []
    for number, site in enumerate(SITES):
        rows = 60 + 30 * number
        age, dose = rng.normal(40 + 9 * number, 4 + number, rows), rng.lognormal(number, 0.5, rows)
        label = (age + dose > np.median(age + dose)).astype(int)
        part = np.where(np.arange(rows) % 4 == 0, "test", "train")
        parts.append(pd.DataFrame({"site": site, "age": age, "dose": dose, "y": label, "part": part}))
        parts[-1][list(rng.permutation(parts[-1].columns))].to_csv(folder / f"{site}.csv", index=False)
    pd.concat(parts).to_csv(folder / "all.csv", index=False)
    return folder


Sites = Callable[..., FakeGrid]
Damage = dict[str, Callable[[pd.DataFrame], pd.DataFrame]]


@pytest.fixture
def sites(tables: Path, tmp_path: Path) -> Sites:
    """Return nodes with files of their own, by their owners' terms of statistics."""

    def made(*terms: str, damage: Damage | None = None) -> FakeGrid:
        nodes: dict[int, Any] = {}
        for number, (site, term) in enumerate(zip(SITES, terms, strict=True)):
            file = tables / f"{site}.csv"
            if damage:
                damage[site](pd.read_csv(file)).to_csv(file := tmp_path / file.name, index=False)
            data = {**READING, "path": str(file)}
            config = {
                "client": site,
                "data": data,
                "statistics": term,
                "allow": "",
                "state": str(tmp_path / site),
                "keep-model": True,
            }
            nodes[40 + number] = node(config, {})
        return FakeGrid(nodes)

    return made


def federated(grid: FakeGrid, folder: Path, **sections: Any) -> History:
    document = {**EXPERIMENT, **sections}
    config = {"experiment": experiment_text(build(document)), "set": "", "out": str(folder)}
    return History(federate(grid, config, "5"))  # type: ignore[arg-type]


def surveyed(grid: FakeGrid, **sections: Any) -> tuple[FlowerClients, dict[str, Any]]:
    """Ask what is asked before round 1; returns the clients, and the fields that the sites agree on."""
    experiment = build(kit.changed(EXPERIMENT, **sections))
    clients = clients_behind(grid, experiment, "5", survey=True)  # type: ignore[arg-type]
    return clients, dict(clients.terms)


def test_sites_that_agree_on_scales_train_as_a_simulation_does(sites: Sites, tables: Path, tmp_path: Path) -> None:
    whole = {**EXPERIMENT, "data": {**EXPERIMENT["data"], "path": str(tables / "all.csv")}}
    run(build(whole), out=tmp_path / "simulated")
    found = federated(sites("sums", "sums", "sums"), tmp_path / "federated")
    assert_same_weights(tmp_path / "simulated", tmp_path / "federated", 1e-4, 1e-5)
    assert found.facts.others["federation_notes"] == ""
    train = pd.read_csv(tables / "all.csv").query("part == 'train'")
    scales = read_experiment(tmp_path / "federated").model_dump()["data"]["scales"]
    for name in ("age", "dose"):
        assert scales[name] == pytest.approx([train[name].mean(), train[name].std(ddof=0)])
    new = train[["dose", "age"]]  # A model that leaves the run scales new rows as the sites agreed to.
    models = [Result(tmp_path / name).model().predict(new) for name in ("simulated", "federated")]
    np.testing.assert_allclose(models[0].select_dtypes("number"), models[1].select_dtypes("number"), atol=1e-3)
    asked = (tmp_path / "north" / ASKED).read_text().splitlines()
    assert '"what":"statistics","run":"5"' in asked[0]
    assert sum('"statistics"' in line for line in asked) == 1
    own = taken_at(tmp_path, tables / "north.csv")  # What a node received is the same model, of its own rows.
    assert own.document.origin.round == 2
    assert own.document.origin.digest == Result(tmp_path / "federated").model().document.origin.digest
    np.testing.assert_allclose(own.predict(new).select_dtypes("number"), models[1].select_dtypes("number"), atol=1e-6)
    # Changes that are accepted keep what rows go through, but for changes of the data: the nodes are not asked again.
    file, text = tmp_path / "federated" / RUN_FILE, (tmp_path / "federated" / RUN_FILE).read_text()
    for edit, kept in ((("count = 2", "count = 3"), found.facts.preparations), (('"mean"', '"zero"'), {})):
        file.write_text(text.replace(*edit))
        accept_experiment(file.parent)
        assert (History(file.parent).facts.preparations, file.read_text() == text) == (kept, False)
    assert_refused(Result(file.parent).model, "does not say what its rows went through")


def taken_at(folder: Path, table: Path) -> Model:
    """Return the model that the node north takes."""
    reading = ", ".join(f"{name} = {json.dumps(value)}" for name, value in {**READING, "path": str(table)}.items())
    lines = ['server = "127.0.0.1:1"', "insecure = true", 'client = "north"', 'state = "north"', "keep-model = true"]
    (folder / "north.toml").write_text("\n".join([*lines, 'statistics = "sums"', f"data = {{{reading}}}"]))
    return take(folder / "north.toml")


def test_where_nodes_tell_nothing_the_operator_has_a_model_of_prepared_rows(sites: Sites, tmp_path: Path) -> None:
    sections = {"federate": {**EXPERIMENT["federate"], "nodes_keep_model": False}, "rounds": {"count": 1}}
    federated(sites("no", "no", "no"), tmp_path / "run", **sections)
    assert not (tmp_path / "north" / FILE).exists()
    model = Result(tmp_path / "run").model()
    assert "no node told how" in model.card
    assert model.predict(np.zeros((3, 2)))["class"].isin(["0", "1"]).all()
    assert_refused(lambda: model.predict(tmp_path / "run" / RUN_FILE), "did not tell what rows go through")


def test_a_site_that_tells_nothing_is_scaled_by_what_the_others_agreed(sites: Sites, tables: Path) -> None:
    clients, held = surveyed(sites("sums", "no", "sums"))
    train = pd.concat([pd.read_csv(tables / f"{site}.csv") for site in ("north", "west")]).query("part == 'train'")
    assert held["data.scales"]["age"] == pytest.approx([train["age"].mean(), train["age"].std(ddof=0)])
    assert clients.notes == ["statistics of south: not told, as the owner says; the run goes on without"]
    prepared = clients.preparation(0)  # What a model that leaves the run takes along.
    assert prepared is not None
    assert (prepared.shape, prepared.target.label, prepared.target.names) == ([2], "y", ["0", "1"])
    assert [(column.name, column.kind) for column in prepared.columns] == [("age", "number"), ("dose", "number")]
    assert prepared.scale is not None
    assert list(zip(prepared.scale.mean, prepared.scale.deviation, strict=True)) == list(held["data.scales"].values())


def test_where_fewer_than_two_sites_tell_each_scales_alone_and_the_run_says_so(sites: Sites) -> None:
    clients, held = surveyed(sites("no", "no", "sums"))
    assert (held, "each node scales or fills by its own rows" in clients.notes[-1]) == ({}, True)


HONEST = SiteSums.of(("age", "dose"), np.random.default_rng(1).normal((40, 2), (9, 0.3), (60, 2)), 10, {"y": {"0": 60}})
LIES: dict[str, Any] = {
    "NaN": {"mean": np.array([np.nan, 1.0])},
    "infinite": {"deviation": np.array([np.inf, 1.0])},
    "beyond all": {"mean": np.array([1e300, 1.0])},
    "negative": {"deviation": np.array([-1.0, 1.0])},
    "bins of more": {"bins": HONEST.bins * 2},
    "bins below 0": {"bins": HONEST.bins - 1},
    "words of more rows": {"words": {"y": {"0": 61}}},
    "words below 0": {"words": {"y": {"0": -1}}},
    "words for a number": {"words": {"age": {"0": 60}}},
    "long words": {"words": {"y": {"w" * 201: 60}}},
    "tiny": {"deviation": np.array([1e-200, 1.0])},
    "more rows than there are": {"present": np.array([1 << 62, 60])},
    "fewer than none": {"present": np.array([-5, 60])},
    "rows beyond all": {"rows": 10**400},
    "another shape": {"mean": np.zeros((2, 2))},
    "another type": {"present": np.array([50.0, 50.0])},
    "too short": {"mean": np.zeros(1)},
    "twice": {"columns": ["age", "age"]},
    "no list": {"columns": "age"},
    "long names": {"columns": ["age", "d" * 10_000]},
    "other columns": {"columns": ["age", "ssn"]},
    "10^400": {"columns": ["age", 10**400]},
}


def answering(
    name: str, answer: RecordDict, findings: list[SaidFinding] | None = None
) -> Callable[[Message], RecordDict]:
    """A node that has nothing but these answers."""
    terms = Terms(statistics="sums" if findings is None else "findings")

    def reply(message: Message) -> RecordDict:
        if message.metadata.message_type == STATISTICS:
            return answer
        if message.metadata.message_type == COMPARE:
            return wire.content(FindingsForm(findings=findings or []), {})
        return wire.content(IntroductionForm(version="", clients=[name], about={"features": [2]}, terms=terms), {})

    return reply


@pytest.mark.parametrize("lie", LIES)
def test_what_no_site_can_have_is_named_and_left_out(lie: str) -> None:
    arrays = {name: value for name, value in LIES[lie].items() if isinstance(value, np.ndarray)}
    form = {name: value for name, value in LIES[lie].items() if name not in arrays}
    liar = changed_answer(write_sums(HONEST), arrays, **form)
    honest = [answering(name, write_sums(HONEST)) for name in ("a", "b")]
    clients = crowd({1: honest[0], 2: honest[1], 3: answering("c", liar)})
    clients.survey.ask()
    together = clients.survey.together
    assert together is not None
    assert together.rows == 2 * HONEST.rows
    (note,) = clients.notes
    assert note.startswith("statistics of c: ")
    assert len(note) < 400


def test_a_site_that_claims_a_thousand_times_the_rows_counts_as_three_of_the_median() -> None:
    large = replace(
        HONEST, rows=60_000, present=HONEST.present * 1000, bins=HONEST.bins * 1000, mean=HONEST.mean + 7, words={}
    )
    clients = crowd({n: answering(str(n), write_sums(one)) for n, one in enumerate((HONEST, HONEST, large))})
    clients.survey.ask()
    together = clients.survey.together
    assert together is not None
    assert scales(together)["age"][0] == pytest.approx(HONEST.mean[0] + 7 * 3 / 5, abs=0.2)


WORDS: dict[str, dict[str, Any]] = {
    "north": {"sex": np.array(["m", "f"]), "stage": np.array([2, 10]), "y": np.array(["no", "yes"])},
    "south": {"sex": np.array(["m"]), "stage": np.array([2, 1]), "y": np.array(["no", "yes"])},
    "west": {"sex": np.array(["m", "w"]), "stage": np.array([10, 1]), "y": np.array(["no", "unsure"])},
}


def worded(site: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A table with words that differ by site, of which three rows have one of their own."""

    def change(table: pd.DataFrame) -> pd.DataFrame:
        places = np.arange(len(table))
        named = {name: words[places // 4 % len(words)] for name, words in WORDS[site].items()}
        table = table.assign(**named)
        return table.assign(sex=table["sex"].where(places >= 3, site))

    return change


def test_sites_agree_on_words_in_one_order_and_none_of_a_rare_one(sites: Sites, tmp_path: Path) -> None:
    """Their tables have 2, 1 and 2 words beside rare ones, and classes that not all have."""
    grid = sites("sums", "sums", "findings", damage={site: worded(site) for site in SITES})
    for each in grid.nodes.values():
        config = each.context.node_config  # type: ignore[attr-defined]
        own = {**config["data"], "categories": ["sex", "stage"]}
        del own["classes"]
        config |= {"data": own, "min-rows": 5}
    reading = {"categories": ["sex", "stage"], "classes": None, "normalise": "unit"}
    document = kit.changed(EXPERIMENT, data=reading)
    config = {"experiment": experiment_text(build(document)), "set": "", "out": str(tmp_path / "run")}
    found = History(federate(grid, config, "5"))  # type: ignore[arg-type]
    agreed = {"sex": ["f", "m", "w"], "stage": ["1", "2", "10"], "y": ["no", "unsure", "yes"]}
    data = read_experiment(tmp_path / "run").model_dump()["data"]
    assert {name: list(words) for name, words in data["agreed"].items()} == agreed
    assert set(data["scales"]) == {"age", "dose"}
    assert found.clients["failure"].dropna().tolist() == []
    prepared = Result(tmp_path / "run").model().preparation
    assert prepared.target.names == agreed["y"]
    assert {column.name: column.levels for column in prepared.columns if column.levels} == {
        name: agreed[name] for name in ("sex", "stage")
    }
    assert (prepared.scale is not None, prepared.shape) == (True, [8])
    # A server that guesses a word gets a column in which its few rows do not show.
    guessing = kit.changed(document, data={"agreed": {**agreed, "sex": ["f", "m", "north", "w"]}})
    north = NodeConfig.read(grid.nodes[40].context.node_config)  # type: ignore[attr-defined]
    _, built = node_clients(experiment_text(build(guessing)), north)
    (answer,) = built.clients.train([Task("DS", 5, 1, ("north",), torch.zeros(30))])
    assert answer.payload.dense is not None
    moved = answer.payload.dense.models[0][:27].reshape(3, 9).abs().sum(dim=0) > 0
    columns = ["age", "dose", "f", "m", "north", "w", "1", "2", "10"]
    assert [name for name, there in zip(columns, moved.tolist(), strict=True) if there] == [
        *("age", "dose", "f", "m", "2", "10")
    ]


SAID = SaidFinding(name="other-units", column="dose", factor=10.0)


@pytest.mark.parametrize(
    ("said", "noted"),
    [
        ([SAID], "column 'dose' at 'c' is about 10 times as large as at the others, as its node says"),
        ([SAID.model_copy(update={"name": "<b>your site is wrong</b>"})], "statistics of c: findings: got '<b>"),
        ([SAID.model_copy(update={"column": "ssn"})], "statistics of c: findings: got 'other-units' of 'ssn'"),
        ([SAID.model_copy(update={"factor": 1e300})], "statistics of c: findings: a factor of 1e+300"),
        ([SAID] * 51, "statistics of c: findings: 51; allowed: at most 50"),
    ],
)
def test_what_nodes_say_of_themselves_is_said_in_our_words(said: list[SaidFinding], noted: str) -> None:
    answers = {name: answering(name, write_sums(HONEST), []) for name in ("a", "b")}
    grid = {1: answers["a"], 2: answers["b"], 3: answering("c", write_sums(HONEST), said)}
    clients = crowd(grid)
    agreed(clients, build(kit.changed(EXPERIMENT, data={"normalise": "client"})))
    assert clients.terms == {}
    lines = [*clients.notes, *(finding.sentence for finding in clients.findings)]
    assert [line[: len(noted)] for line in lines] == [noted]


def test_each_site_compares_itself_and_tells_what_its_owner_allows(sites: Sites, messages: list[str]) -> None:
    """One has doses in other units, one 30 ages of -999; the third, which has the answer, lets no finding out."""
    damage = {"north": lambda t: t.assign(dose=t["dose"] * 1000), "south": _without_ages, "west": _with_the_answer}
    grid = sites("findings", "findings", "sums", damage=damage)
    clients, held = surveyed(grid, data={"normalise": "client"})
    assert held == {}
    told = [(found.name, found.site, found.column, found.figures) for found in clients.findings]
    assert told == [("other-units", "north", "dose", {"factor": 1000.0}), ("not-recorded", "south", "age", {})]
    # the owner's log says it all, and the server is told only what the owner allows
    assert any("-999 in 22 rows" in line for line in messages)
    assert any("'dose' at 'west' alone gives the label" in line for line in messages)


def test_under_hidden_sums_nobody_sees_a_single_sites_counts_and_no_second_sum_is_opened(
    sites: Sites, tables: Path, tmp_path: Path
) -> None:
    """The server that would subtract: it leaves one of four out of a second sum, or compares with sums it made up."""
    grid = sites("sums", "findings", "sums")
    east = {"client": "east", "data": {**READING, "path": str(tables / "west.csv")}, "statistics": "findings"}
    grid.nodes[43] = node({**east, "allow": "", "state": str(tmp_path / "east")}, {})
    seen: list[RecordDict] = []
    gone: set[tuple[str, int]] = set()

    def look(question: Message, answer: Message) -> list[Message]:
        place = (question.metadata.message_type, question.metadata.dst_node_id)
        seen.extend([answer.content] if place[0] == STATISTICS else [])
        return [Message(Error(8, "gone"), reply_to=question)] if place in gone else [answer]

    grid.tamper = look
    hidden = {"privacy": {"aggregation": {"kind": "secure"}}, "federate": {"nodes": 4}}
    clients, held = surveyed(grid, **hidden)
    frames = [pd.read_csv(tables / f"{site}.csv").query("part == 'train'") for site in (*SITES, "west")]
    train = pd.concat(frames)
    for name in ("age", "dose"):
        assert held["data.scales"][name] == pytest.approx([train[name].mean(), train[name].std(ddof=0)], rel=1e-4)
    told = [read_sums(*wire.split(content)) for content in seen]
    assert [(one.columns, int(one.bins.sum()), one.words) for one in told] == [
        (("age", "dose"), 0, {"y": {"0": 0, "1": 0}})
    ] * 4
    together = clients.survey.together
    assert together is not None
    assert (together.rows, together.present.tolist()) == (len(train), [len(train)] * 2)
    assert '"what":"statistics"' in (tmp_path / "north" / ASKED).read_text()
    assert surveyed(grid, **hidden)[1] == held  # the same once more tells nothing new
    clients.survey.together = replace(together, mean=together.mean + 1)
    clients.survey.findings()
    assert any("compared before" in note for note in clients.notes), clients.notes
    gone.add((HideForm.kind, 43))
    clients, held = surveyed(grid, **hidden)
    assert "data.scales" not in held
    assert any("0 of 4 clients helped to open the sum" in note for note in clients.notes), clients.notes


def _without_ages(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(age=table["age"].where(np.arange(len(table)) % 3 != 1, -999))


def _with_the_answer(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(dose=table["y"] * 2.0 + 1)


def ask(site: Any, **sections: Any) -> RecordDict:
    """Ask a site as a server may that does not keep to what its experiment is for."""
    experiment = experiment_text(build(kit.changed(EXPERIMENT, **sections)))
    form = StatisticsForm(run="x", experiment=experiment, seconds=30)
    return site(Message(wire.content(form, {}), 40, STATISTICS))


def test_a_second_question_is_answered_with_the_same_and_written_down(sites: Sites, tmp_path: Path) -> None:
    site = sites("sums", "no", "no").nodes[40]
    first, second = (read_sums(*wire.split(ask(site, rounds={"count": rounds}))) for rounds in (1, 2))
    assert (first.mean.tolist(), first.present.tolist()) == (second.mean.tolist(), second.present.tolist())
    assert (tmp_path / "north" / ASKED).read_text().count('"what":"statistics"') == 2


@pytest.mark.parametrize(
    ("term", "sections", "line"),
    [
        ("no", {}, "NotAllowed: statistics: this node's owner lets nobody know any"),
        ("sums", {"data": {"ignore": ["age"]}}, "NotAllowed: data.ignore: got"),
        (
            "sums",
            {"privacy": {"local": {"clip": 1.0, "noise": 1.0}, "criteria": "public"}},
            "noise of [privacy] covers",
        ),
    ],
)
def test_a_node_refuses_what_its_owner_or_the_experiment_does_not_need(
    sites: Sites, term: str, sections: dict[str, Any], line: str
) -> None:
    with pytest.raises(NodeFault) as refused:
        ask(sites(term, "no", "no").nodes[40], **sections)
    assert line in str(refused.value)


@pytest.mark.parametrize("missing", [0, 3, 20, 55])
def test_nothing_that_is_told_rests_on_fewer_rows_than_the_owner_allows(missing: int) -> None:
    cells = np.arange(60.0)
    cells[:missing] = np.nan
    told = SiteSums.of(["x"], cells[:, None], 10, {"y": {"rare": 4, "usual": 56}})
    assert told.words == {"y": {"(rare 0)": 0, "usual": 60}}
    assert (told.bins[told.bins > 0] >= 10).all()
    expected = {0: 60, 3: 60, 20: 40, 55: 0}[missing]
    assert told.present.tolist() == [expected]
    assert told.mean[0] == pytest.approx(np.nanmean(cells) if expected else 0)
    assert (told.fault(), "x" in scales(told)) == ("", expected > 0)


def test_owners_terms_are_read_and_held_against_what_else_they_ask() -> None:
    assert NodeConfig.read({"client": "a"}).terms.statistics is None
    assert NodeConfig.read({"client": "a", "allow": "*"}).terms.statistics == "findings"
    hides = {"client": "a", "require": "aggregation", "key": "k", "peers": "p", "statistics": "sums"}
    assert NodeConfig.read(hides).terms.statistics == "sums"
    local = {"client": "a", "require": "local", "epsilon": 8, "state": "s", "statistics": "sums"}
    for given in (local, {"client": "a", "statistics": "all"}):
        assert_refused(lambda given=given: NodeConfig.read(given), "statistics: got")
