"""The page as a web application: what is asked, by whom, what is answered, what follows as it happens; serving it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import lru_cache
from importlib import import_module, resources
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from urllib.parse import urlencode

import uvicorn
from fastapi import Body, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from steelyard.base.errors import UserError, told_as
from steelyard.base.logs import logger
from steelyard.federate.connections import BoundedProtocol
from steelyard.federate.queue import server_folder
from steelyard.page.form import FormField, Recipe, form, list_recipes
from steelyard.page.guard import Guard, Keys
from steelyard.page.jobs import Jobs
from steelyard.page.overview import FigureDocument, Figures, Overview, ServerDocument, ServerView
from steelyard.report.figures import bundle
from steelyard.report.html import RawCriteria
from steelyard.report.rendering import filled
from steelyard.runs.glance import Glance, Glances, RunDocument

EVERY = 0.5
"""Seconds between two looks at the folder."""
ALIVE = 15.0
"""Seconds after which a silent stream says that it is there."""
MOST = 32
"""Streams at the same time."""


class Listing:
    """The runs under a root as the list shows them."""

    def __init__(self, root: Path, jobs: Jobs) -> None:
        self.jobs = jobs
        self._glances = Glances(root)
        self._lock = threading.Lock()
        self._last: tuple[float, list[RunDocument]] = (0.0, [])

    def runs(self) -> list[RunDocument]:
        """Return all runs, newest first, and what was started and has no folder yet; at most one look in a while."""
        with self._lock:
            if time.monotonic() - self._last[0] > EVERY / 2:
                self._last = (time.monotonic(), self._look())
            return self._last[1]

    def _look(self) -> list[RunDocument]:
        found = self._glances.look()
        unseen = self.jobs.unseen([run.name for run in found])
        return sorted([*unseen, *map(self._document, found)], key=lambda run: -float(run["changed"]))

    def _document(self, run: Glance) -> RunDocument:
        document = run.document()
        job = self.jobs.of(run.name)
        if job is not None and job.ended not in (None, 0) and run.state in ("stopped", "killed"):
            document["problem"] = job.last_line()
            # It got no further than its set-up: nobody killed it, and there is nothing to resume.
            document["state"] = run.state if any(rule.accuracy is not None for rule in run.rules) else "failed"
        if job is not None and job.ended is None and not job.stopping and run.state in ("stopped", "killed", "unknown"):
            document["state"] = "starting"
        return document


def event(name: str, data: object) -> str:
    """Write one server-sent event; JSON has no line ends of its own, so nothing in it can end the event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


async def stream(
    listing: Listing, followed: Sequence[str], ended: Callable[[], bool], every: float = EVERY
) -> AsyncGenerator[str]:
    """Yield the list whenever it changes, and {run, round, state} of each followed run that moved on."""
    last_list = ""
    rounds: dict[str, tuple[int, str]] = {}
    said = time.monotonic()
    yield ": steelyard\n\n"
    while not ended():
        runs = await asyncio.to_thread(listing.runs)
        text = event("runs", runs)
        if text != last_list:
            last_list, said = text, time.monotonic()
            yield text
        for run in runs:
            mark = (int(run["round"]), str(run["state"]))
            if run["name"] in followed and rounds.get(run["name"]) != mark:
                first = run["name"] not in rounds
                rounds[run["name"]] = mark
                if not first:
                    yield event("moved", {"run": run["name"], "round": mark[0], "state": mark[1]})
        if time.monotonic() - said > ALIVE:
            said = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(every)


# The web application: what is asked, by whom, and what is answered.


KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_RUNS = 8
"""Runs that one comparison takes."""

Runs = Annotated[list[str], Query(min_length=1, max_length=MOST_RUNS)]
Name = Annotated[str, Body(max_length=1000)]


@lru_cache
def assets() -> dict[str, str]:
    """Return the page's own files by name; nothing else is ever served."""
    folders = (resources.files("steelyard.report") / "assets", resources.files("steelyard.page") / "assets")
    return {
        entry.name: entry.read_text(encoding="utf-8")
        for folder in folders
        if folder.is_dir()
        for entry in folder.iterdir()
        if Path(entry.name).suffix in KINDS
    }


def create_app(
    root: Path,
    host: str,
    keys: Keys,
    jobs: Jobs,
    ended: Callable[[], bool] = lambda: False,
    server: ServerView | None = None,
) -> FastAPI:
    """Return the application over the runs under `root`, and over a federation's server where one is given.

    `ended` says when open streams must close.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, host=host, keys=keys)
    _errors(app)
    _static(app, keys, root, jobs, server is not None)
    _listed(app, Listing(root, jobs), ended)
    _shown(app, Figures(root))
    _started(app, jobs)
    if server is not None:
        _served(app, server)
    return app


def _listed(app: FastAPI, listing: Listing, ended: Callable[[], bool]) -> None:
    """Which runs there are, and what happens in them as it happens."""
    open_streams: list[object] = []

    @app.get("/api/runs", response_model=None)
    def runs() -> list[RunDocument]:
        return listing.runs()

    @app.get("/api/events")
    async def events(run: Annotated[list[str], Query(max_length=MOST_RUNS)] = []) -> Response:  # noqa: B006
        if len(open_streams) >= MOST:
            raise HTTPException(503, f"{MOST} browsers look at this page already")

        async def events_of() -> AsyncGenerator[str]:
            mark = object()
            open_streams.append(mark)
            try:
                async for text in stream(listing, run, ended):
                    yield text
            finally:
                open_streams.remove(mark)

        return StreamingResponse(events_of(), media_type="text/event-stream")


def _shown(app: FastAPI, figures: Figures) -> None:
    """What is shown of a run; documents are of their types already, so nothing is checked again (response_model)."""

    @app.get("/api/view", response_model=None)
    def view(run: Runs) -> Overview:
        return figures.overview(run)

    @app.get("/api/figure", response_model=None)
    def figure(
        run: Runs,
        kind: Annotated[str, Query(max_length=40)],
        rule: Annotated[str | None, Query(max_length=1000)] = None,
        seed: int | None = None,
        client: Annotated[str | None, Query(max_length=1000)] = None,
    ) -> FigureDocument:
        return figures.figure(run, kind, rule, seed, client)

    @app.get("/api/reweigh", response_model=None)
    def reweigh(run: Runs) -> dict[str, RawCriteria]:
        return figures.weighable(run)

    @app.get("/api/experiment")
    def experiment(run: Annotated[str, Query(max_length=1000)]) -> PlainTextResponse:
        return PlainTextResponse(figures.experiment(run))

    @app.get("/api/model")
    def model(run: Annotated[str, Query(max_length=1000)]) -> Response:
        headers = {"content-disposition": 'attachment; filename="model.zip"'}
        return Response(figures.model(run), media_type="application/zip", headers=headers)


def _started(app: FastAPI, jobs: Jobs) -> None:
    """Starting, stopping and resuming runs; a page that only shows runs refuses it."""

    @app.get("/api/recipes", response_model=None)
    def recipes() -> list[Recipe]:
        return list_recipes()

    @app.get("/api/form", response_model=None)
    def fields(recipe: Annotated[str, Query(max_length=100)]) -> list[FormField]:
        return form(recipe)

    @app.post("/api/start")
    def start(recipe: Name, name: Name, fields: Annotated[dict[str, Any], Body()]) -> dict[str, str]:
        return {"run": jobs.start(recipe, name, fields)}

    @app.post("/api/stop")
    def stop(run: Annotated[str, Body(embed=True, max_length=1000)]) -> dict[str, str]:
        jobs.stop(run)
        return {"run": run}

    @app.post("/api/resume")
    def resume(run: Annotated[str, Body(embed=True, max_length=1000)]) -> dict[str, str]:
        jobs.resume(run)
        return {"run": run}


def _served(app: FastAPI, server: ServerView) -> None:
    """The server of a federation: what an operator sees, and stopping a run."""

    @app.get("/api/server", response_model=None)
    def look() -> ServerDocument:
        return server.document()

    @app.post("/api/server/stop")
    def stop(run: Annotated[int, Body(embed=True)]) -> dict[str, int]:
        server.stop(run)
        return {"run": run}


def _errors(app: FastAPI) -> None:
    """A mistake is one line of JSON, whoever made it; the inside of the server stays hidden."""

    @app.exception_handler(UserError)
    def wrong(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"problem": " ".join(str(error).split())}, 400)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse({"problem": f"{field}: {first['msg']}"}, 400)

    @app.exception_handler(Exception)
    def broken(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"problem": f"the page failed: {type(error).__name__}"}, 500)


def _static(app: FastAPI, keys: Keys, root: Path, jobs: Jobs, server: bool) -> None:
    @app.get("/")
    def index() -> Response:
        """The HTML holds the token that its script sends with everything that changes something."""
        facts = {"page-token": keys.page, "root": str(root), "read-only": str(jobs.read_only).lower()}
        facts |= {"server": "true"} if server else {}
        text = filled("page.html.j2", facts=facts, icon=assets()["icon.svg"])
        return Response(text, media_type="text/html; charset=utf-8")

    @app.get("/assets/{name}")
    def asset(name: str, request: Request) -> Response:
        text = bundle() if name == "vega.js" else assets().get(name)
        if text is None:
            raise HTTPException(404, "no such file")
        mark = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        # Asked for again each time, and sent only when it changed: an update is never hidden by an old copy.
        headers = {"etag": mark, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers=headers)
        kind = KINDS[Path(name).suffix]
        return Response(text, media_type=f"{kind}; charset=utf-8", headers=headers)


# Serving the page: the address, what is refused before anything listens, and the end.


_log = logger(__name__)

SHORTEST = 16
"""Characters of a token at least."""


def _warm() -> None:
    """Do what takes seconds the first time, so that the first visitor does not wait for libraries or for Vega."""
    for name in ("pandas", "scipy.stats"):
        import_module(name)
    bundle()


class _Server(uvicorn.Server):
    """Informs open streams when the end was asked for, so that they do not hold it up."""

    ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note that the end was asked for, then do what uvicorn does."""
        self.ending = True
        super().handle_exit(sig, frame)


def keys_with(token: str | None) -> Keys:
    """Return the keys of a page: with a token of the user's own, or with one that is made for this start."""
    if token is None:
        return Keys()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable():
        raise UserError(f"--token: got {len(token)} characters; allowed: {SHORTEST} or more, plain letters and digits")
    return Keys(token)


def web_config(app: FastAPI, *, log_level: str = "warning", seconds: int = 2) -> uvicorn.Config:
    """Return how the page is served: its connections are bounded in number, in time and in the size of a head."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=seconds,
        lifespan="off",
        ws="none",
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes any free one."""
    with told_as(f"--host, --port: cannot listen on {host}:{port}"):
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        # At once: whoever reads the address that is printed finds somebody there.
        made.listen(128)
    return made


def serve(
    root: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    announce: Callable[[str], None],
    trust: bool = False,
    read_only: bool = False,
    server: Path | None = None,
) -> None:
    """Serve the page until Ctrl-C; runs that it started go on. `announce` gets the address to open.

    `server` is the folder of a federation's server, which is then shown too.
    """
    keys = keys_with(token)
    if not root.exists():
        root.mkdir(parents=True)
    if not root.is_dir():
        raise UserError(f"{root}: is a file; allowed: a folder, which may be empty")
    jobs = Jobs(root.resolve(), trust=trust, read_only=read_only)
    shown_server = None if server is None else ServerView(server_folder(server), jobs)
    made = listen(host, port)
    shown = f"[{host}]" if ":" in host.strip("[]") else host
    address = f"http://{shown}:{made.getsockname()[1]}/"
    ends = lambda: web.ending or web.should_exit  # noqa: E731
    app = create_app(root.resolve(), host, keys, jobs, ends, shown_server)
    web = _Server(web_config(app))
    threading.Thread(target=_warm, daemon=True).start()
    announce(f"page over {root}: {address}?{urlencode({'token': keys.token})}")
    announce("Ctrl-C ends the page; runs that it started continue")
    try:
        web.run(sockets=[made])
    except KeyboardInterrupt:
        pass
    finally:
        made.close()
    going = jobs.going()
    if going:
        _log.warning(f"still running: {', '.join(going)}; steelyard top {root} shows them")
