"""Scoring lists from files."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from steelyard.cli.recommend import app
from steelyard.errors import UserError
from steelyard.recommend.evaluate import figures, load

FILES = {
    "train.tsv": "user\titem\trating\na\t1\t5\nb\t1\t4\nb\t2\t4\n",
    "test.tsv": "a\t2\t4\na\t3\t2\nb\t3\t5\nc\t1\t1\n",
    "recs.tsv": "user\titem\tscore\na\t3\t0.1\na\t2\t0.9\nb\t4\t2\nb\t3\t1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *more: str) -> dict:
    arguments = [
        "evaluate",
        *(part for name in ("train", "test") for part in (f"--{name}", str(folder / f"{name}.tsv"))),
    ]
    result = CliRunner().invoke(app, [*arguments, "--recommendations", str(folder / "recs.tsv"), *more])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout) if "json" in more else {"text": result.stdout, "notes": result.stderr}


def test_json_is_keyed_by_cutoff_then_metric(folder: Path):
    document = run(folder, "--cutoff", "2,1", "--format", "json")
    assert list(document) == ["2", "1"]
    # a: 2 (relevant), 3 (relevant); b: 4, 3 (relevant); c has no list and counts as 0.
    assert document["2"]["precision"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert document["1"]["precision"] == pytest.approx(1 / 3)
    assert document["2"]["users"] == 3
    assert document["2"]["catalogue"] == 4
    assert document["2"]["item_coverage"] == 3


def test_threshold_takes_out_poor_ratings(folder: Path):
    document = run(folder, "--cutoff", "2", "--threshold", "3", "--format", "json")
    # Relevant: a2, b3; c has none and leaves the mean.
    assert document["2"]["users"] == 2
    assert document["2"]["precision"] == pytest.approx(0.5)


def test_catalogue_widens_coverage_and_must_hold_every_item(folder: Path):
    (folder / "all.tsv").write_text("item\n" + "\n".join("123456") + "\n")
    document = run(folder, "--catalogue", str(folder / "all.tsv"), "--format", "json")
    assert document["10"]["item_coverage_share"] == pytest.approx(3 / 6)
    (folder / "few.tsv").write_text("1\n2\n3\n")
    with pytest.raises(UserError, match="1 recommended items are not in the catalogue, for one '4'"):
        run(folder, "--catalogue", str(folder / "few.tsv"))


def test_categories_and_a_second_system(folder: Path):
    (folder / "kinds.tsv").write_text("item\tcategory\n1\tx\n2\tx|y\n3\ty\n4\ty\n")
    (folder / "other.tsv").write_text("a\t4\t1\nb\t3\t1\n")
    block = run(
        *(folder, "--categories", str(folder / "kinds.tsv"), "--against", str(folder / "other.tsv")),
        *("--cutoff", "1", "--format", "json"),
    )["1"]
    # Lists: 2 and 4, so x holds 1 of 2 places and y both; training: x 3 of 3, y 1 of 3; sizes 2/4 and 3/4.
    assert block["bias_source"] == pytest.approx({"x": 2.0, "y": (1 / 3) / 0.75})
    assert block["bias_recommended"] == pytest.approx({"x": 1.0, "y": 1 / 0.75})
    assert block["bias_disparity"] == pytest.approx({"x": -0.5, "y": 2.0})
    assert block["against"]["precision"]["difference"] == pytest.approx(0)
    assert 0 < block["against"]["precision"]["t_test_p"] <= 1


def test_undefined_is_null_and_text_is_a_table(folder: Path):
    (folder / "recs.tsv").write_text("zoe\t1\t1\n")
    document = run(folder, "--format", "json")
    assert document["10"]["pop_reo"] is None
    shown = run(folder, "--cutoff", "10,1")
    assert shown["text"].splitlines()[1].split() == ["metric", "@10", "@1"]
    assert "3 users with relevant test items have no list" in shown["notes"]


def test_repeated_and_known_items_are_noted(folder: Path):
    (folder / "recs.tsv").write_text("a\t2\t1\na\t2\t3\na\t1\t2\nb\t3\t1\nc\t1\t1\n")
    case = load(folder / "train.tsv", folder / "test.tsv", folder / "recs.tsv", cutoff=10)
    assert case.lists[0, :3].tolist() == [1, 0, -1]
    assert any("1 repeated items" in note for note in case.notes)
    assert any("own training set" in note for note in case.notes)
    assert figures(case, [10])["10"]["hit_rate"] == 1.0


def test_order_is_by_score_and_ties_keep_the_file(folder: Path):
    (folder / "recs.tsv").write_text("a\t3\t1\na\t2\t1\na\t4\t7\n")
    case = load(folder / "train.tsv", folder / "test.tsv", folder / "recs.tsv", cutoff=3)
    assert case.lists[0].tolist() == [3, 2, 1]


@pytest.mark.parametrize("text", ["0", "ten", "", "5,-1"])
def test_bad_cutoffs_are_named(folder: Path, text: str):
    with pytest.raises(UserError, match="--cutoff: got"):
        run(folder, "--cutoff", text)


def test_no_relevant_item_is_an_error(folder: Path):
    with pytest.raises(UserError, match="rated 9 or more"):
        run(folder, "--threshold", "9")


def test_split_then_evaluate_from_the_command_line(tmp_path: Path):
    rows = [f"{u}\t{i}\t{3 + (u + i) % 3}\t{u * 7 + i}" for u in range(6) for i in range(8) if (u + i) % 3]
    (tmp_path / "all.tsv").write_text("\n".join([*rows, "9\t99\t5\t1"]) + "\n")
    runner = CliRunner()
    out = tmp_path / "out"
    result = runner.invoke(app, ["split", str(tmp_path / "all.tsv"), "--out", str(out), "--core", "3"])
    assert result.exit_code == 0, result.output
    assert "core: users with fewer than 3" in result.stdout
    assert {path.name for path in out.iterdir()} == {"train.tsv", "test.tsv", "catalogue.tsv"}
    files = [
        "--train",
        str(out / "train.tsv"),
        "--catalogue",
        str(out / "catalogue.tsv"),
        "--out",
        str(out / "recs.tsv"),
    ]
    result = runner.invoke(app, ["baseline", "popular", *files, "--cutoff", "3"])
    assert result.exit_code == 0, result.output
    document = run(out, "--catalogue", str(out / "catalogue.tsv"), "--format", "json")
    assert 0 <= document["10"]["ndcg"] <= 1
    assert isinstance(app, typer.Typer)


def test_communication_cost_from_the_command_line():
    brazil = ["--users", "17473", "--items", "47270", "--interactions", "599958", "--mode", "pFPL", "--pi", "0.1"]
    result = CliRunner().invoke(app, ["cost", *brazil, "--epochs", "45", "--format", "json"])
    assert result.exit_code == 0, result.output
    # Thesis table 4.4 prints five decimals.
    assert json.loads(result.stdout)["tcc_vectors"] * 1e-12 == pytest.approx(1.27623, abs=5e-6)
