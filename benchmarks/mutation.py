"""Would the tests notice a mistake? `python -m benchmarks.mutation ROOM [--mutants 300] [--seed 1] [--jobs N]`.

Runs mutmut (3.8, `pip install mutmut`) over one room in a copy of the tree, with that room's own tests: all mutants, or
as many as `--mutants` says, drawn by a fixed seed. The last line is JSON. A mutant that no test reaches counts as
survived; one that does not end counts as killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARENA = ("suite", "candidate", "arena", "verdict", "arena_page", "archive", "checking")
STUDIES = ("study", "sweep", "sweep_table", "attack", "participation", "charts")
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "weighing": (("weighing/*.py",), ("weighing",)),
    "rounds": (("rounds/*.py",), ("rounds", "algorithms")),
    # Runs that are joined have their tests with the experiments that they are parts of.
    "runs": (
        ("runs/*.py",),
        ("runs", "report/test_verification.py", "report/test_manipulations.py", "experiment/test_joining.py"),
    ),
    "privacy": (("privacy/*.py",), ("privacy",)),
    "defence": (("defence/*.py",), ("defence",)),
    "signing": (("proof/*.py",), ("proof",)),
    "statistics": (("base/measures.py", "report/statistics.py"), ("base/test_measures.py", "report")),
    "metrics": (("recommend/metrics.py",), ("recommend/test_metrics.py",)),
    # Explanations need a trained recommender, and tables of shares a comparison at several.
    "report": (
        ("report/*.py",),
        ("report", "recommend/kgflex/test_kgflex_experiment.py", "studies/test_participation.py"),
    ),
    "data": (("data/*.py",), ("data",)),
    # What an experiment of another kind is, what a node allows, and what an audit finds have rooms of their own.
    "experiment": (
        ("experiment/*.py",),
        (
            "experiment",
            "recommend/test_recommend_experiment.py",
            "recommend/test_audit.py",
            "federate/test_node_rules.py",
        ),
    ),
    # What makes, judges and checks an arena, from its suite to its page; every other study is in `studies`.
    "arena": (
        tuple(f"studies/{name}.py" for name in ARENA),
        tuple(f"studies/test_{name}.py" for name in ("suite", "arena", "verdict", "archive")),
    ),
    "studies": (
        tuple(f"studies/{name}.py" for name in STUDIES),
        # Gains and ranks are drawn beside sweeps.
        tuple(f"studies/test_{name}.py" for name in (*STUDIES[:5], "jobs", "verdict")),
    ),
    "adapters": (("adapters/*.py",), ("adapters",)),
}
"""For each room the files that are changed, below src/steelyard, and the tests that should notice."""
COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
SITE = """import os
if os.environ.get("MUTANT_UNDER_TEST") == "stats":
    import mutmut.stats
    mutmut.stats.record_trampoline_hit = lambda name, caller=None: None
"""
"""Read first by every process that a test starts: mutmut's count of what tests reach fails in other folders."""
KILLED, SURVIVED, NO_TESTS = "killed", "survived", "no tests"
ENDS = {0: SURVIVED, 5: NO_TESTS, 33: NO_TESTS}
"""mutmut's exit codes of a mutant that lives; every other code is a test that failed, an error, or no end."""


def copied(folder: Path, room: str, deselected: list[str]) -> None:
    """Copy the tree, with mutmut's settings for one room."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    files, tests = ROOMS[room]
    settings = {
        "source_paths": ["src"],
        "only_mutate": [f"src/steelyard/{name}" for name in files],
        "also_copy": [name for name in COPIED if name not in ("src", "tests", "pyproject.toml")],
        "pytest_add_cli_args": [
            *("-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"),
            *(f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in deselected),
        ],
        "pytest_add_cli_args_test_selection": [f"tests/{name}" for name in tests],
        "process_isolation": "forkserver",
    }
    (folder / "mutants" / "src").mkdir(parents=True)  # so that Python takes it for a place to import from
    (folder / "mutants" / "sitecustomize.py").write_text(SITE)
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    project = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n")


def check(room: str) -> None:
    """Refuse a room whose files or tests were moved since it was written down above."""
    files, tests = ROOMS[room]
    for pattern in (*(f"src/steelyard/{name}" for name in files), *(f"tests/{name}" for name in tests)):
        if not any(ROOT.glob(pattern)):
            sys.exit(f"{room}: {pattern} matches no file; write down in ROOMS where it is now")


def count(folder: Path, room: str, deselected: list[str]) -> int:
    """Return how many of a room's tests these names leave out; a name may be a test, a file or a folder."""
    tests = [f"tests/{name}" for name in ROOMS[room][1]]
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", *tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    left_out = tuple(f"{name}{end}" for name in deselected for end in "[:/")
    return sum(f"{line}/".startswith(left_out) for line in done.stdout.splitlines() if line.startswith("tests/"))


def ends(folder: Path) -> dict[str, int | None]:
    """Return every mutant with its exit code, None before it was tried."""
    found: dict[str, int | None] = {}
    for path in sorted(folder.glob("mutants/src/**/*.meta")):
        found.update(json.loads(path.read_text())["exit_code_by_key"])
    return found


def failing(folder: Path, room: str) -> list[str]:
    """Return the tests of a room that fail here without any mutant: for want of a package, a browser, a processor."""
    tests = [f"tests/{name}" for name in ROOMS[room][1]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider", "-rfE", *tests],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(" - ")[0].split(" ", 1) for line in done.stdout.splitlines()]
    return sorted({words[1] for words in lines if words[0] in ("FAILED", "ERROR") and len(words) == 2})


def mutmut(folder: Path, *words: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python process in the copy, such that commands which tests start meet the mutant, too.

    After so many seconds it is ended: what it has found by then is written down.
    """
    others = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if ROOT not in (Path(path), *Path(path).parents)
    ]
    before = (folder / "mutants" / "src", folder / "mutants", *others)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, before))}
    command = [sys.executable, *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            return subprocess.CompletedProcess(command, 0, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


FIRST_FAILURE = """import os
os.environ["MUTANT_UNDER_TEST"] = "stats"
from mutmut.runners.harness import PytestRunner
PytestRunner().run_stats(tests=[])
"""
"""Runs the tests as mutmut does before the first mutant, where mutmut keeps to itself which of them fails."""


def main() -> None:
    """Run one room and print the mutants that lived and the share that was killed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("room", choices=sorted(ROOMS))
    arguments.add_argument("--mutants", type=int, default=0, help="draw so many (default: all)")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    arguments.add_argument("--deselect", action="append", default=[], help="a test that cannot run on this machine")
    arguments.add_argument("--deselect-failing", action="store_true", help="leave out tests that fail here anyway")
    arguments.add_argument("--minutes", type=float, help="try mutants for so long; those left are not counted")
    arguments.add_argument("--like", type=Path, help="the --states of an earlier run: try the same mutants")
    arguments.add_argument("--states", type=Path, help="a file for how each drawn mutant ended, as JSON")
    chosen = arguments.parse_args()
    check(chosen.room)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder, chosen.room, chosen.deselect)
        deselected = chosen.deselect
        if chosen.deselect_failing:
            again = folder / "again"
            deselected = [*chosen.deselect, *failing(folder, chosen.room)]
            copied(again, chosen.room, deselected)
            folder = again
        # mutmut makes all its mutants, and times the tests, before it looks for the one that is asked for.
        run = ("-m", "mutmut", "run", "--max-children", str(chosen.jobs))
        first = mutmut(folder, *run, "none")
        every = sorted(ends(folder))
        if not every or not (folder / "mutants" / "mutmut-stats.json").exists():
            tried = mutmut(folder, "-c", FIRST_FAILURE)
            sys.exit(f"no mutants, or a test fails without any:\n{first.stderr[-2000:]}\n{tried.stdout[-3000:]}")
        drawn = every
        if chosen.like is not None:
            drawn = sorted(json.loads(chosen.like.read_text()).keys() & set(every))
        elif 0 < chosen.mutants < len(every):
            drawn = sorted(random.Random(chosen.seed).sample(every, chosen.mutants))
        done = mutmut(folder, *run, *drawn, seconds=chosen.minutes and 60 * chosen.minutes)
        codes = ends(folder)
        tried_now = [name for name in drawn if codes[name] is not None]
        if done.returncode or not tried_now or (chosen.minutes is None and len(tried_now) < len(drawn)):
            sys.exit(f"mutmut did not finish:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        state = {name: ENDS.get(codes[name] or 0, KILLED) for name in tried_now}
        if chosen.states is not None:
            chosen.states.write_text(json.dumps(state, indent=0))
        report(folder, chosen.room, len(every), len(drawn), state, count(folder, chosen.room, deselected))


def report(folder: Path, room: str, mutants: int, drawn: int, state: Mapping[str, str], deselected: int) -> None:
    """Print the mutants that lived, and the share that was killed."""
    for name, end in state.items():
        if end != KILLED:
            shown = subprocess.run(
                [sys.executable, "-m", "mutmut", "show", name], cwd=folder, capture_output=True, text=True, check=False
            )
            print(f"{end}: {name}\n{shown.stdout}")
    counts = Counter(state.values())
    share = {"killed_percent": round(100 * counts[KILLED] / len(state), 1)}
    sizes = {"mutants": mutants, "drawn": drawn, "tried": len(state), "deselected": deselected}
    print(json.dumps({"room": room, **sizes, **counts, **share}))


if __name__ == "__main__":
    main()
