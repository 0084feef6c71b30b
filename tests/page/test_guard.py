"""Who may ask what of the page, with real requests: names, tokens, other sites, paths, headers."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from starlette.routing import Route
from tests.kit import assert_refused, named
from tests.page.page_server import Page, finished, request, serving

from steelyard.federate import connections
from steelyard.page.app import create_app, keys_with
from steelyard.page.guard import PAGE_HEADER, Keys, is_loopback
from steelyard.page.jobs import Jobs

SECRET = "what nobody shall read"
TOKEN = {"authorization": "Bearer {token}"}
OWN = {**TOKEN, PAGE_HEADER: "{page}", "content-type": "application/json"}
ROUTES = sorted(
    (method, route.path.replace("{name}", "main.js"))
    for route in create_app(Path(), "127.0.0.1", Keys(), Jobs(Path())).routes
    if isinstance(route, Route)
    for method in route.methods or ()
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Generator[Page]:
    root = tmp_path_factory.mktemp("page")
    finished(root / "runs" / "one")
    finished(root / "outside")
    (root / "secret.txt").write_text(SECRET)
    (root / "runs" / "link").symlink_to(root / "outside")
    with serving(root / "runs") as served:
        yield served


def ask(
    page: Page, method: str, path: str, headers: dict[str, str], body: object = None
) -> tuple[int, http.client.HTTPMessage, str]:
    """Ask for a path exactly as it is written (other clients tidy it up first), with the page's own secrets put in."""
    known = {**vars(page.keys), "port": page.port, "next": page.port + 1, "url": page.url}
    given = {name: value.format_map(known) for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    content = body if isinstance(body, str | None) else json.dumps(body)
    connection.request(method, path.format_map(known), content, given)
    answer = connection.getresponse()
    if method == "GET" and path.startswith("/api/events") and answer.status == 200:
        return answer.status, answer.headers, ""
    return answer.status, answer.headers, answer.read().decode(errors="replace")


STRANGERS = [
    {},
    {"authorization": "Bearer {token}x"},
    {"authorization": "Basic {token}"},
    {"authorization": "Bearer {session}"},
    {"authorization": "Bearer {page}"},
    {"cookie": "steelyard-{port}={token}"},
    {"cookie": "steelyard-{port}="},
    {"cookie": "steelyard-{next}={session}"},
    {"cookie": "{session}", PAGE_HEADER: "{page}", "origin": "{url}"},
    {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-key": "x", "sec-websocket-version": "13"},
]
"""What may be brought in place of the token."""
PLACES = ("/nowhere", "/assets/none.js", "/favicon.ico", "/docs", "/openapi.json", "//", "/?token=", "/?token=wrong")
NAMES = ("evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "10.0.0.7", "x@localhost", "")
CHANGES = {
    "/api/start": {"recipe": "quickstart", "name": "new", "fields": {}},
    "/api/stop": {"run": "one"},
    "/api/resume": {"run": "one"},
}
FOREIGN = [
    {PAGE_HEADER: ""},
    {PAGE_HEADER: "wrong"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:{next}"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
OUTSIDE = ("../outside", "..%2foutside", "%2e%2e/outside", "%252e%252e%252foutside", "link", "/etc")
OUTSIDE += ("one/../../outside", "..\\outside", "../secret.txt", "one%00", ".")


def hostile() -> Iterator[tuple[str, str, str, dict[str, str], object, set[int]]]:
    """Yield every request that must be refused: its name, method, path, headers, body, and how it may be answered."""
    for number, headers in enumerate(STRANGERS):
        for method, path in ROUTES:
            yield f"stranger {number} {method} {path}", method, path, headers, None, {401}
    for path in (*PLACES, "/api/runs?token={token}"):
        yield f"place {path}", "GET", path, {}, None, {401}  # told apart from no place that is there
    for host in NAMES:  # DNS rebinding: another site's name for this machine still arrives as that name
        for path in ("/", "/api/runs", "/assets/main.js"):
            yield f"called {host} {path}", "GET", path, {**TOKEN, "host": host}, None, {400, 421}
    for path, body in CHANGES.items():  # CSRF: another site does not know the page's key and cannot hide its origin
        for number, headers in enumerate(FOREIGN):
            yield f"foreign {number} {path}", "POST", path, {**OWN, **headers}, body, {403}
        yield f"plain text {path}", "POST", path, {**OWN, "content-type": "text/plain"}, body, {415}
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            yield f"{method} {path}", method, path, TOKEN, None, {403, 405}
    for path in ("/api/runs", "/api/events", "/assets/main.js"):
        headers = {**TOKEN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        yield f"read across sites {path}", "GET", path, headers, None, {403}
    for name in OUTSIDE:
        for path in ("/api/view?run=", "/api/figure?kind=accuracy&run=", "/api/experiment?run=", "/api/model?run="):
            yield f"outside {path}{name}", "GET", path + name, TOKEN, None, {400}
        plain = name.replace("%2f", "/").replace("%2e", ".")
        for path, body in CHANGES.items():
            named_so = {**body, "name" if path == "/api/start" else "run": plain}
            yield f"outside {path} {name}", "POST", path, OWN, named_so, {400}
    for name in ("../secret.txt", "..%2f..%2fsecret.txt", "%2e%2e%2findex.html", "index.html", "guard.py", ""):
        yield f"asset {name}", "GET", f"/assets/{name}", TOKEN, None, {404}
    yield "a long body", "POST", "/api/stop", OWN, {"run": "x" * 100_000}, {413}
    yield "a body of unknown length", "POST", "/api/stop", {**OWN, "transfer-encoding": "chunked"}, "0\r\n\r\n", {413}


@pytest.mark.parametrize(("method", "path", "headers", "body", "allowed"), named(hostile()))
def test_a_hostile_request_is_refused_and_learns_nothing(
    page: Page, method: str, path: str, headers: dict[str, str], body: object, allowed: set[int]
) -> None:
    status, told, text = ask(page, method, path, headers, body)
    assert status in allowed, text
    assert not {"set-cookie", "access-control-allow-origin"} & {name.lower() for name in told}
    assert not [word for word in (SECRET, page.keys.token, page.keys.session, page.keys.page) if word in text]
    assert page.jobs.going() == []
    assert not [path.name for path in page.root.parent.iterdir() if path.name.startswith("outside-")]
    assert {path.name for path in page.root.iterdir()} == {"one", "link"}


LINKED = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
GOOD: list[tuple[str, str, str, dict[str, str], object, int]] = [
    ("called by IPv6", "GET", "/api/runs", {**TOKEN, "host": "[::1]:80"}, None, 200),
    ("a link from elsewhere", "GET", "/", {**TOKEN, **LINKED}, None, 200),
    ("an error", "GET", "/api/figure", TOKEN, None, 400),
    # With all of it in order the request gets through to the answer itself.
    ("a change", "POST", "/api/stop", {**OWN, "origin": "{url}"}, {"run": "one"}, 400),
    ("an asset", "GET", "/assets/main.js", TOKEN, None, 200),
]


@pytest.mark.parametrize(("method", "path", "headers", "body", "status"), named(GOOD))
def test_what_is_answered_forbids_foreign_scripts(
    page: Page, method: str, path: str, headers: dict[str, str], body: object, status: int
) -> None:
    found, told, text = ask(page, method, path, headers, body)
    assert found == status, text
    policy = dict(part.strip().partition(" ")[::2] for part in told["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert told["x-content-type-options"] == "nosniff"
    # The policy forbids scripts in the HTML, and there are none; and the key of changes stands in the HTML alone.
    assert (page.keys.page in text) == (path == "/")
    assert path != "/" or "<script>" not in text


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"GET / HTTP/1.1\r\nhost:", b""), (b"GET / HTTP/1.1\r\nx: " + b"x" * (8 << 20), b"HTTP/1.1 431 ")],
    ids=["nothing", "half a head", "a head of 8 MB"],
)
def test_a_connection_without_a_call_is_answered_or_ended(
    page: Page, monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as link:
        link.sendall(sent)
        assert link.recv(100).startswith(answer) if answer else link.recv(100) == b""


def test_the_token_is_brought_once_and_gives_a_cookie(page: Page) -> None:
    came = request("GET", page.opened())
    assert (came.status_code, came.headers["location"], came.headers["cache-control"]) == (303, "/", "no-store")
    name, _, rest = came.headers["set-cookie"].partition(";")
    assert {part.strip() for part in rest.split(";")} == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert page.keys.token not in came.headers["set-cookie"]
    assert request("GET", f"{page.url}/api/runs", headers={"cookie": name}).status_code == 200
    # Brought again, it does not stay in the browser's bar; what else was asked does.
    again = request("GET", f"{page.url}/?a=1&token={page.keys.token}", headers={"cookie": name})
    assert (again.status_code, again.headers["location"]) == (303, "/?a=1")
    for answer in (came, again):
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_page_that_is_open_to_others_asks_for_the_token_and_knows_its_names(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0") as other:
        assert request("GET", f"{other.url}/api/runs").status_code == 401
        assert other.get("/api/runs", headers={"host": "192.168.1.5:80"}).status_code == 200
        assert other.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


def test_every_start_has_a_token_of_its_own_and_given_ones_are_long_and_plain() -> None:
    made = {keys_with(None).token for _ in range(50)}
    assert len(made) == 50
    assert min(map(len, made)) >= 43  # 256 bits
    assert keys_with("x" * 16).token == "x" * 16
    for token in ("", "x" * 15, "ü" * 20, "a\nb" * 8):
        assert_refused(lambda token=token: keys_with(token), "--token")


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example")))
