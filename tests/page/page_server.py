"""The page on a free port of the loopback interface, in a thread of the test; and runs made by hand to show on it."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import uvicorn
from tests.runs.records import add, begun, evaluations, record, updates
from tests.warm import WarmProcess

from steelyard.federate.queue import ServerFolder
from steelyard.page.app import create_app, listen, web_config
from steelyard.page.guard import PAGE_HEADER, Keys
from steelyard.page.jobs import Jobs
from steelyard.page.overview import ServerView
from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import this_process

# A tenth of a second goes into reading the list of authorities, which plain HTTP never asks.
request: Callable[..., httpx.Response] = functools.partial(httpx.request, verify=False)


@dataclass
class Page:
    """A page that is being served."""

    root: Path
    keys: Keys
    jobs: Jobs
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bearer(self) -> dict[str, str]:
        """The header with which a program brings the token."""
        return {"authorization": f"Bearer {self.keys.token}"}

    def opened(self, where: str = "") -> str:
        """The address that is printed, with the token, and the view that it shall open."""
        return f"{self.url}/?token={self.keys.token}{where.removeprefix('/')}"

    def get(self, path: str, headers: dict[str, str] | None = None, **options: object) -> httpx.Response:
        given = {**self.bearer, **(headers or {})}
        return request("GET", self.url + path, headers=given, timeout=30, **options)

    def streaming(self, path: str) -> AbstractContextManager[httpx.Response]:
        return httpx.stream("GET", self.url + path, headers=self.bearer, timeout=20, verify=False)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
        """Ask as the page's own script does."""
        given = {**self.bearer, PAGE_HEADER: self.keys.page, **(headers or {})}
        return request("POST", self.url + path, json=body, headers=given, timeout=30)


def warm_job(
    command: list[str], *, env: dict[str, str], stdout: IO[bytes], stdin: int, stderr: int, start_new_session: bool
) -> WarmProcess:
    """Start what `subprocess.Popen` is asked to by `Jobs`, from a process that has read torch already."""
    assert command[:3] == [sys.executable, "-m", "steelyard"]
    assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
    return WarmProcess(*command[3:], folder=Path.cwd(), printed=Path(stdout.name), environment=env)


@contextmanager
def serving(
    root: Path,
    *,
    host: str = "127.0.0.1",
    trust: bool = False,
    read_only: bool = False,
    server: ServerFolder | None = None,
) -> Generator[Page]:
    """Serve the page over a folder; `host` is what the page thinks it listens on, the socket is always loopback's."""
    root.mkdir(parents=True, exist_ok=True)
    keys, jobs = Keys(), Jobs(root, trust=trust, read_only=read_only)
    made = listen("127.0.0.1", 0)
    ending = threading.Event()
    app = create_app(root, host, keys, jobs, ending.is_set, server and ServerView(server, jobs))
    web = uvicorn.Server(web_config(app, log_level="error", seconds=1))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [made]}, daemon=True)
    thread.start()
    try:
        yield Page(root, keys, jobs, made.getsockname()[1])
    finally:
        ending.set()
        web.should_exit = True
        thread.join(10)
        made.close()
        for run in jobs.going():
            job = jobs.of(run)
            assert job is not None
            job.process.kill()
            job.process.wait()


class Written:
    """A run that a test writes round by round, as a running process would."""

    def __init__(
        self, folder: Path, name: str = "DS>LD", rounds: int = 5, clients: tuple[str, str] = ("a", "b")
    ) -> None:
        self.name, self.clients, self.next = name, clients, 0
        self.store = begun(folder, name)
        self.store.note(RunFacts(status="running", rounds=rounds, measure="accuracy", writer=this_process().text()))
        (folder / "experiment.toml").write_text('name = "made"\n', encoding="utf-8")

    def round(self, accuracy: float = 0.5) -> None:
        """Write one more round."""
        sent = updates(self.name, self.next, clients=self.clients)
        tested = evaluations(self.name, self.next, clients=self.clients)
        add(self.store, record(self.name, self.next, accuracy=accuracy, updates=sent, evaluations=tested))
        self.next += 1

    def end(self, status: str = "finished") -> None:
        """Say how it ended and let the folder go."""
        self.store.note(RunFacts(status=status))
        self.store.close()


def finished(folder: Path, rounds: int = 4, **options: object) -> Path:
    """Make a run that has ended."""
    run = Written(folder, **options)  # type: ignore[arg-type]
    for number in range(rounds):
        run.round(0.2 + 0.1 * number)
    run.end()
    return folder
