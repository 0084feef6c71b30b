"""Documents between the rooms report, cli and page have types; no dictionary of anything is handed over."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError
from tests.report.made_run import make_run

from steelyard.report.contents import contents
from steelyard.report.documents import comparison, page, run, shared
from steelyard.report.reweigh import reweigh
from steelyard.report.view import RunView
from steelyard.result import Result
from steelyard.weighing.rule import WeighingSettings

SOURCE = Path(__file__).resolve().parents[2] / "src" / "steelyard"
ROOMS = ("report", "cli", "page", "result.py", "api.py", "sweeps/result.py", "sweeps/table.py", "sweeps/figure.py")
UNTYPED = ("dict[str, Any]", "Mapping[str, Any]", "dict[str, object]", "Mapping[str, object]")
ALLOWED = {
    # Rows of one figure, on their way into a data frame.
    "report/figures/shared.py lists",
    # What a browser sent: checked field by field against the form.
    "page/form.py assignments",
    "page/jobs.py Jobs.start",
}


def crossing(path: Path) -> Iterator[str]:
    """Yield the functions of a file that others can call and that take or return a dictionary of anything."""
    name = path.relative_to(SOURCE).as_posix()

    def look(body: list[ast.stmt], before: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from look(node.body, f"{node.name}.")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found = [each.annotation for each in every] + [node.returns]
                if any(mark in ast.unparse(each) for each in found if each is not None for mark in UNTYPED):
                    yield f"{name} {before}{node.name}"
            if isinstance(node, ast.AnnAssign) and any(mark in ast.unparse(node.annotation) for mark in UNTYPED):
                yield f"{name} {before}{ast.unparse(node.target)}"

    yield from look(ast.parse(path.read_text(encoding="utf-8")).body, "")


def test_no_untyped_document_crosses_between_rooms() -> None:
    files = [path for room in ROOMS for path in sorted([SOURCE / room, *(SOURCE / room).rglob("*.py")])]
    found = {name for path in files if path.suffix == ".py" for name in crossing(path)}
    assert found - ALLOWED == set()
    assert ALLOWED - found == set(), "an exception that is not needed any more"


def check(document: object, declared: object) -> None:
    """Hold a document against its type, values too; a key that the type does not declare is dropped, and so noticed."""
    kept = TypeAdapter(declared).validate_python(document)
    assert json.dumps(kept, sort_keys=True) == json.dumps(document, sort_keys=True)


def test_documents_have_the_keys_of_their_types(tmp_path: Path) -> None:
    result = Result(make_run(tmp_path / "run", rounds=3, clients=8, seeds=(1, 2)))
    view = RunView([result.history])
    reweighed = reweigh(view, view.federation("VP>DS"), WeighingSettings(criteria=("DS",)))
    check(result.summary, run.Summary)
    check(result.table, comparison.Comparison)
    check(contents(view), page.ReportData)
    check(reweighed, run.Reweighed)
    assert json.loads(json.dumps(result.table)).keys() == result.table.keys()


def test_a_key_too_many_or_too_few_is_noticed() -> None:
    whole = {"head": "", "round": -1, "problem": ""}
    check(whole, shared.Chain)
    for wrong in (whole | {"more": 1}, {"head": ""}):
        with pytest.raises((AssertionError, ValidationError)):
            check(wrong, shared.Chain)
