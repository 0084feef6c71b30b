"""Reading experiments: every mistake is named with its field, its value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import Experiment, UserError
from steelyard.experiment.loading import build, load, recipes, to_toml
from steelyard.settings import change, parse, read_value


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("rounds.cuont=5", ["rounds.cuont", "did you mean 'count'"]),
        ("ronds.count=5", ["ronds", "did you mean 'rounds'"]),
        ("rounds.fraction=1.5", ["rounds.fraction", "1.5", "less than or equal to 1"]),
        ("rounds.fraction=0", ["rounds.fraction", "greater than 0"]),
        ("rounds.count=many", ["rounds.count", "'many'", "a whole number"]),
        ("weighing.priority=DS>LD", ["weighing.priority", "DS>LD", "VP, LD, DS"]),
        ("weighing.score=prioritised", ["weighing.score", "did you mean 'prioritized'"]),
        ('weighing.criteria=["DS","XX"]', ["XX", "known: "]),
        ('weighing.criteria=["DS","IS"]', ["IS", "sharp"]),
        ("data.source=minst", ["data.source", "did you mean 'mnist'"]),
        ("partition.scheme=natural", ["partition.scheme", "natural"]),
        ("training.learning_rate=-1", ["training.learning_rate", "-1"]),
        ("training.batch_size=0", ["training.batch_size"]),
        ("model=3", ["model"]),
        ("seed=-4", ["seed"]),
        ("name=a/b", ["name"]),
        ("kind=learn", ["kind", "learning"]),
        ("beside.fedavg.criterai=1", ["beside.fedavg.criterai", "did you mean 'criteria'"]),
        ("seed.x=4", ["seed"]),
        ("rounds", ["--set"]),
        ("=4", ["--set"]),
    ],
)
def test_mistakes_are_named_before_any_work(assignment: str, words: list[str]) -> None:
    changes = [assignment]
    if assignment.startswith("weighing.criteria"):
        changes.append('weighing.priority="DS>XX"' if "XX" in assignment else f"weighing.priority={_order(assignment)}")
    with pytest.raises(UserError) as caught:
        load("quickstart", changes)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_a_criterion_that_needs_the_servers_rows_is_refused_without_them() -> None:
    with pytest.raises(UserError, match=r"VP is measured on the server's test set.*partition.server"):
        load("mnist-iid", ['weighing.criteria=["DS","VP"]', "weighing.priority=DS>VP"])


def _order(assignment: str) -> str:
    return ">".join(read_value(assignment.partition("=")[2]))


def test_a_table_for_the_wrong_number_of_classes_is_refused_before_data_is_read() -> None:
    with pytest.raises(UserError, match=r"partition\.table"):
        build({"data": {"source": "digits"}, "partition": {"scheme": "table", "table": [[5, 5, 5]]}})


def test_every_recipe_loads_and_survives_writing_and_reading() -> None:
    assert "quickstart" in recipes()
    for name in recipes():
        described = load(name)
        assert described.name == name
        assert described.description
        assert build(parse(to_toml(described), name)) == described


def test_a_file_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("name = 'x'\nrounds = = 3\n")
    with pytest.raises(UserError, match=r"broken\.toml.*line 2"):
        load(file)
    with pytest.raises(UserError, match=r"no such recipe or file.*quickstart"):
        load("quikstart")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load(file)


@given(st.one_of(st.integers(-(2**40), 2**40), st.booleans(), st.floats(-1e9, 1e9), st.lists(st.integers(0, 9))))
def test_values_are_read_as_toml(value: object) -> None:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    assert read_value(text) == value


def test_set_takes_any_field() -> None:
    document: dict[str, object] = {}
    for assignment in ("rounds.count=5", "weighing.priority=A>B", "model.hidden=[3, 4]", "a.b.c=true"):
        change(document, assignment)
    assert document == {
        "rounds": {"count": 5},
        "weighing": {"priority": "A>B"},
        "model": {"hidden": [3, 4]},
        "a": {"b": {"c": True}},
    }


def test_changed_returns_a_checked_copy() -> None:
    described = Experiment.load("quickstart").changed({"rounds.count": 7})
    assert described.rounds.count == 7
    with pytest.raises(UserError, match=r"rounds\.count"):
        described.changed({"rounds.count": 0})


def test_show_prints_schema_with_documentation_of_fields(steelyard: Callable[..., object]) -> None:
    import json

    done = steelyard("show", "--schema")
    schema = json.loads(done.stdout)  # type: ignore[attr-defined]
    assert schema["$defs"]["RoundSettings"]["properties"]["fraction"]["description"]
    for name, section in schema["$defs"].items():
        for field, entry in section.get("properties", {}).items():
            assert entry.get("description") or "$ref" in entry, f"{name}.{field} has no documentation"


def test_reading_every_recipe_needs_no_torch() -> None:
    """`steelyard show` and `steelyard recipes` answer at once: torch and pandas take seconds to import."""
    code = (
        "import sys; from steelyard.experiment.loading import load, recipes; [load(name) for name in recipes()];"
        "print(sorted({'torch', 'pandas', 'scipy', 'sklearn', 'flwr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_change_reaches_one_of_several_sections() -> None:
    document: dict[str, Any] = {"flaws": [{"kind": "noisy"}, {"kind": "stale"}]}
    change(document, "flaws.1.amount=3")
    assert document == {"flaws": [{"kind": "noisy"}, {"kind": "stale", "amount": 3}]}
    for wrong in ("flaws.2.amount=3", "flaws.first.amount=3", "flaws.1.kind.more=3"):
        with pytest.raises(UserError, match=wrong.replace(".", r"\.")):
            change(document, wrong)
