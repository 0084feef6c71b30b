"""The house as docs/architecture.md lists it: imports run downward only, and nowhere in a circle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


def rooms() -> list[str]:
    """The rooms from the ground up: the first code block under "Rooms" in the docs is the one list there is."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.split("## Rooms", 1)[1].split("```", 2)[1]
    return [line.split()[0] for line in block.splitlines()[1:] if line.strip()]


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in SOURCE.rglob("*.py"):
        found[".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module of ours that a file imports, inside functions too; what only type checkers read is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
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


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that reach each other (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def test_imports_run_downward_only() -> None:
    assert upward(graph(), rooms()) == []


def test_there_is_no_circle() -> None:
    assert circles(graph()) == []


def test_the_checks_notice() -> None:
    """A deliberate arrow upward and a deliberate circle are found."""
    listed = ["errors", "weighing", "rounds"]
    edges = {"steelyard.weighing.rule": {"steelyard.rounds.loop"}, "steelyard.rounds.loop": {"steelyard.weighing.rule"}}
    assert upward(edges, listed) == ["steelyard.weighing.rule -> steelyard.rounds.loop"]
    assert circles(edges) == [["steelyard.rounds.loop", "steelyard.weighing.rule"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def silent_late_imports(source: str) -> list[str]:
    """Functions that import something without a word why, in themselves or in the docstring of their file."""
    if not re.search(r"^[ \t]+(?:import|from)\s", source, re.MULTILINE):
        return []  # no import but those at the left margin
    tree = ast.parse(source)
    if "speed of start" in (ast.get_docstring(tree) or "").replace("\n", " "):
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        function.name
        for function in functions
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
        and "speed of start" not in (ast.get_source_segment(source, function) or "").lower()
    ]


def test_late_imports_say_why() -> None:
    """An import inside a function stands there for speed of start, and the function or its file says so."""
    silent = {
        name: found
        for name, path in modules().items()
        if (found := silent_late_imports(path.read_text(encoding="utf-8")))
    }
    assert silent == {}


def test_a_late_import_without_a_word_is_noticed() -> None:
    explained = "def f():\n    # For speed of start.\n    import a\n"
    assert silent_late_imports(explained) == []
    assert silent_late_imports(explained + "def g():\n    from b import c\n") == ["g"]
    assert silent_late_imports('"""Late imports: for\nspeed of start."""\n' + "def g():\n    import c\n") == []


def test_every_room_is_there() -> None:
    for room in rooms():
        path = SOURCE / "steelyard" / Path(*room.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), room
