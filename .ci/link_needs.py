"""Link what steelyard needs without any extra, and nothing else, into the packages of another environment.

python .ci/link_needs.py SITE_PACKAGES: each package is taken from the environment that runs this.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def needs() -> set[str]:
    """Return the names of all packages that an installation without extras brings."""
    waiting: list[str] = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found.add(requirement.name)
            waiting += distribution(requirement.name).requires or []
    return found


def link(names: set[str], site: Path) -> None:
    """Link the files and folders of packages into a folder."""
    for name in names:
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))))


if __name__ == "__main__":
    link(needs(), Path(sys.argv[1]))
