"""A server starts the runs that were submitted to it, one after another, and notices when one ends."""

from __future__ import annotations

import subprocess
import time
import uuid

import httpx

from steelyard.base.logs import logger
from steelyard.clients.flower.adapter.superlink import SuperLinkControl
from steelyard.federate.app_folder import CONNECTION, number_of_run
from steelyard.federate.outcomes import forget_outcome, is_server_app
from steelyard.federate.processes import end_with_parent, environment, last_words
from steelyard.federate.server_folder import ServerFolder
from steelyard.federate.server_runs import ServerRun, runs_of

_log = logger(__name__)

_COMMAND_SECONDS = 180.0
_ASK_SECONDS = 3.0
"""How often Flower is asked about a run whose server app has not spoken yet."""
_MOST_TRIES = 3
"""How often a run is started by itself: one that takes its server along every time must not do so for ever."""


class RunQueue:
    """The runs of a server, one at a time; call `look` again and again."""

    def __init__(self, server: ServerFolder, control: SuperLinkControl) -> None:
        self._server, self._control = server, control
        self._mark = uuid.uuid4().hex
        """By which this server knows the runs that it started itself."""
        self._stopped: set[int] = set()
        self._ended: set[int] = set()
        """Runs that are over: a queue looks twice a second, and need not read all that ever ran."""
        self._asked = 0.0
        self._closed = False

    def close(self) -> None:
        """Let the runs be: the server ends, and what goes on goes on with the next one."""
        self._closed = True

    def look(self) -> None:
        """Stop what is to stop, notice what ended, and start the next run where none goes."""
        known = runs_of(self._server, without=self._ended)
        waiting = [run for run in known if run.is_open]
        self._ended |= {run.number for run in known} - {run.number for run in waiting}
        for run in waiting:
            if run.is_to_stop:
                self._stop(run)
        first = next((run for run in waiting if run.is_open), None)
        if first is None:
            return
        if first.started.get("server") == self._mark:
            self._check(first)
        else:
            self._start(first)

    def _stop(self, run: ServerRun) -> None:
        if run.started.get("server") != self._mark:
            run.end("stopped before it went on" if run.started else "stopped before it began")
            _log.info(f"run {run.number} was stopped")
        elif run.number not in self._stopped and (number := run.started.get("flower")):
            self._control.stop(int(number))
            self._stopped.add(run.number)

    def _start(self, run: ServerRun) -> None:
        """Start a run; one that an earlier server began goes on from its last whole round."""
        tries = int(run.started.get("tries", 0))
        if tries >= _MOST_TRIES:
            run.end(f"its server ended {tries} times while it ran; {run.advice()}")
            return
        forget_outcome(run.folder)
        run.note_started(self._mark, tries + 1)
        again = ["--run-config", "resume=true"] if tries else []
        command = ["flwr", "run", str(run.app), CONNECTION, "--format", "json", *again]
        words = f"goes on, try {tries + 1}" if tries else "begins"
        _log.info(f"run {run.number} {words}: {run.out}")
        number, words = self._send(command)
        if number is None:
            self._end(run, f"the run did not begin: {words}")
        else:
            run.note_started(self._mark, tries + 1, number)

    def _send(self, command: list[str]) -> tuple[int | None, str]:
        """Send an app to the SuperLink; returns Flower's number for the run, or None and why there is none."""
        try:
            done = subprocess.run(
                command,
                env=environment(self._server.flower),
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                preexec_fn=end_with_parent,
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer within {_COMMAND_SECONDS:g} s"
        try:
            return number_of_run(done.stdout), ""
        except (ValueError, KeyError):
            return None, last_words(f"{done.stdout}\n{done.stderr}") or f"code {done.returncode}"

    def _check(self, run: ServerRun) -> None:
        """Notice the end of a run whose server app does not say so itself."""
        outcome, number = run.outcome, run.started.get("flower")
        pid = outcome.get("pid")
        if isinstance(pid, int):
            if not is_server_app(pid) and run.is_open:
                self._end(run, f"the ServerApp was killed; {run.advice()}")
                if number is not None:
                    self._stop_quietly(int(number))
        elif number is not None and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            ended = self._control.ended(int(number))
            if ended is not None and not run.outcome:
                self._end(run, f"the ServerApp did not start: {last_words(ended) or self._server.folder}")

    def _stop_quietly(self, number: int) -> None:
        try:
            self._control.stop(number)
        except httpx.HTTPError:
            return  # Flower notices by itself that the app is gone, only later.

    def _end(self, run: ServerRun, line: str) -> None:
        if not self._closed:
            run.end(line)
            _log.error(f"run {run.number}: {line}")
