"""A model leaves its run: data and run are gone, and it gives the run's scores; folders of strangers are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pandas
import pytest
import torch
from tests.kit import assert_refused, inside, made_once, small
from tests.page.page_server import serving
from tests.report.test_manipulations import edited
from tests.runs.contents import chain_again
from tests.runs.signed_runs import a_key

from steelyard import Experiment, History, Model, Result
from steelyard.data import load, share_out
from steelyard.data.tables import read_tables
from steelyard.models.folder import CARD, DOCUMENT, WEIGHTS
from steelyard.models.taking import ChangedRun, take
from steelyard.page.overview import Figures
from steelyard.runs.checkpoint import read_tensors, write_tensors
from steelyard.weighing.order import chooses

SMALL_RUN = {"rounds": {"count": 2, "share": 0.5}, "compute": {"engine": "loop", "device": "cpu"}}
HELD = {"server": "held-out", "server_report": "same", "test": "local", "scheme": "iid", "clients": 3}


def hospitals(folder: Path) -> None:
    """Train on a copy of the hospitals' table, take the model, write the server's rows; data and run are gone then."""
    folder.mkdir()
    experiment: Any = Experiment.load("hospitals")
    table = read_tables([experiment.data.path], experiment.data.owner, {})
    table.frame.to_csv(folder / "all.csv", index=False)
    changes = [f"data.path={folder / 'all.csv'}", "rounds.count=2"]
    beside = [f"beside.{name}={{criteria=['DS'], algorithm={{name='{name}'}}}}" for name in ("ditto", "fine-tuned")]
    own = Experiment.load("hospitals", [*changes, *beside]).run(folder / "own-run", progress=False)
    experiment = Experiment.load("hospitals", [*changes, "rounds.keep=best"])
    result = experiment.run(folder / "run", progress=False)
    population = share_out(load(experiment.data), experiment.partition, experiment.seed)
    table.frame.iloc[population.report].to_csv(folder / "held.csv", index=False)
    va = population.by_name["va"]
    table.frame.iloc[va.test].to_csv(folder / "va.csv", index=False)
    table.frame.iloc[va.train].to_csv(folder / "va-trains-on.csv", index=False)
    result.model().save(folder / "model")
    found = verified(folder / "run", folder / "model")
    main = result.history.rounds.query("rule == 'CR>DS' and round == 2").iloc[0]
    both = pandas.concat([own.history.evaluations, result.history.evaluations])
    scores = both.query("client == 'va' and round == 2").set_index("rule")["score"]
    kept = {"server": main["server_accuracy"], "va": scores.to_dict(), "found": found}
    (folder / "stored.json").write_text(json.dumps(kept))
    shutil.copytree(folder / "run", folder / "kept-run")
    shutil.rmtree(folder / "run")
    (folder / "all.csv").unlink()


def verified(run: Path, model: Path) -> list[object]:
    answer = inside("verify", run, "--model", model, "--format", "json", folder=run.parent)
    return [answer.returncode, json.loads(answer.stdout)["checked"].get("model", "")]


@pytest.fixture(scope="session")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows that nobody has seen, and what the run's record said of them."""
    return made_once(tmp_path_factory, "hospital-model", hospitals)


def test_a_model_gives_the_run_s_score_once_data_and_run_are_gone(left: Path):
    stored = json.loads((left / "stored.json").read_text())
    answer = inside("test", "model", "held.csv", "--label", "target", "--format", "json", folder=left)
    document = json.loads(answer.stdout)
    names = [group["name"] for group in document["groups"]]
    assert (document["by"], names) == ("hospital", ["all", "cleveland", "hungarian", "switzerland", "va"])
    score = document["groups"][0]["figures"][0]
    assert (score["measure"], score["value"]) == ("accuracy", stored["server"])
    assert score["low"] < score["value"] < score["high"]
    assert (document["groups"][0]["rows"], answer.returncode) == (92, 0)
    assert stored["found"] == [0, "CR>DS, seed 1, round 2, as the run made it"]
    # the rows of a site without its column, scaled as that site's
    rows = pandas.read_csv(left / "va.csv").drop(columns="hospital")
    model = Model.load(left / "model")
    assert model.test(rows, site="va").groups[0].figures[0].value == stored["va"]["CR>DS"]
    card = (left / "model" / CARD).read_text()
    for part in (
        "Heart disease in four hospitals",
        "| age | number |",
        "CR>DS",
        "no differential privacy",
        "| va |",
        "no rule is rec",
        "categories and means and deviations of 4 single sites. They are exact",
    ):
        assert part in card, part


def test_a_client_s_own_model_and_a_newcomer_s_give_the_score_of_that_client(left: Path, tmp_path: Path):
    stored, rows = json.loads((left / "stored.json").read_text())["va"], pandas.read_csv(left / "va.csv")
    for rule, whose in (("ditto", ["--client", "va"]), ("fine-tuned", ["--adapt", left / "va-trains-on.csv"])):
        answer = inside("model", left / "own-run", "--rule", rule, *whose, "--out", rule, folder=tmp_path)
        assert answer.returncode == 0, answer.stderr
        model = Model.load(tmp_path / rule)
        # its scale is its own: no column and no --site need name the hospital
        for given in (rows, rows.drop(columns="hospital")):
            assert model.test(given).groups[0].figures[0].value == stored[rule], rule
        assert (model.preparation.sites, "hand it to that client alone" in model.card) == ({}, True)
    run = Result(left / "own-run")
    assert [test.where for test in run.model("ditto", client="va").document.origin.tests] == ["va"]
    assert_refused(lambda: run.model("ditto", client="vb"), "--client", "'vb'", "cleveland")
    assert_refused(lambda: run.model("fine-tuned", client="va"), "fine-tuned", "--adapt FILE")
    assert_refused(lambda: run.model("fedavg", client="va"), "fedavg gives all clients one model; allowed: --adapt")
    assert_refused(lambda: run.model(adapt=left / "held.csv"), "--adapt", "rows of one site")
    assert inside("verify", left / "own-run", "--model", "ditto", folder=tmp_path).returncode == 2


def test_predictions_are_rows_of_a_table(left: Path, tmp_path: Path):
    answer = inside("predict", left / "model", left / "held.csv", "--out", "p.csv", "--format", "json", folder=tmp_path)
    frame = pandas.read_csv(tmp_path / "p.csv")
    assert list(frame) == ["row", "class", "p_target <= 0", "p_target > 0"]
    assert json.loads(answer.stdout)["rows"] == len(frame) == 92
    assert np.allclose(frame["p_target <= 0"] + frame["p_target > 0"], 1)
    again = inside("predict", left / "model", left / "held.csv", "--out", "p.csv", folder=tmp_path)
    assert (again.returncode, "p.csv" in again.stderr) == (2, True)


def test_rows_unlike_those_of_training_are_told_by_name(left: Path):
    model, rows = Model.load(left / "model"), pandas.read_csv(left / "held.csv")
    # in mmol/L, where the range of mg/dL begins at 0
    notes = "".join(model.predict(rows.assign(chol=rows["chol"] / 38.67)).attrs["notes"])
    assert "column 'chol' at 'cleveland': mean 6" in notes
    assert "'chol'" not in "".join(model.predict(rows).attrs["notes"])
    renamed, gone = rows.rename(columns={"thalach": "thalac"}), rows.drop(columns="thalach")
    assert_refused(lambda: model.predict(renamed), "lacks 'thalach'", "did you mean 'thalac'?")
    # 'thal' is another column of the model, and no name for what is gone
    assert_refused(lambda: model.predict(gone), "lacks 'thalach', which the model takes")
    # no number of a single row says how it is scaled
    assert_refused(lambda: model.predict(rows[:1].assign(hospital="basel")), "one row of 'basel'", "--site")
    pandas.testing.assert_frame_equal(model.predict(rows[:1]), model.predict(rows)[:1])


def test_files_that_are_named_as_sites_are_of_those_sites(left: Path, tmp_path: Path):
    model, rows = Model.load(left / "model"), pandas.read_csv(left / "held.csv")
    for name, mine in rows.groupby("hospital"):
        mine.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv", index=False)
    whole, files = model.test(rows), model.test(tmp_path)
    assert (files.by, files.groups) == ("file", whole.groups)


def test_tests_have_every_measure_of_their_rows(left: Path):
    model = Model.load(left / "model")
    rows = pandas.read_csv(left / "held.csv")
    found = {figure.measure: figure for figure in model.test(rows).groups[0].figures}
    names = np.where(rows["target"] > 0, "target > 0", "target <= 0")
    assert model.test(rows, names).groups == model.test(rows).groups
    assert_refused(lambda: model.test(rows, names[1:]), "got 91 for 92 rows")
    chances, ill = model.predict(rows)["p_target > 0"].to_numpy(), (rows["target"] > 0).to_numpy()
    pairs = chances[ill][:, None] - chances[~ill][None]
    assert found["ROC AUC"].value == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2, abs=0.01)
    assert found["Brier score"].value == pytest.approx(((chances - ill) ** 2).mean(), abs=1e-6)
    for measure in ("accuracy", "ROC AUC", "Brier score", "sensitivity"):
        assert found[measure].low < found[measure].value < found[measure].high, measure
    assert "macro F1" in found


def test_a_model_of_a_changed_run_is_none_and_its_folder_is_held_to_the_run(left: Path, tmp_path: Path):
    run, model = shutil.copytree(left / "kept-run", tmp_path / "run"), left / "model"
    by_rule = inside("model", run, "--rule", "fedavg", "--out", "other", "--format", "json", folder=tmp_path)
    assert json.loads(by_rule.stdout)["origin"]["rule"] == "fedavg"
    document = json.loads((tmp_path / "other" / DOCUMENT).read_text())
    document["origin"]["rule"] = "CR>DS"
    (tmp_path / "other" / DOCUMENT).write_text(json.dumps(document))
    assert verified(run, tmp_path / "other") == [1, ""]
    for changes in ({"origin__threshold": 0.9}, {"network__settings": {"name": "logistic", "bias": False}}):
        other = shutil.copytree(model, tmp_path / f"other-{next(iter(changes))}")
        json_changed(**changes)(other)
        assert verified(run, other) == [1, ""], changes
    assert_refused(lambda: Result(run).model(round=3), "got 3", "which are")
    assert_refused(lambda: Result(run).model("nobody"), "'nobody'")
    edited(run, EDITS["a range"])
    answer = inside("model", run, "--out", "none", folder=tmp_path)
    assert (answer.returncode, (tmp_path / "none").exists(), "changed" in answer.stderr) == (1, False, True)
    assert (inside("model", run, "--out", model, folder=tmp_path).returncode) == 1


def noted(before: str, after: str, key: str = "preparations") -> str:
    return f"UPDATE info SET value = replace(value, '{before}', '{after}') WHERE key = '{key}'"


def weights_moved(prefix: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (file,) = (folder / "checkpoints").iterdir()
        write_tensors(file, {name: one + name.startswith(prefix) for name, one in read_tensors(file).items()})

    return change


def other_network(folder: Path) -> None:
    text = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(text.replace('"logistic"', '"linear"'))
    edited(folder, noted('"logistic"', '"linear"', "experiment_text"))


EDITS: dict[str, str | Callable[[Path], object]] = {
    "weights": weights_moved("models/"),
    "weights of the best round": weights_moved("best/"),
    "a range": noted("77.0", "99.0"),
    "a scale": noted('mean\\":[', 'mean\\":[9'),
    "names of classes": noted("target > 0", "healthy"),
    "the label": noted('label\\":\\"target', 'label\\":\\"sex'),
    "order of columns": noted('\\"chol\\"', '\\"oldpeak\\"'),
    "the best round": "UPDATE checkpoints SET states = replace(states, '{\"round\": 2, ', '{\"round\": 1, ')",
    "the network": other_network,
    "the server's score": "UPDATE rounds SET server_metrics = NULL, server_accuracy = 0.99",
    "a site's rows": "UPDATE updates SET samples = zeroblob(length(samples))",
    "the rule": "UPDATE federations SET rule = 'mine' WHERE rule = 'fedavg'",
}


def test_there_is_no_model_of_a_run_of_which_anything_was_changed(left: Path, tmp_path: Path):
    run = left / "kept-run"
    for name, edit in EDITS.items():
        other = shutil.copytree(run, tmp_path / name)
        edited(other, edit)
        with pytest.raises(ChangedRun):
            take(other)
    # Who computes the closing record again is found by the final hash, or by keys where the run was signed.
    forged = shutil.copytree(run, tmp_path / "forged")
    edited(forged, EDITS["names of classes"])
    chain_again(forged, None)
    assert "healthy" in take(forged).preparation.target.names
    kept = History(run).chain.closing
    assert take(run, head=kept).document == take(run).document
    a_key(tmp_path / "keys" / "server")
    for known in ({"head": kept}, {"keys": tmp_path / "keys"}):
        with pytest.raises(ChangedRun):
            take(forged, **known)


def test_the_page_gives_the_model_of_a_run_and_runs_no_code_for_it(left: Path, tmp_path: Path):
    with serving(left) as page:
        answer = page.get("/api/model?run=kept-run")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
        ZipFile(BytesIO(answer.content)).extractall(tmp_path)
        assert page.get("/api/model?run=nothing").status_code == 400
    assert weights_of(tmp_path / "model") == weights_of(left / "model")
    assert Model.load(tmp_path / "model").document == Model.load(left / "model").document


def test_figures_of_a_group_stand_under_their_own_headings(left: Path, tmp_path: Path):
    rows = pandas.read_csv(left / "held.csv")
    # a hospital with one class has no ROC AUC
    rows[(rows["hospital"] != "va") | (rows["target"] > 0)].to_csv(tmp_path / "one-class.csv", index=False)
    answer = inside("test", left / "model", "one-class.csv", "--format", "csv", folder=tmp_path)
    found = pandas.read_csv(StringIO(answer.stdout)).set_index("hospital")["ROC AUC"]
    assert (found["va"], found["all"][:2]) == ("–", "0.")


def test_the_card_has_no_tests_that_do_not_report_on_the_model(tmp_path: Path):
    fields: Any = {
        "rounds": {"count": 1, "keep": "best", "measure": "roc-auc"},
        "partition": {"clients": 5, "test": "local", "scheme": "iid"},
        "beside": {"tuned": {"criteria": ["DS"], "algorithm": {"name": "fine-tuned"}}},
    }
    result = small(**fields).run(tmp_path / "run")
    clients = set(result.history.evaluations["client"])
    model, tuned = result.model(), result.model("tuned")
    told = {test.where for test in model.document.origin.tests}
    assert told == {name for name in clients if not chooses(name)} != clients
    assert "clients that chose the round are left out" in model.card
    assert tuned.document.origin.tests == []
    assert "This is the global model." in tuned.card


CLASSES = {"clients": 5, "test": "local", "scheme": "labels", "labels_per_client": 1}


def test_the_card_says_why_a_site_has_no_score(tmp_path: Path):
    fields: Any = {"rounds": {"count": 1, "measure": "roc-auc"}, "partition": CLASSES}
    result = small(**fields).run(tmp_path / "run")
    assert result.model().card.count("none: its test rows say nothing of ROC AUC: one class alone") == 5


def weights_of(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


# images, survival, a network of somebody's own


def pictures(folder: Path) -> tuple[dict[str, Any], Any]:
    from PIL import Image

    digits: Any = small().data.read()
    for row in range(80):
        part = "test" if row % 4 == 0 else "train"
        place = folder / "digits" / part / ("even" if int(digits.labels[row]) % 2 == 0 else "odd")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * digits.features[row, 0]).to(torch.uint8).numpy()).save(place / f"{row}.png")
    data = {"source": "images", "path": folder / "digits", "size": 8, "colours": "grey", "held_out": "folder"}
    return {"data": {**data, "normalise": "standard"}, "model": {"name": "cnn"}}, [folder / "digits" / "test"]


def patients(folder: Path, **fields: Any) -> tuple[dict[str, Any], Any]:
    draw = np.random.default_rng(1)
    frame = pandas.DataFrame(
        {"age": draw.normal(60, 10, 90), "dose": draw.normal(size=90), "sex": ["m", "f", "f"] * 30}
    )
    frame["days"], frame["died"] = 1000 / frame["age"] + draw.random(90), ["yes", "no"] * 45
    frame["part"] = ["train", "test", "train"] * 30
    frame.to_csv(folder / "patients.csv", index=False)
    frame[frame["part"] == "test"].to_csv(folder / "held.csv", index=False)
    survival = {"labels": "days", "event": "died", "task": "survival"}
    data = {"source": "csv", "path": folder / "patients.csv", "held_out": "part", "normalise": "standard"}
    return {"data": {**data, **(fields or survival)}, "model": {"name": "linear"}}, [folder / "held.csv"]


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, feature_shape, outputs, wide=3):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(feature_shape[0], wide), torch.nn.BatchNorm1d(wide)
        self.last = torch.nn.Linear(wide, outputs)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())
"""


def own(folder: Path) -> tuple[dict[str, Any], Any]:
    sections, held = patients(folder, labels="died", ignore=["days"])
    (folder / "net.py").write_text(NET)
    return {**sections, "model": {"name": f"{folder / 'net.py'}:Net", "arguments": {"wide": 5}}}, held


def texts(folder: Path) -> tuple[dict[str, Any], Any]:
    for part in ("train", "test"):
        # of the rows of Sent140 the fifth cell is the text, and 4 is a good mood
        rows = [["", "", "", "", f"{word} day {number}"] for number in range(4) for word in ("good", "bad")]
        users = {user: {"x": rows, "y": [4, 0] * 4} for user in ("ann", "bob")}
        place = folder / "tweets" / part / "all.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({"users": list(users), "num_samples": [8, 8], "user_data": users}))
    data = {"source": "leaf", "path": folder / "tweets", "length": 3, "vocabulary": 20}
    model = {"name": "lstm", "arguments": {"tokens": 20, "hidden": 2}}
    return {"data": data, "model": model}, [folder / "tweets" / "test" / "all.json"]


@pytest.mark.parametrize(
    ("made", "figure"), [(pictures, "accuracy"), (patients, "c_index"), (own, "accuracy"), (texts, "accuracy")]
)
def test_other_kinds_of_models_give_the_run_s_score(tmp_path: Path, made: Callable[..., Any], figure: str):
    sections, held = made(tmp_path)
    Experiment(**SMALL_RUN, partition=HELD, weighing={"criteria": ["DS"]}, **sections).run(tmp_path / "run")
    rounds = History(tmp_path / "run").rounds.iloc[-1]
    stored = rounds["server_accuracy"] if figure == "accuracy" else json.loads(rounds["server_metrics"])[figure]
    assert_refused(lambda: Result(tmp_path / "run").model(round="best", trust=True), "got best", "rounds.keep")
    if made is own:
        assert_refused(Result(tmp_path / "run").model, "Net", "trust=True")
        assert_refused(lambda: Figures(tmp_path).model("run"), "Net", "--trust")
    Result(tmp_path / "run").model(trust=True).save(tmp_path / "model")
    if made is own:
        shutil.rmtree(tmp_path / "run" / "code")
        assert_refused(lambda: Result(tmp_path / "run").model(trust=True), "was changed")
    shutil.rmtree(tmp_path / "run")
    for gone in ("digits/train", "patients.csv", "net.py", "tweets/train"):
        shutil.rmtree(tmp_path / gone) if (tmp_path / gone).is_dir() else (tmp_path / gone).unlink(missing_ok=True)
    if made is own:
        assert_refused(lambda: Model.load(tmp_path / "model"), "code/net.py", "trust=True")
    model = Model.load(tmp_path / "model", trust=True)
    found = model.test(held).groups[0].figures[0]
    assert found.value == pytest.approx(stored, abs=1e-12)
    assert found.low is not None
    frame = model.predict(held)
    columns = {pictures: ["class", "p_even", "p_odd"], patients: ["risk"], texts: ["class", "p_0", "p_1"]}
    assert list(frame)[1:] == columns.get(made, ["class", "p_no", "p_yes"])
    if made is pictures:
        names = [held[0] / name for name in frame["image"][:3]]
        pandas.testing.assert_frame_equal(model.predict(names).drop(columns="image"), frame[:3].drop(columns="image"))
        read = model.predict([str(held[0])])
        pandas.testing.assert_frame_equal(read, frame)
    assert_refused(lambda: model.predict(Path("tweets/absent")), "tweets/absent: no such file or folder; expected")


# folders of strangers


def json_changed(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        document = json.loads((folder / DOCUMENT).read_text())
        for name, value in fields.items():
            section, _, field = name.partition("__")
            document[section] = {**document[section], field: value} if field else value
        (folder / DOCUMENT).write_text(json.dumps(document))

    return change


def weights_changed(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def linked(folder: Path) -> None:
    (folder / CARD).unlink()
    (folder / CARD).symlink_to("/etc/passwd")


CODE = {"sha256": "0" * 64, "size": 1}
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed weights": (weights_changed, "model.safetensors: was changed"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "model.safetensors: is missing"),
    "a link": (linked, "card.md: is a link"),
    "no document": (lambda folder: (folder / DOCUMENT).unlink(), "holds no model.json"),
    "no JSON": (lambda folder: (folder / DOCUMENT).write_text("{"), "model.json: all of it"),
    "deep JSON": (lambda folder: (folder / DOCUMENT).write_text("[" * 100_000), "model.json"),
    "an unknown field": (json_changed(more=1), "model.json: more"),
    "another version": (json_changed(version=2), "model.json: version"),
    "another network": (json_changed(network__settings={"name": "mlp", "hidden": [1]}), "model.safetensors: the names"),
    "another shape": (json_changed(preparation__shape=[5]), "model.safetensors: layers.0."),
    "too large a network": (json_changed(network__settings={"name": "mlp", "hidden": [99_999] * 5}), "parameters"),
    "a network that fills the memory": (
        json_changed(network__settings={"name": "transformer", "arguments": {"wide": 4_000_000}}),
        "network: takes",
    ),
    "no such network": (json_changed(network__settings={"name": "nothing"}), "network.settings: name"),
    "code that is not there": (json_changed(code={"name": "net.py", **CODE}), "code/net.py"),
    "code elsewhere": (json_changed(code={"name": "../net.py", **CODE}), "model.json: code.name"),
    "code unsaid": (json_changed(network__settings={"name": "/tmp/net.py:Net"}), "model.json: code"),
    "classes that no output is of": (json_changed(network__outputs=3), "network.outputs"),
    "an endless row": (json_changed(preparation__shape=[10**9]), "model.json: preparation.shape.0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_that_is_not_whole_or_not_ours_is_refused_in_one_line(left: Path, tmp_path: Path, name: str):
    folder = shutil.copytree(left / "model", tmp_path / "model")
    change, told = HOSTILE[name]
    change(folder)
    assert_refused(lambda: Model.load(folder, trust=True), folder, told)


def test_weights_that_are_no_numbers_predict_nothing(left: Path):
    model = Model.load(left / "model")
    for weights in model.network.parameters():
        weights.data.fill_(float("nan"))
    assert_refused(lambda: model.test(left / "held.csv"), "no finite number", "row 1")
    assert_refused(lambda: model.predict(left / "held.csv"), "no finite number", "row 1")
