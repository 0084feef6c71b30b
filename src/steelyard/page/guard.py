"""Who may ask what of the page: the name it is called by, the token, requests from other sites, headers of answers.

Every request passes here before anything else sees it. Without the token, which only the printed address holds, nothing
is answered: other users of this machine reach a loopback address too. Against names that another site points at this
machine (DNS rebinding) the Host header must be an address or a name of our own; against requests of other sites
(CSRF) whatever changes something needs a token that only the page's own HTML holds, and no answer may be read across
sites.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_HEADER = "x-steelyard-page"
"""The header in which the page's own script sends the token from its HTML."""
READING = ("GET", "HEAD")
LONGEST_BODY = 65536
"""Bytes of a request's body; nobody needs more to start a recipe."""

# Vega draws with styles on single elements, so styles may stand in the document; scripts may come from us alone, and
# nothing is ever evaluated: figures are shown by Vega's interpreter of expressions.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Keys:
    """What proves that a request may be answered; made anew with every start of the page."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """What a browser must bring once, in the address, and a program with every request, as a bearer."""
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """What the cookie of a browser that brought the token holds."""
    page: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """What the page's HTML holds and its script sends with everything that changes something."""


def _same(given: str | None, wanted: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), wanted.encode())


class Guard:
    """The middleware that lets a request through, or answers it with one line of plain text."""

    def __init__(self, app: ASGIApp, host: str, keys: Keys) -> None:
        self.app, self.host, self.keys = app, host, keys
        self.open = not is_loopback(host)
        self.names = {"localhost", host.strip("[]").lower()}
        if self.open:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and hand it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        method = str(scope["method"])
        refusal = self._host(headers) or self._site(headers, scope["path"]) or self._length(headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not self._known(headers):
            await self._admit(scope["path"], query, headers, send)
            return
        if "token" in query:  # a second time, from the same address: it is not left in the browser's bar
            await _answer(send, 303, "", {"location": _without_token(query)})
            return
        if method not in READING:
            refusal = self._change(headers)
            if refusal is not None:
                await _answer(send, *refusal)
                return
        await self.app(scope, receive, _with_headers(send))

    def _host(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """An address cannot be pointed elsewhere, a name can: only names of our own are answered."""
        given = headers.get("host", "")
        name = (urlsplit(f"//{given}").hostname or "") if _plain(given) else ""
        if name in self.names or (self.open and _is_address(name)) or is_loopback(name):
            return None
        return 421, "this page is not called by that name; open it under the address that `steelyard watch` printed"

    def _site(self, headers: Mapping[str, str], path: str) -> tuple[int, str] | None:
        """Browsers say where a request comes from; another site may link to the page, and do nothing else."""
        site = headers.get("sec-fetch-site", "same-origin")
        if site not in ("same-origin", "none") and not (path == "/" and headers.get("sec-fetch-mode") == "navigate"):
            return 403, "requests from other sites are not answered"
        return None

    def _length(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdigit() or int(length) > LONGEST_BODY:
            return 413, f"a request may hold {LONGEST_BODY} bytes, and must say how many it has"
        return None

    def _known(self, headers: Mapping[str, str]) -> bool:
        bearer = headers.get("authorization", "")
        if bearer.startswith("Bearer ") and _same(bearer.removeprefix("Bearer "), self.keys.token):
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(headers))
        except CookieError:
            return False
        return found is not None and _same(found.value, self.keys.session)

    async def _admit(self, path: str, query: dict[str, list[str]], headers: Mapping[str, str], send: Send) -> None:
        """Whoever brings the token gets a cookie, and an address without it."""
        if path != "/" or not _same(query.get("token", [None])[0], self.keys.token):
            await _answer(send, 401, "this page needs its token: open the address that `steelyard watch` printed")
            return
        target = _without_token(query)
        cookie = f"{_cookie_name(headers)}={self.keys.session}; HttpOnly; SameSite=Strict; Path=/"
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            await _answer(send, 303, "", {"location": target, "set-cookie": cookie})
        else:
            # Of a link of another site: a browser keeps a strict cookie back as long as it is being redirected.
            await _answer(send, 200, "", {"refresh": f"0; url={target}", "set-cookie": cookie})

    def _change(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return 403, "requests from other sites are not answered"
        if not _same(headers.get(PAGE_HEADER), self.keys.page):
            return 403, "only the page itself may start, stop or resume runs; reload it"
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "what is sent must be application/json"
        return None


def _cookie_name(headers: Mapping[str, str]) -> str:
    """Cookies do not tell ports apart: the name does, so that two pages on one machine do not log each other out."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"steelyard-{port if port.isascii() and port.isdigit() else 80}"


def _without_token(query: Mapping[str, list[str]]) -> str:
    rest = urlencode({name: values for name, values in query.items() if name != "token"}, doseq=True)
    return f"/?{rest}" if rest else "/"


def _plain(host: str) -> bool:
    return bool(host) and not any(letter in host for letter in "/\\@?# \t")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {key.lower() for key, _ in message.get("headers", [])}
            more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in given]
            if b"cache-control" not in given:
                more.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return sender


async def _answer(send: Send, status: int, line: str, more: Mapping[str, str] | None = None) -> None:
    headers = {"content-type": "text/plain; charset=utf-8", **HEADERS, **(more or {})}
    pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
    sender = _with_headers(send)
    await sender({"type": "http.response.start", "status": status, "headers": pairs})
    await sender({"type": "http.response.body", "body": f"{line}\n".encode() if line else b""})
