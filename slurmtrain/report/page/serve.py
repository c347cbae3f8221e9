"""The page of a run served on this machine while the run goes on: `report RUN --serve`.

Login nodes are shared: everybody who is logged in can connect to a port of 127.0.0.1. So the address has a token that only
this person's terminal shows, and a request without it gets nothing. A web page elsewhere that this person has open could
make their browser ask, too: requests with a foreign Host (DNS rebinding) are refused, and the answers cannot be framed
or read from another origin.
"""

from __future__ import annotations

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
from slurmtrain.report.page.render import Page, plotly_js, policy, render

ADDRESS = "127.0.0.1"
# A tunnel (ssh -L) may end at another port of the reader's machine.
HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
REQUEST_S = 10.0  # a client that says nothing is hung up on after this long
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
SHARE = 0.1  # greatest share of the time that is spent on looking, also where many browsers ask


class Latest:
    """The page as it was at the last look; one look at a time, and only if somebody asks.

    Args:
        make: looks at the run.
        every_s: seconds between two looks, if they are quick.
        clock: returns seconds, monotonic.
    """

    def __init__(self, make: Callable[[], Page], every_s: float, clock: Callable[[], float] = time.monotonic):
        self.every_s = every_s
        self._make, self._clock = make, clock
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
            self._due = self._clock() + max(self.every_s / 2, took_s * (1 / SHARE - 1))
            return self._page


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
    """Answers GET of the one path that there is."""

    server: Server
    server_version, sys_version = "slurmtrain", ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        if not is_own_host(self.headers.get_all("Host") or []):
            return self._say(HTTPStatus.FORBIDDEN, "this server answers at 127.0.0.1 and localhost only\n")
        if not has_token(self.path, self.server.token):
            return self._say(HTTPStatus.NOT_FOUND, "not found; the address is in the terminal that serves it\n")
        latest = self.server.latest
        try:
            page = latest.get()
        except SlurmtrainError as error:
            return self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{error.message}\n")
        refresh_s = latest.every_s if page.alive else None
        # What has changed is asked for without plotly.js, which is most of the page.
        content = render(page, refresh_s=refresh_s, library=urlsplit(self.path).query != "content")
        return self._say(HTTPStatus.OK, content, "text/html; charset=utf-8")

    def _say(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", f"{policy(served=True)}; frame-ancestors 'none'")
        self.end_headers()
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
