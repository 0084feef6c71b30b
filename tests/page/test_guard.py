"""Who may ask what of the page, with real requests: names, tokens, other sites, paths, headers."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Generator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route
from tests.page.page_server import Page, finished, request, serving

from steelyard.errors import UserError
from steelyard.page.app import create_app
from steelyard.page.guard import PAGE_HEADER, Keys, is_loopback
from steelyard.page.jobs import Jobs
from steelyard.page.serving import keys_with

TOKEN = "a-token-of-more-than-sixteen"


def an_app() -> FastAPI:
    """The application, to read its routes from; nothing is asked of it."""
    return create_app(Path(), "127.0.0.1", Keys(), Jobs(Path()))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Generator[Page]:
    root = tmp_path_factory.mktemp("page")
    finished(root / "runs" / "one")
    finished(root / "outside")
    (root / "secret.txt").write_text("secret")
    (root / "runs" / "link").symlink_to(root / "outside")
    with serving(root / "runs") as served:
        yield served


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "localhost:1234", "[::1]:80", "127.0.0.1:9"])
def test_names_of_this_machine_are_answered(page: Page, host: str) -> None:
    assert page.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "10.0.0.7", "x@localhost", ""]
)
def test_other_names_are_not(page: Page, host: str) -> None:
    """DNS rebinding: a name that another site points at this machine still arrives under that name."""
    for path in ("/", "/api/runs", "/assets/main.js"):
        answer = page.get(path, headers={"host": host})
        assert answer.status_code in (400, 421), (host, path)
        assert "one" not in answer.text


ROUTES = [
    (route.path, method) for route in an_app().routes if isinstance(route, Route) for method in route.methods or ()
]


def strangers(page: Page) -> list[dict[str, str]]:
    """What may be brought in place of the token."""
    known = page.keys
    return [
        {},
        {"authorization": f"Bearer {known.token}x"},
        {"authorization": f"Bearer {known.token[:-1]}"},
        {"authorization": f"Basic {known.token}"},
        {"authorization": f"Bearer {known.session}"},
        {"authorization": f"Bearer {known.page}"},
        {"cookie": f"steelyard-{page.port}={known.token}"},
        {"cookie": f"steelyard-{page.port}="},
        {"cookie": f"steelyard-{page.port + 1}={known.session}"},
        {"cookie": known.session, PAGE_HEADER: known.page, "origin": page.url},
        {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-key": "x", "sec-websocket-version": "13"},
    ]


def test_there_are_routes() -> None:
    assert {"/", "/assets/{name}", "/api/events", "/api/runs", "/api/start"} <= {path for path, _ in ROUTES}


@pytest.mark.parametrize(("path", "method"), sorted(ROUTES))
def test_without_the_token_no_route_is_answered(page: Page, path: str, method: str) -> None:
    where = page.url + path.replace("{name}", "main.js")
    for headers in strangers(page):
        answer = request(method, where, headers=headers, timeout=10)
        assert answer.status_code == 401, headers
        assert "token" in answer.text or method == "HEAD"
        assert "set-cookie" not in answer.headers


def test_paths_that_are_not_there_are_not_told_from_those_that_are(page: Page) -> None:
    paths = ("/nowhere", "/assets/none.js", "/favicon.ico", "/docs", "/openapi.json", "//", "/?token=", "/?token=wrong")
    for path in (*paths, f"/api/runs?token={page.keys.token}"):
        assert request("GET", page.url + path).status_code == 401, path


def test_the_token_is_brought_once_and_gives_a_cookie(page: Page) -> None:
    came = request("GET", page.opened())
    assert (came.status_code, came.headers["location"], came.headers["cache-control"]) == (303, "/", "no-store")
    cookie = came.headers["set-cookie"]
    name, _, rest = cookie.partition(";")
    assert {part.strip() for part in rest.split(";")} == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert page.keys.token not in cookie
    jar = {"cookie": name}
    assert request("GET", page.url, headers=jar).status_code == 200
    assert request("GET", f"{page.url}/api/runs", headers=jar).status_code == 200
    # Brought again, it does not stay in the browser's bar; what else was asked does.
    again = request("GET", f"{page.url}/?a=1&token={page.keys.token}", headers=jar)
    assert (again.status_code, again.headers["location"]) == (303, "/?a=1")
    for answer in (came, again):
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_cookies_of_two_pages_on_one_machine_do_not_meet(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other, httpx.Client(verify=False) as client:
        for page in (one, other, one, other):
            assert client.get(page.opened(), follow_redirects=True).status_code == 200
        assert [client.get(f"{page.url}/api/runs").status_code for page in (one, other)] == [200, 200]


def test_every_start_has_a_token_of_its_own() -> None:
    made = {keys_with(None).token for _ in range(50)}
    assert len(made) == 50
    assert min(map(len, made)) >= 43  # 256 bits
    assert keys_with(TOKEN).token == TOKEN


def test_tokens_are_compared_in_constant_time(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append((given, wanted))
        return given == wanted

    monkeypatch.setattr("steelyard.page.guard.hmac.compare_digest", compare)
    wrong = "x" * len(page.keys.token)
    request("GET", f"{page.url}/?token={wrong}")
    request("GET", f"{page.url}/api/runs", headers={"authorization": f"Bearer {wrong}"})
    request("GET", f"{page.url}/api/runs", headers={"cookie": f"steelyard-{page.port}={wrong}"})
    token, session = page.keys.token.encode(), page.keys.session.encode()
    assert compared == [(wrong.encode(), token), (wrong.encode(), token), (wrong.encode(), session)]


def test_an_open_address_is_reached_by_address_and_with_the_token_alone(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0") as page:
        assert request("GET", f"{page.url}/api/runs").status_code == 401
        assert page.get("/api/runs", headers={"host": "192.168.1.5:80"}).status_code == 200
        assert page.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("token", ["short", "", "x" * 15, "ü" * 20, "a\nb" * 8])
def test_tokens_are_long_and_plain(token: str) -> None:
    with pytest.raises(UserError, match="--token"):
        keys_with(token)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example")))


CHANGES = [
    ("/api/start", {"recipe": "quickstart", "name": "new", "fields": {}}),
    ("/api/stop", {"run": "one"}),
    ("/api/resume", {"run": "one"}),
]


@pytest.mark.parametrize(("path", "body"), CHANGES)
def test_changes_need_the_pages_own_token_and_site(page: Page, path: str, body: dict[str, object]) -> None:
    """CSRF: another site can make a browser send requests, but does not know the token and cannot hide its origin."""
    refusals = [
        ({}, 403),
        ({PAGE_HEADER: "wrong"}, 403),
        ({PAGE_HEADER: page.keys.page, "origin": "http://evil.example"}, 403),
        ({PAGE_HEADER: page.keys.page, "origin": "null"}, 403),
        ({PAGE_HEADER: page.keys.page, "origin": f"http://127.0.0.1:{page.port + 1}"}, 403),
        ({PAGE_HEADER: page.keys.page, "sec-fetch-site": "cross-site"}, 403),
        ({PAGE_HEADER: page.keys.page, "sec-fetch-site": "same-site"}, 403),
    ]
    for headers, status in refusals:
        given = {**page.bearer, **headers}
        assert request("POST", page.url + path, json=body, headers=given).status_code == status, headers
    plain = request(
        "POST",
        page.url + path,
        content="{}",
        headers={**page.bearer, PAGE_HEADER: page.keys.page, "content-type": "text/plain"},
    )
    assert plain.status_code == 415
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert request(method, page.url + path, headers=page.bearer).status_code in (403, 405)
    assert not (page.root / "new").exists()
    # With all of it in order the request gets through to the answer itself.
    assert page.post("/api/stop", {"run": "one"}, {"origin": page.url}).status_code == 400


def test_nothing_may_be_read_across_sites(page: Page) -> None:
    answer = page.get("/api/runs", headers={"origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    for path in ("/api/runs", "/api/events", "/assets/main.js"):
        assert page.get(path, headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}).status_code == 403
    # A link from elsewhere may open the page.
    assert page.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/assets/main.js", "/nowhere", "/api/figure"])
def test_every_answer_forbids_foreign_scripts(page: Page, path: str) -> None:
    answer = page.get(path)
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_html_holds_no_script_of_its_own(page: Page) -> None:
    """What the policy would forbid is not there either; and the token stands in the HTML alone."""
    text = page.get("/").text
    assert page.keys.page in text
    assert "<script>" not in text
    assert " on" not in text.split("<body>")[1].replace(" on ", " ")
    assert page.keys.page not in page.get("/api/runs").text


def raw(page: Page, path: str) -> http.client.HTTPResponse:
    """Ask for a path exactly as it is written; other clients tidy it up first."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.putrequest("GET", path, skip_host=False)
    connection.putheader("authorization", page.bearer["authorization"])
    connection.endheaders()
    return connection.getresponse()


ESCAPES = [
    "../outside",
    "..%2foutside",
    "%2e%2e/outside",
    "%252e%252e%252foutside",
    "link",
    "/etc",
    "one/../../outside",
    "..\\outside",
]


@pytest.mark.parametrize("name", [*ESCAPES, "../secret.txt", "one%00", "%2fetc%2fpasswd", "."])
@pytest.mark.parametrize("form", ["/api/view?run={}", "/api/figure?kind=accuracy&run={}", "/api/experiment?run={}"])
def test_no_request_leads_outside_the_root(page: Page, name: str, form: str) -> None:
    answer = raw(page, form.format(name))
    body = answer.read().decode()
    assert answer.status == 400, body
    assert "no run of this name" in body
    assert "secret" not in body.replace("secret.txt", "")


@pytest.mark.parametrize(
    "name", ["../secret.txt", "..%2f..%2fsecret.txt", "%2e%2e%2findex.html", "index.html", "guard.py", ""]
)
def test_only_the_pages_own_files_are_assets(page: Page, name: str) -> None:
    answer = raw(page, f"/assets/{name}")
    assert answer.status == 404
    assert b"secret" not in answer.read()


@pytest.mark.parametrize("name", ESCAPES)
def test_no_verb_leads_outside_the_root(page: Page, name: str) -> None:
    plain = name.replace("%2f", "/").replace("%2e", ".")
    for path in ("/api/stop", "/api/resume"):
        answer = page.post(path, {"run": plain})
        assert answer.status_code == 400
        assert "no run of this name" in answer.json()["problem"]
    answer = page.post("/api/start", {"recipe": "quickstart", "name": plain, "fields": {}})
    assert answer.status_code == 400
    assert not any(path.name.startswith("outside-") for path in page.root.parent.iterdir())


def test_bodies_are_short_and_of_known_length(page: Page) -> None:
    answer = page.post("/api/stop", {"run": "x" * 100_000})
    assert answer.status_code == 413
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    chunked = {"transfer-encoding": "chunked"}
    connection.request("POST", "/api/stop", body=iter([b"{}"]), headers=chunked, encode_chunked=True)
    assert connection.getresponse().status == 413


def test_names_with_markup_are_data(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    finished(tmp_path / name)
    with serving(tmp_path) as page:
        answer = page.get("/api/view", params={"run": name})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.json()["runs"][0]["name"] == name
        assert name not in page.get("/").text
        assert raw(page, f"/api/view?run={quote(name)}").status == 200


def test_the_command_line_refuses_what_cannot_be_served(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "cannot listen on" in refused("watch", "runs", "--host", "")
    assert "--token: got 5 characters" in refused("watch", "runs", "--token", "short")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("watch", "file", "--port", "0")
