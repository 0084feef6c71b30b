"""Make the pictures of guide and gallery anew: `python docs/pictures.py` runs the page, the examples and a browser.

The tests run the same page, scripts and notebooks. Needs Chromium for the picture of the page. What is drawn is kept in
docs/images, so that the site builds without any of this; the diagrams are drawn by docs/diagrams.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import diagrams
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
EXAMPLES = DOCS.parent / "examples"
COLUMNS = 90


def main() -> None:
    """Draw everything, in an empty folder."""
    diagrams.main()
    _take_the_reports_look()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _draw_readme()
        _draw_first_steps()
        _draw_criteria()
        _draw_page()
        _draw_gallery()
        _draw_flower_app()
        _draw_swarm()


def _take_the_reports_look() -> None:
    """Have Altair draw every chart of this process as the report does."""
    import altair as alt

    from steelyard.report.figures.look import theme

    alt.theme.register("steelyard", enable=True)(
        lambda: alt.theme.ThemeConfig(config={**theme(), "background": "#fffdf8"})
    )


def _draw_readme() -> None:
    """Compare two rules over ten seeds as README says, and draw what faulty clients weigh and what becomes of it."""
    import altair as alt

    from steelyard import Result
    from steelyard.report.curves import flaws_of

    _terminal("steelyard compare quickstart --rules 'fedavg,VP>LD>DS/max' --seeds 10 --out runs/readme")
    history = Result(Path("runs/readme")).history
    faulty = {(seed, client) for seed in range(1, 11) for client in flaws_of(history, seed)}
    clients, rounds = history.clients, history.rounds
    clients = clients[[pair in faulty for pair in zip(clients["seed"], clients["client"], strict=True)]]
    weights = clients.groupby(["rule", "seed", "round"], as_index=False)["weight"].sum()
    panels = [
        _mean_of_seeds(weights, "weight", "weight of the six faulty clients"),
        _mean_of_seeds(rounds[rounds["round"] > 0], "server_accuracy", "accuracy on the server's test set"),
    ]
    alt.hconcat(*panels).save(str(IMAGES / "readme.svg"))


def _mean_of_seeds(rows: Any, column: str, title: str) -> Any:
    """Draw the mean over the seeds of each rule by round, with its 95% confidence interval."""
    import altair as alt

    drawn = alt.Chart(rows[["rule", "round", column]]).encode(
        alt.X("round:Q", title="round"), alt.Color("rule:N", sort=["fedavg"], legend=alt.Legend(orient="top"))
    )
    axis = alt.Axis(format="%")
    line = drawn.mark_line().encode(alt.Y(f"mean({column}):Q", title=title, axis=axis, scale=alt.Scale(domain=[0, 1])))
    band = drawn.mark_errorband(extent="ci").encode(alt.Y(f"{column}:Q", title=title, axis=axis))
    return (band + line).properties(width=360, height=240)


def _draw_first_steps() -> None:
    """Run the commands and the code of the page one after another, and draw what they give."""
    page = (DOCS / "guide" / "first-steps.md").read_text(encoding="utf-8")
    for language, code in re.findall(r"```(python|sh)\n(.*?)```", page, re.DOTALL):
        if language == "python":
            exec(code, {})
        elif not code.startswith("pip"):
            printed = _terminal(code.strip())
            if "quickstart" in code:
                _draw_terminal(printed, IMAGES / "terminal-quickstart.svg")
    for run, kind, name in (
        ("first", "weights", "weights"),
        ("mine", "split", "split"),
        ("compared", "server", "curves"),
    ):
        _draw_figure(Path("runs") / run, kind, None, IMAGES / f"{name}.svg")


def _draw_criteria() -> None:
    page = (DOCS / "guide" / "own-rule.md").read_text(encoding="utf-8")
    found = re.search(r'```python title="criteria.py"\n(.*?)```', page, re.DOTALL)
    assert found is not None
    Path("criteria.py").write_text(found.group(1), encoding="utf-8")
    for command in re.findall(r"^steelyard compare .*CARE.*$", page, re.MULTILINE):
        _terminal(command)
    _draw_figure(Path("runs/care"), "criteria", "CARE>DS/max", IMAGES / "criteria.svg")


def _draw_gallery() -> None:
    """Run every script and notebook; each draws a picture that is named as it is."""
    for path in (*sorted(EXAMPLES.glob("*.py")), EXAMPLES / "hospitals.ipynb"):
        if path.suffix == ".ipynb":
            subprocess.run([sys.executable, "-c", _NOTEBOOK, str(path)], check=True)
        else:
            subprocess.run([sys.executable, "-c", _SCRIPT, str(DOCS), str(path)], check=True)
        shutil.copy(f"{path.stem}.svg", IMAGES / "gallery")


_SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import pictures
pictures._take_the_reports_look()
runpy.run_path(sys.argv[2], run_name="__main__")
"""
_NOTEBOOK = """
import sys, nbclient, nbformat
nbclient.NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=600).execute()
"""


def _draw_flower_app() -> None:
    """Run the Flower app as the tests do, by its own client app on a grid in this process."""
    sys.path[:0] = [str(DOCS.parent), str(EXAMPLES / "flower_digits")]
    from digits_app import client_app, server_app
    from flwr.app import Context, RecordDict
    from tests.examples.test_flower_digits import CONFIG, RULE, AppNodes

    from steelyard.clients.flower.internals import enter_run

    config = {**CONFIG, "rule": RULE, "folder": "runs/digits"}
    grid = AppNodes(client_app.app, config)
    enter_run(1, 1)
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    _draw_figure(Path("runs/digits"), "weights", None, IMAGES / "gallery" / "flower_digits.svg")


def _draw_swarm() -> None:
    """Run the swarm in NVFlare's simulator."""
    subprocess.run([sys.executable, str(EXAMPLES / "nvflare_swarm" / "job.py"), "--sites", "8"], check=True)
    _draw_figure(Path("runs/swarm"), "weights", None, IMAGES / "gallery" / "nvflare_swarm.svg")


def _terminal(command: str) -> str:
    """Run a command as in a terminal of this width and return what it printed."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    words = re.sub(r"^steelyard\b", f"{sys.executable} -m steelyard", command)
    done = subprocess.run(words, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return f"$ {command}\n{done.stdout}"


def _draw_terminal(text: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.from_ansi(text))
    console.save_svg(str(path), title="steelyard")


def _draw_figure(run: Path, kind: str, rule: str | None, path: Path) -> None:
    from steelyard import Result

    Result(run).plot(kind, rule=rule).save(str(path))


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
