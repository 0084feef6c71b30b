"""What can be put to the test: a rule's words, a file with a criterion or an algorithm, an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.arena.made import SUITE, trusting

from steelyard import UserError
from steelyard.arena.candidate import read_candidates

CRITERION = """
from steelyard import server_criterion
@server_criterion("{name}", description="every client alike")
def alike(view):
    return [1.0] * len(view.clients)
"""
ALGORITHM = """
from steelyard import Algorithm, algorithm
@algorithm("arena-half")
class Half(Algorithm):
    '''Goes half of the way.'''
    def step(self, server):
        return server.parameters + 0.5 * server.change, {}
"""


def test_a_rule_by_name_is_read_as_compare_reads_it() -> None:
    (found,) = read_candidates("feddisco(a=0.5)", None, SUITE, trusting)
    assert found.settings.policy is not None
    assert found.settings.policy.parameters == {"a": 0.5}


def test_a_file_with_one_criterion_is_that_criterion(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CRITERION.format(name="ALIKE"))
    (found,) = read_candidates(str(tmp_path / "mine.py"), None, SUITE, trusting)
    assert (found.label, found.settings.criteria) == ("ALIKE", ("ALIKE",))
    assert found.settings.plugins == (str((tmp_path / "mine.py").resolve()),)
    (joined,) = read_candidates(str(tmp_path / "mine.py"), "VP>ALIKE/max", SUITE, trusting)
    assert joined.settings.criteria == ("VP", "ALIKE")


def test_a_file_with_an_algorithm_is_that_algorithm(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(ALGORITHM)
    (found,) = read_candidates(str(tmp_path / "half.py"), None, SUITE, trusting)
    assert found.label == "arena-half"
    assert found.settings.algorithm is not None
    assert found.settings.algorithm.plugins == (str((tmp_path / "half.py").resolve()),)


def test_a_file_with_two_needs_to_say_which(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(CRITERION.format(name="FIRST_IDEA") + CRITERION.format(name="SECOND_IDEA"))
    with pytest.raises(UserError, match=r"two\.py: defines FIRST_IDEA, SECOND_IDEA; allowed: --rule"):
        read_candidates(str(tmp_path / "two.py"), None, SUITE, trusting)
    (found,) = read_candidates(str(tmp_path / "two.py"), "SECOND_IDEA", SUITE, trusting)
    assert found.label == "SECOND_IDEA"


def test_an_experiment_gives_its_main_rule_and_algorithm(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[partition]\nclients = 5\n[weighing]\ncriteria = ["LD", "DS"]\nnormalise = "max"\n'
        '[algorithm]\nname = "fedprox"\nmu = 0.5\n[beside.fedavg]\ncriteria = ["DS"]\n'
    )
    (found,) = read_candidates(str(tmp_path / "mine.toml"), None, SUITE, trusting)
    assert found.settings.criteria == ("LD", "DS")
    assert found.settings.algorithm is not None
    assert found.settings.algorithm.parameters == {"mu": 0.5}


def test_code_is_asked_for_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    def refusing(where: str, code: Mapping[str, str]) -> None:
        raise UserError(f"{where}: not trusted")

    with pytest.raises(UserError, match="not trusted"):
        read_candidates(str(tmp_path / "mine.py"), None, SUITE, refusing)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("candidate", "rule", "says"),
    [
        ("NOPE", None, "names no rule or criterion 'NOPE'"),
        ("fedavg", None, "which candidates are held against"),
        ("DS,LD,MD,EQ,VP", None, "got 5 rules"),
        ("EQ", "LD", "--rule: got 'LD' beside the rule 'EQ'"),
        ("missing.py", None, "there is no file 'missing.py'"),
        ("missing.toml", None, "no such recipe or file"),
    ],
)
def test_what_cannot_be_tested_is_one_line(candidate: str, rule: str | None, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_candidates(candidate, rule, SUITE, trusting)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_without_a_rule_and_a_taken_name_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="defines no criterion and no algorithm"):
        read_candidates(str(tmp_path / "nothing.py"), None, SUITE, trusting)
    (tmp_path / "taken.toml").write_text('[partition]\nclients = 5\n[weighing]\ncriteria = ["LD"]\nname = "EQ"\n')
    with pytest.raises(UserError, match="another rule by the name 'EQ'"):
        read_candidates(str(tmp_path / "taken.toml"), None, SUITE, trusting)
