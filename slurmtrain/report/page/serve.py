"""The page of a run served on this machine while the run goes on: `report RUN --serve`.

Login nodes are shared: everybody who is logged in can connect to a port of 127.0.0.1. So the address has a token that only
this person's terminal shows, and a request without it gets nothing. A web page elsewhere that this person has open could
make their browser ask, too: requests with a foreign Host (DNS rebinding) are refused, and the answers cannot be framed
or read from another origin.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from slurmtrain.errors import SlurmtrainError, UsageError
from slurmtrain.report.page.contents import Page
from slurmtrain.report.page.render import plotly_js, policy, render

ADDRESS = "127.0.0.1"
# A tunnel (ssh -L) may end at another port of the reader's machine.
HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
REQUEST_S = 10.0  # a client that says nothing is hung up on after this long
SHARE = 0.1  # greatest share of the time that is spent on looking, also where many browsers ask


class Latest:
    """The page as it was at the last look; one look at a time, and only if somebody asks.

    Args:
        make: looks at the run.
        every_s: seconds between two looks, if they are quick.
        clock: returns seconds, monotonic.
    """

    def __init__(self, make: Callable[[], Page], every_s: float, clock: Callable[[], float] = time.monotonic):
        self._make, self._every_s, self._clock = make, every_s, clock
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._due = 0.0

    def get(self) -> Page:
        """Return the page.

        Raises:
            SlurmtrainError: there is no page yet, and it cannot be made.
        """
        with self._lock:
            began = self._clock()
            if self._page is not None and began < self._due:
                return self._page
            try:
                self._page = self._make()
            except SlurmtrainError:
                if self._page is None:
                    raise  # else the last page stays: files of a run may be in the making
            took_s = self._clock() - began
            self._due = self._clock() + max(self._every_s / 2, took_s * (1 / SHARE - 1))
            return self._page

    def html(self, page: Page, *, whole: bool) -> bytes:
        """Return a page as HTML; what has changed of it is asked for without plotly.js, which is most of it."""
        return render(page, refresh_s=self._every_s if page.alive else None, library=whole).encode()


def tag_of(page: Page) -> str:
    """Return a tag that differs from page to page, apart from the time at which it was made."""
    said = repr((page.title, page.state, page.sentences, page.tiles, page.sections))
    return f'"{hashlib.sha256(said.encode()).hexdigest()[:32]}"'


class Server(ThreadingHTTPServer):
    """Answers with one page, at one address of this machine.

    Args:
        latest: the page.
        port: 0: any that is free.

    Attributes:
        token: what the path of a request must be.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, latest: Latest, port: int):
        self.latest = latest
        self.token = secrets.token_urlsafe(24)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that has gone away; anything else is told in one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"slurmtrain: a request failed: {type(error).__name__}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the one path that there is."""

    server: Server
    server_version, sys_version = "slurmtrain", ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if not is_own_host(self.headers.get_all("Host") or []):
            return self._say(HTTPStatus.FORBIDDEN, b"this server answers at 127.0.0.1 and localhost only\n", with_body)
        if not has_token(self.path, self.server.token):
            return self._say(
                HTTPStatus.NOT_FOUND, b"not found; the address is in the terminal that serves it\n", with_body
            )
        try:
            page = self.server.latest.get()
        except SlurmtrainError as error:
            return self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{error.message}\n".encode(errors="replace"), with_body)
        tag = tag_of(page)
        if self.headers.get("If-None-Match") == tag:
            return self._say(HTTPStatus.NOT_MODIFIED, b"", with_body, tag)
        content = self.server.latest.html(page, whole=urlsplit(self.path).query != "content")
        return self._say(HTTPStatus.OK, content, with_body, tag, "text/html; charset=utf-8")

    def _say(
        self, status: HTTPStatus, body: bytes, with_body: bool, tag: str = "", kind: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy(served=True)}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a log would have the token in it."""


def is_own_host(hosts: list[str]) -> bool:
    """Return whether the Host headers of a request name this machine's loopback, with any port."""
    if len(hosts) != 1:
        return False
    name, colon, port = hosts[0].strip().lower().rpartition(":")
    if not colon or hosts[0].strip().endswith("]"):
        name, port = hosts[0].strip().lower(), "0"
    return name in HOSTS and port.isdigit()


def has_token(path: str, token: str) -> bool:
    """Return whether the path of a request is the token, compared in a time that tells nothing about it."""
    try:
        given = urlsplit(path).path.strip("/").encode()
    except ValueError:
        return False
    return hmac.compare_digest(given, token.encode())


def serve(make: Callable[[], Page], *, port: int, every_s: float) -> int:
    """Serve a page until Ctrl-C, and return the exit code.

    Raises:
        UsageError: the port is taken.
        SlurmtrainError: the page cannot be made.
    """
    latest = Latest(make, every_s)
    plotly_js()
    latest.get()  # what is wrong with the run is said here, not in a browser
    try:
        server = Server(latest, port)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used: {error.strerror}", hint="leave out --port to use any free port"
        ) from None
    with server:
        number = server.server_address[1]
        print(f"serving at {server.url}", flush=True)
        print(
            f"from your own machine: ssh -N -L {number}:{ADDRESS}:{number} {socket.gethostname()}, and open the same address; "
            "Ctrl-C ends it",
            flush=True,
        )
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0
