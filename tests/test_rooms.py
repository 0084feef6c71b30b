"""The house as docs/architecture.md lists it: imports run downward only; what is public is on its page."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import steelyard
from steelyard.base import errors

ROOT = Path(__file__).resolve().parent.parent

SOURCE = ROOT / "src"


def rooms() -> list[str]:
    """The rooms from the ground up: the first code block under "Rooms" in the docs is the one list there is."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.split("## Rooms", 1)[1].split("```", 2)[1]
    return [line.split()[0] for line in block.splitlines()[1:] if line.strip()]


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module of ours that a file imports, inside functions too; what only type checkers read is left out."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    typing_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; allowed: absolute ones"
            base = node.module or ""
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                if target in known:
                    yield target


@functools.cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: {target for target in imports(path, known) if target != name} for name, path in known.items()}


def floor_of(module: str, listed: list[str]) -> int:
    """The floor of a module: that of the longest listed name that it lies under; the package itself is the ground."""
    inner = module.removeprefix("steelyard").removeprefix(".")
    fitting = [room for room in listed if inner == room or inner.startswith(f"{room}.")]
    if not inner:
        return -1
    assert fitting, f"{module} lies in no room of docs/architecture.md"
    return listed.index(max(fitting, key=len))


def upward(edges: dict[str, set[str]], listed: list[str]) -> list[str]:
    return sorted(
        f"{name} -> {target}"
        for name, targets in edges.items()
        for target in targets
        if floor_of(target, listed) > floor_of(name, listed)
    )


@functools.cache
def modules() -> dict[str, Path]:
    files = {path.relative_to(SOURCE).with_suffix("").parts: path for path in SOURCE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in files.items()}


def circles(edges: dict[str, set[str]]) -> set[str]:
    """Return the files that lie on a circle or between two: those that remain when leaves at either end are taken."""
    left = set(edges)
    while True:
        named = {target for name in left for target in edges[name]}
        kept = {name for name in left & named if edges[name] & left}
        if kept == left:
            return left
        left = kept


def test_imports_run_downward_only_and_nowhere_in_a_circle() -> None:
    listed = rooms()
    assert upward(graph(), listed) == []
    assert circles(graph()) == set()
    for room in listed:
        path = SOURCE / "steelyard" / Path(*room.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), room


def test_an_arrow_upward_and_a_circle_are_noticed() -> None:
    edges = {"steelyard.weighing.rule": {"steelyard.rounds.loop"}, "steelyard.rounds.loop": {"steelyard.weighing.rule"}}
    assert upward(edges, ["weighing", "rounds"]) == ["steelyard.weighing.rule -> steelyard.rounds.loop"]
    assert circles({**edges, "a": {"b"}, "b": set()}) == set(edges)


def silent_late_imports(source: str) -> list[str]:
    """Return functions that import something without a word why, in themselves or in the docstring of their file."""

    def told(text: str) -> bool:
        return any(reason in text.replace("\n", " ").lower() for reason in ("speed of start", "in an extra"))

    tree = ast.parse(source)
    if told(ast.get_docstring(tree) or ""):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds) and any(isinstance(one, ast.Import | ast.ImportFrom) for one in ast.walk(node))
    ]
    return [node.name for node in late if not told(ast.get_source_segment(source, node) or "")]


def test_late_imports_say_why() -> None:
    """An import inside a function stands there for speed of start or for an extra; the function or its file says so."""
    explained = "def f():\n    # For speed of start.\n    import a\n"
    assert silent_late_imports(explained + "def g():\n    from b import c\n") == ["g"]
    late = re.compile(r"^[ \t]+(?:import|from)\s", re.MULTILINE)
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    found = {name: silent_late_imports(text) for name, text in texts.items() if late.search(text)}
    assert {name: functions for name, functions in found.items() if functions} == {}


PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")

INTERNAL = {
    # examples/recommender.py looks behind the curtain on purpose.
    "steelyard.experiment.run_audits.watch",
}


def test_every_public_name_and_every_name_that_guides_import_is_on_the_page() -> None:
    named = {block.rsplit(".", 1)[1] for block in re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)}
    named |= set(re.findall(r"`(\w+)`", PAGE))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.*")]
    used: set[tuple[str, str]] = set()
    for text in (page.read_text(encoding="utf-8") for page in pages if page.name != "architecture.md"):
        for module, names in re.findall(r"from (steelyard[\w.]*) import \(?([\w, ]+)", text):
            used |= {(module, name.strip()) for name in names.split(",") if name.strip()}
        used |= {("steelyard", name) for name in re.findall(r"\bsteelyard\.([a-z_]+)\(", text)}
    assert {"share_out", "Simulation", "WeighedAggregator"} <= {name for _, name in used}
    assert not set(steelyard.__all__) - named
    assert not {f"{module}.{name}" for module, name in used if name not in named} - INTERNAL


def test_a_name_that_goes_still_works_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steelyard, "_DEPRECATED", {"weigh_clients": ("weigh", "0.3.0")})
    monkeypatch.setattr(errors, "_deprecated", set())
    with pytest.warns(FutureWarning) as shown:
        found = [steelyard.weigh_clients for _ in range(2)]
    assert found == [steelyard.weigh, steelyard.weigh]
    (message,) = [str(each.message) for each in shown]
    assert [part for part in ("steelyard.weigh_clients", "use steelyard.weigh", "0.3.0") if part not in message] == []
    assert shown[0].filename == __file__
