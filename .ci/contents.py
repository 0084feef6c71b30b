"""Look at what is in a wheel and an sdist: python .ci/contents.py WHEEL SDIST."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

LARGEST = 2_000_000
"""Bytes of one file: what is larger is data, or a mistake."""
NO_DATA = (".npz", ".npy", ".csv", ".parquet", ".sqlite", ".zip", ".gz", ".safetensors", ".pkl", ".pt")
ALLOWED = ("steelyard/data/included/", "benchmarks/results/")
"""Small tables that come with the package, for recipes that need no download; figures by seed that pages rest on."""
IN_WHEEL = (
    "steelyard/recipes/quickstart.toml",
    "steelyard/studies/papers/table-4.2.toml",
    "steelyard/py.typed",
    "steelyard/report/assets/report.js",
    "steelyard/report/templates/report.html.j2",
    "steelyard/docs/guide/index.md",
    "steelyard/docs/images/weights.svg",
)
IN_SDIST = (
    "pyproject.toml",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "constraints.txt",
    "mkdocs.yml",
    "tests/conftest.py",
)


def problems(wheel: Path, sdist: Path) -> list[str]:
    """Return what is wrong with the two, a line each."""
    with zipfile.ZipFile(wheel) as packed:
        in_wheel = {entry.filename: entry.file_size for entry in packed.infolist()}
    with tarfile.open(sdist) as packed:
        in_sdist = {entry.name.partition("/")[2]: entry.size for entry in packed.getmembers() if entry.isfile()}
    found = [f"{wheel.name}: lacks {name}" for name in IN_WHEEL if name not in in_wheel]
    found += [f"{sdist.name}: lacks {name}" for name in IN_SDIST if name not in in_sdist]
    tops = {name.split("/")[0] for name in in_wheel}
    found += [f"{wheel.name}: holds {top}" for top in sorted(tops) if not top.startswith("steelyard")]
    for file, names in ((wheel, in_wheel), (sdist, in_sdist)):
        data = [name for name in names if name.endswith(NO_DATA) and not any(folder in name for folder in ALLOWED)]
        found += [f"{file.name}: {name} is data" for name in data]
        found += [f"{file.name}: {name} has {size:,} bytes" for name, size in names.items() if size > LARGEST]
    return found


if __name__ == "__main__":
    lines = problems(*map(Path, sys.argv[1:]))
    print("\n".join(lines))
    sys.exit(bool(lines))
