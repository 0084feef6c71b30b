"""The suites that come with the package: frozen, whole, and each scene runnable."""

from __future__ import annotations

import pytest
from tests.arena.made import SUITE

from steelyard import UserError
from steelyard.arena.suite import load_suite, suites
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.rule_words import parse_rules

FROZEN = {
    ("small", 2): "771a6df38607fbf917346ac39895f2b28f06cf16a7d10762d34a500743ce5f60",
    ("standard", 4): "2b2b5224c3318a1df4da555ccbc2ff90d25a4bbb1885a55848d77e1c6a5d0641",
    ("full", 4): "5097c391f0b69d7df163aa5ec85c09594153861b84338c09dd4f0be5fd24349c",
}
"""A suite that was published under a version is never changed: another file is another version, with a line here."""


def test_published_suites_are_as_they_were() -> None:
    assert {(suite.name, suite.version): suite.sha256 for suite in map(load_suite, suites())} == FROZEN


@pytest.mark.parametrize("name", SUITE.scenes)
def test_rows_that_report_choose_nothing_in_any_scene(name: str) -> None:
    experiment = SUITE.experiment(name)
    assert isinstance(experiment, LearningDescription)
    assert experiment.partition.server_report == "apart"
    assert experiment.data.source == "digits" or str(experiment.data.path).startswith("included/")
    assert next(iter(parse_rules(SUITE.rivals, experiment))) == SUITE.baseline


def test_seeds_that_choose_never_report() -> None:
    assert not set(SUITE.choose) & set(SUITE.report)


def test_a_scene_differs_from_its_base_in_what_it_says() -> None:
    clean, sizes = SUITE.experiment("clean"), SUITE.experiment("sizes", ["rounds.count=2"])
    assert isinstance(clean, LearningDescription)
    assert isinstance(sizes, LearningDescription)
    assert (clean.partition.size_spread, sizes.partition.size_spread) == (0.8, 1.5)
    assert (clean.partition.clients, sizes.partition.clients) == (20, 20)
    assert (clean.rounds.count, sizes.rounds.count) == (12, 2)


def test_unknown_names_are_one_line() -> None:
    with pytest.raises(UserError, match=r"--suite: got 'smal' \(did you mean 'small'\?\)"):
        load_suite("smal")
    with pytest.raises(UserError, match=r"--scenes: got 'hospital' \(did you mean 'hospitals'\?\)"):
        SUITE.chosen(["hospital"])
    assert SUITE.chosen(["sizes", "clean"]) == ("clean", "sizes")
