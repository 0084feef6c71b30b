"""Starting a run on a server of this machine, and showing its rounds until it ends."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from steelyard.errors import UserError
from steelyard.experiment.description import Description
from steelyard.experiment.folders import new_folder
from steelyard.federate.app_folder import CONNECTION, write_app
from steelyard.federate.processes import environment
from steelyard.logs import logger
from steelyard.runs.reader import History
from steelyard.runs.store import exists

_log = logger(__name__)


def submit(server: Path, experiment: Description, *, out: Path | None = None, resume: bool = False) -> Path:
    """Send an experiment to the SuperLink of a server's folder and follow it; returns the run's folder."""
    flower = server / ".flwr"
    if not (flower / "config.toml").is_file():
        raise UserError(f"{server}: no server here; allowed: the folder of a running `steelyard federate serve`")
    run = (out if resume and out is not None else new_folder(experiment, out)).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        app = Path(scratch) / "app"
        write_app(app, experiment, out=run, resume=resume, ship=False)
        command = ["flwr", "run", str(app), CONNECTION, "--stream"]
        with subprocess.Popen(
            command, env=environment(flower.resolve()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            last = _show(process, f"`steelyard resume {run}`", f"`steelyard federate submit {server} {run}`")
    if not exists(run):
        raise UserError(f"the run did not begin: {last or 'no word from the server; is it serving?'}")
    if History(run).info.get("status") != "finished":
        again = "" if "`steelyard" in last else f"; `steelyard federate submit {server} {run}` goes on"
        raise UserError(f"the run did not finish: {last or 'the server stopped without a word'}{again}")
    return run


def _show(process: subprocess.Popen[str], resume: str, submit: str) -> str:
    """Print the lines of a run that are ours; return the last word of an error.

    The server speaks of going on with any run; this one goes on by being submitted again.
    """
    assert process.stdout is not None
    last, ours = "", False
    for line in process.stdout:
        text = line.strip().replace(resume, submit)
        if text.startswith(("steelyard: ", "round ")):
            _log.info(text.removeprefix("steelyard: "))
        if text.startswith("steelyard: ") or (text and not ours):
            last, ours = text.removeprefix("steelyard: "), text.startswith("steelyard: ")
    return last
