"""The page as a web application: what is asked, by whom, and what is answered."""

from __future__ import annotations

import hashlib
import html
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from steelyard.base.errors import UserError
from steelyard.page import feed
from steelyard.page.figures import FigureDocument, Figures, Overview
from steelyard.page.form import FormField, Recipe, form, list_recipes
from steelyard.page.guard import Guard, Keys
from steelyard.page.jobs import Jobs
from steelyard.page.server import ServerDocument, ServerView
from steelyard.report.contents import RawCriteria
from steelyard.report.figures.look import bundle
from steelyard.runs.glance import RunDocument

KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".html": "text/html"}
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
    _listed(app, feed.Listing(root, jobs), ended)
    _shown(app, Figures(root))
    _started(app, jobs)
    if server is not None:
        _served(app, server)
    return app


def _listed(app: FastAPI, listing: feed.Listing, ended: Callable[[], bool]) -> None:
    """Which runs there are, and what happens in them as it happens."""
    open_streams: list[object] = []

    @app.get("/api/runs", response_model=None)
    def runs() -> list[RunDocument]:
        return listing.runs()

    @app.get("/api/events")
    async def events(run: Annotated[list[str], Query(max_length=MOST_RUNS)] = []) -> Response:  # noqa: B006
        if len(open_streams) >= feed.MOST:
            raise HTTPException(503, f"{feed.MOST} browsers look at this page already")

        async def events_of() -> AsyncGenerator[str]:
            mark = object()
            open_streams.append(mark)
            try:
                async for text in feed.stream(listing, run, ended):
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
        meta = "\n".join(f'<meta name="{name}" content="{html.escape(value)}">' for name, value in facts.items())
        icon = assets()["icon.svg"].replace("<svg ", '<svg aria-hidden="true" ', 1)
        text = assets()["index.html"].replace("<!-- meta -->", meta).replace("<!-- icon -->", icon)
        return Response(text, media_type="text/html; charset=utf-8")

    @app.get("/assets/{name}")
    def asset(name: str, request: Request) -> Response:
        text = bundle() if name == "vega.js" else assets().get(name)
        if text is None or name == "index.html":
            raise HTTPException(404, "no such file")
        mark = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        # Asked for again each time, and sent only when it changed: an update is never hidden by an old copy.
        headers = {"etag": mark, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers=headers)
        kind = KINDS[Path(name).suffix]
        return Response(text, media_type=f"{kind}; charset=utf-8", headers=headers)
