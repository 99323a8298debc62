"""Who may ask: loopback by Host, others by token, never another site; how much; what the browser may do."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from html import escape
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmil.core.errors import InputError
from xmil.viewer.kept import to_json

METHODS = ("GET", "HEAD", "POST")
MAX_URL = 2048
MAX_BODY = 32 << 20  # 100,000 annotations
MIN_TOKEN = 8
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'"
)
NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"


@dataclass(frozen=True)
class Rules:
    """Where the server listens, the token it asks for, and whether notebooks on this machine may frame it."""

    host: str = "127.0.0.1"
    token: str | None = None
    framed: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise InputError(f"A token needs at least {MIN_TOKEN} characters.")
        if self.token is None and not is_loopback(self.host):
            raise InputError(f"Serving on {self.host} requires a token; pass --token, or use 127.0.0.1.")

    @property
    def policy(self) -> str:
        """The content security policy."""
        return f"{POLICY}; frame-ancestors 'self'{' ' + NOTEBOOKS if self.framed else ''}"

    @property
    def cookie(self) -> str:
        """What the cookie holds: proof of the token, not the token."""
        return hashlib.sha256(f"xmil viewer {self.token}".encode()).hexdigest()

    def knows(self, token: str) -> bool:
        """Whether a token is the right one."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """The gate before every route; what it lets in leaves with the headers that bind the browser."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with bounded body and safe headers."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # websockets are not accepted
        headers = Headers(scope=scope)
        refused = self._refusal(scope, headers)
        guarded = self._guarded(send)
        if refused is not None:
            await _refuse(guarded, scope, *refused)
        elif self.rules.token is not None and (place := self._without_token(scope)) is not None:
            await _answer(guarded, 303, "", {"location": place, "set-cookie": self._set_cookie(scope)})
        else:
            await self.app(scope, _bounded(receive), guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """The status and sentence for a request that may not pass."""
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL:
            return 414, "The address is too long."
        if not self._host_is_ours(headers):
            return 403, "The Host header is not this server's."
        if _is_foreign(scope, headers):
            return 403, "Requests from other sites are refused."
        if scope["method"] not in METHODS:
            return 405, "The server is read-only."
        if _declared_length(headers) > MAX_BODY:
            return 413, "The body is too large."
        if self.rules.token is not None and not self._may_enter(scope, headers):
            return 401, "A token is required: open the address that the server printed."
        return None

    def _host_is_ours(self, headers: Headers) -> bool:
        """On loopback only names of this machine: a foreign name that resolves to us is an attack."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return False
        name = _hostname(f"//{hosts[0]}")
        return name is not None and (not is_loopback(self.rules.host) or is_loopback(name))

    def _may_enter(self, scope: Scope, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.rules.knows(token.strip()):
            return True
        if any(self.rules.knows(token) for token in _tokens(scope)):
            return True
        return hmac.compare_digest(_cookie(headers, _cookie_name(scope)).encode(), self.rules.cookie.encode())

    def _without_token(self, scope: Scope) -> str | None:
        """The address to go on to when the page was opened with the token: it leaves the address bar."""
        if scope["method"] != "GET" or not _tokens(scope) or scope["path"] not in ("/", "/index.html"):
            return None
        rest = [(k, v) for k, v in _query(scope) if k != "token"]
        return str(scope["path"]) + (f"?{urlencode(rest)}" if rest else "")

    def _set_cookie(self, scope: Scope) -> str:
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        return f"{_cookie_name(scope)}={self.rules.cookie}; HttpOnly; SameSite=Strict; Path=/{secure}"

    def _guarded(self, send: Send) -> Send:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["content-security-policy"] = self.rules.policy
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
                headers["cross-origin-resource-policy"] = "same-origin"
                headers["cross-origin-opener-policy"] = "same-origin"
                headers.setdefault("cache-control", "no-cache")
                if not self.rules.framed:
                    headers["x-frame-options"] = "SAMEORIGIN"
            await send(message)

        return guarded


class TooLargeError(Exception):
    """A body that grew beyond the limit."""


def _bounded(receive: Receive) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY:
            raise TooLargeError
        return message

    return bounded


async def _refuse(send: Send, scope: Scope, status: int, sentence: str) -> None:
    """A person who opened the page gets text, a program gets JSON."""
    told = {"allow": _allowed(str(scope["path"]))} if status == 405 else {}
    if not Headers(scope=scope).get("accept", "").startswith("text/html"):
        return await _answer(send, status, sentence, told)
    words = f"<!doctype html><meta charset=utf-8><title>xmil</title><h1>xmil</h1><p>{escape(sentence)}</p>"
    told["content-type"] = "text/html; charset=utf-8"
    return await _answer(send, status, sentence, told, words.encode())


async def _answer(
    send: Send, status: int, sentence: str, headers: dict[str, str] | None = None, body: bytes | None = None
) -> None:
    if body is None:
        body = to_json({"error": sentence}) if sentence else b""
    told = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(key.encode(), value.encode("latin-1")) for key, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _is_foreign(scope: Scope, headers: Headers) -> bool:
    """Whether another site's page asks; following a link to the page itself is allowed."""
    origin = headers.get("origin")
    if origin is not None and origin.split("://")[-1].lower() != headers.get("host", "").lower():
        return True
    site = headers.get("sec-fetch-site", "none")
    opened = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site not in ("none", "same-origin") and not opened


def _declared_length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else MAX_BODY + 1


def _hostname(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        _ = parts.port  # an impossible port is an error
        return parts.hostname if parts.username is None and parts.path == "" else None
    except ValueError:
        return None


def _query(scope: Scope) -> list[tuple[str, str]]:
    try:
        return parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=16)
    except ValueError:
        return []


def _tokens(scope: Scope) -> list[str]:
    return [value for key, value in _query(scope) if key == "token"]


def _cookie_name(scope: Scope) -> str:
    """One cookie for each port: several servers on one machine do not mix."""
    server = scope.get("server")
    return f"xmil-{server[1] if server else 0}"


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _allowed(path: str) -> str:
    """The methods that an address takes."""
    if path.endswith("/whatif"):
        return "POST"
    return "GET, HEAD, POST" if "/annotations-" in path else "GET, HEAD"
