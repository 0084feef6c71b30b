"""Which engine a run uses: the one asked for, else the one that an earlier trial found, else the fastest in a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.local import engine_cases as cases

from steelyard.clients.local.engines import choice_file
from steelyard.clients.local.engines.choice import notes_of
from steelyard.clients.local.engines.engine_trial import Trial
from steelyard.learning.models import ModelSettings


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))


def test_a_choice_is_kept_and_taken_back(tmp_path: Path) -> None:
    model, shape, classes = cases.MODELS["mlp"]
    people = cases.population(shape, classes)
    _, _, first = cases.trained("auto", people, model, cases.TRAINING["mini"])
    _, _, second = cases.trained("auto", people, model, cases.TRAINING["mini"])
    chosen = first.describe()["engine_choice"]
    assert "trial" in first.describe()["engine_reason"]
    assert second.describe()["engine_reason"] == "found by an earlier trial on this machine"
    assert second.describe()["engine_choice"] == chosen
    _, _, third = cases.trained(chosen, people, model, cases.TRAINING["mini"])
    assert third.describe()["engine_choice"] == chosen
    assert (tmp_path / "cache" / "engines.json").is_file()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "file"))
    model, shape, classes = cases.MODELS["logistic"]
    _, _, clients = cases.trained("auto", cases.population(shape, classes), model, cases.TRAINING["mini"])
    assert "trial" in clients.describe()["engine_reason"]


@pytest.mark.parametrize("recorded", ["loop", "threads", "vmap:2", "stacked:3"])
def test_a_recorded_choice_holds_against_what_this_machine_would_choose(
    recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(key: str) -> str:
        raise AssertionError("an engine that is named needs no choice")

    monkeypatch.setattr(choice_file, "read", asked)
    model, shape, classes = cases.MODELS["mlp"]
    _, _, clients = cases.trained(recorded, cases.population(shape, classes), model, cases.TRAINING["mini"])
    assert clients.describe()["engine_choice"] == recorded
    assert clients.describe()["engine_reason"] == "asked for"
    engine = clients._engine.engine  # type: ignore[union-attr]
    assert (engine.name, engine.chunk) == (recorded.partition(":")[0], int(recorded.partition(":")[2] or 0) or None)  # type: ignore[union-attr]


def test_a_kept_choice_decides_for_auto() -> None:
    model, shape, classes = cases.MODELS["mlp"]
    people = cases.population(shape, classes)
    for kept in ("threads", "stacked:2"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice_file, "read", lambda key, kept=kept: choice_file.Choice(kept))
            _, _, clients = cases.trained("auto", people, model, cases.TRAINING["mini"])
        assert clients.describe()["engine_choice"] == kept
        assert clients._engine.engine.name == kept.partition(":")[0]  # type: ignore[union-attr]


def test_what_is_to_tell_of_a_choice_is_told_by_every_run() -> None:
    """The second run finds the choice in the file; it draws at random as well."""
    people, model = cases.population((8, 8), 10), ModelSettings(name=cases.Drawing)  # type: ignore[arg-type]
    for reason in ("trial", "earlier trial"):
        _, _, clients = cases.trained("auto", people, model, cases.TRAINING["mini"])
        told = clients.describe()
        assert reason in told["engine_reason"]
        assert told["engine_notes"] == (
            "the model draws at random while it trains; clients are trained one after another"
        )


@pytest.mark.parametrize(
    ("found", "best", "words"),
    [
        (Trial({"loop": 1.0, "threads": 0.5}, {"vmap:50": "RuntimeError: no rule. Sorry"}), "threads",
         "no engine stacks this model (RuntimeError: no rule); clients are trained singly, in threads"),
        (Trial({"loop": 1.0}, {"compiled": "DoesNotFit: no Triton", "graph": "it differs", "vmap": "it differs"}),
         "loop", "no engine stacks this model (it differs); clients are trained one after another"),
        (Trial({"graph": 1.0, "loop": 9.0}, {"compiled": "DoesNotFit: no Triton"}), "graph:64",
         "engine compiled is left out (no Triton); graph is used"),
        (Trial({"compiled": 1.0, "loop": 9.0}, {"graph": "it differs"}), "compiled:10", ""),
        (Trial({"threads": 1.0, "stacked": 9.0}), "threads", ""),
    ],
)  # fmt: skip
def test_what_a_run_tells_of_a_trial(found: Trial, best: str, words: str) -> None:
    assert "".join(notes_of(found, best)) == words


def test_an_older_or_damaged_file_without_notes_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for notes in ("", ', "notes": null'):
        (tmp_path / "cache" / "engines.json").write_text(f'{{"key": {{"engine": "loop", "why": "long ago"{notes}}}}}')
        assert choice_file.read("key") is None
    assert choice_file.write("key", choice_file.Choice("threads", ("told",)), "why").engine == "threads"
    assert choice_file.read("key") == choice_file.Choice("threads", ("told",))


def test_of_two_trials_the_first_to_write_decides() -> None:
    assert choice_file.write("key", choice_file.Choice("stacked:2"), "why").engine == "stacked:2"
    assert choice_file.write("key", choice_file.Choice("threads"), "why").engine == "stacked:2"
    assert choice_file.read("key") == choice_file.Choice("stacked:2")
    assert choice_file.read("other") is None
