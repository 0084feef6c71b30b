"""Builds the site with the pages that are made from the code: python docs/build.py FOLDER.

The folder is new and gets the site. A warning, such as a link to a page or a heading that is not there, ends the build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from api_page import filled
from generated import pages, root_pages

ROOT = Path(__file__).parents[1]


def build(site: Path) -> int:
    """Build the site from a copy of its sources; returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
        for path, text in {**pages(), **root_pages()}.items():
            made = folder / "docs" / path
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(text, encoding="utf-8")
        names = folder / "docs" / "reference" / "api.md"
        names.write_text(filled(names.read_text(encoding="utf-8")), encoding="utf-8")
        shutil.copy(ROOT / "src" / "steelyard" / "report" / "assets" / "theme.css", folder / "docs")
        shutil.copy(ROOT / "mkdocs.yml", folder)
        done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=False)
        if done.returncode == 0:
            shutil.move(folder / "site", site)
        return done.returncode


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
