"""The table of faults names tests that are there, and real processes where it does not say otherwise."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "server.md"


def cells() -> list[list[str]]:
    """Return the rows of the table of faults: fault, what happens, tested by."""
    text = PAGE.read_text(encoding="utf-8").split("## Faults", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def functions() -> dict[str, Path]:
    """Return every test function of the project by name, with its file."""
    found: dict[str, Path] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = file
    return found


def test_every_fault_has_a_test_that_is_there() -> None:
    known = functions()
    assert len(cells()) >= 15
    for row in cells():
        fault, _, tested = row
        named = re.fullmatch(r"(?:`(test_\w+)`|`python -m (benchmarks\.\w+)`)(?: \*)?(?: †)?", tested)
        assert named is not None, row
        if named[2]:
            assert (ROOT / f"{named[2].replace('.', '/')}.py").is_file(), fault
        else:
            assert named[1] in known, f"{fault}: {named[1]} is not a test"
