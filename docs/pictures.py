"""Make the tutorial's pictures anew: `python docs/pictures.py` runs its commands and draws what they give.

Needs Chromium for the picture of the page. The pictures are kept in docs/images, so that the site builds without it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
TUTORIAL = Path(__file__).parent / "guide" / "first-steps.md"
COLUMNS = 90


def main() -> None:
    """Run the tutorial's snippets one after another, and draw."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        first = _terminal("steelyard run quickstart --out runs/first")
        _draw_terminal(first, IMAGES / "terminal-quickstart.svg")
        page = TUTORIAL.read_text(encoding="utf-8")
        for title, code in re.findall(r'```python(?: title="([^"]+)")?\n(.*?)```', page, re.DOTALL):
            if title:
                Path(title).write_text(code, encoding="utf-8")
            else:
                exec(code, {})
        _terminal("steelyard new my.toml --csv patients.csv --label target --owner hospital")
        _terminal("steelyard run my.toml --out runs/mine")
        for command in re.findall(r"^steelyard compare .*$", page, re.MULTILINE):
            _terminal(command)
        _draw_figures()
        _draw_page()


def _terminal(command: str) -> str:
    """Run a command as in a terminal of this width and return what it printed."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    words = f"{sys.executable} -m {command}"
    done = subprocess.run(words, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return f"$ {command}\n{done.stdout}"


def _draw_terminal(text: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.from_ansi(text))
    console.save_svg(str(path), title="steelyard")


def _draw_figures() -> None:
    from steelyard import Result

    for run, kind, rule, name in (
        ("first", "weights", None, "weights"),
        ("mine", "split", None, "split"),
        ("compared", "server", None, "curves"),
        ("care", "criteria", "VP>CARE>DS/max", "criteria"),
    ):
        Result(Path("runs") / run).plot(kind, rule=rule).save(str(IMAGES / f"{name}.svg"))


def _draw_page() -> None:
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "steelyard", "watch", "runs", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[-1]  # with the token that the page asks for
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            view = browser.new_page(viewport={"width": 1100, "height": 720})
            view.goto(address)
            view.get_by_text("first", exact=True).first.click()
            view.wait_for_timeout(6000)
            # The folder of whoever draws this is nobody's business.
            view.evaluate("name => { document.querySelector('#root').textContent = name; }", "runs")
            view.screenshot(path=str(IMAGES / "watch.png"))
            browser.close()
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
