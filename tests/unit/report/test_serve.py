"""The page served on this machine: who is answered, with what, and how often the run is looked at."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.page.render import Page
from slurmtrain.report.page.serve import Latest, Server, is_own_host

SENTENCES = (("It goes on.",), ("Nothing needs to be done.",))
PAGE = Page("a run", "run", "running", "busy", *SENTENCES, (), "Made now", alive=True)


class Run:
    """A run of which a page can be made, and how often one was."""

    def __init__(self) -> None:
        self.page, self.looks, self.broken = PAGE, 0, False

    def make(self) -> Page:
        self.looks += 1
        if self.broken:
            raise UnreadableRecordError("run.json is being written")
        return self.page


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def server(run: Run) -> Iterator[Server]:
    found = Server(Latest(run.make, every_s=0.0, clock=lambda: 0.0), 0)  # each request is a look
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def ask(
    server: Server, path: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"/{server.token}/" if path is None else path, headers=named)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_whoever_has_the_token_gets_the_page_and_nobody_else_gets_anything(server: Server) -> None:
    status, headers, text = ask(server)
    assert status == ask(server, f"/{server.token}")[0] == 200
    assert "It goes on." in text and "connect-src 'self'" in headers["Content-Security-Policy"]
    assert (headers["Cache-Control"], headers["X-Frame-Options"]) == ("no-store", "DENY")
    token = server.token
    near = (f"{token[:-1]}/", f"{token}x/", f"{token.swapcase()}/", f"{token}/{token}", f"x/{token}", f"?{token}")
    for path in ("/", "/index.html", "/../etc/passwd", "//", *(f"/{each}" for each in near)):
        status, _, text = ask(server, path)
        assert status == 404 and "It goes on." not in text and server.token not in text


def test_a_page_elsewhere_that_points_its_name_at_this_machine_gets_nothing(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", "", "[::2]:1"):
        status, _, text = ask(server, Host=host)
        assert status == 403 and "It goes on." not in text
    assert not is_own_host([]) and not is_own_host(["localhost", "evil.example"])
    # A tunnel may end at another port.
    for host in ("localhost:9999", "127.0.0.1:80", "127.0.0.1", "LOCALHOST", "[::1]:8000", "[::1]"):
        assert ask(server, Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_sent_to_it(server: Server, method: str) -> None:
    status, _, text = ask(server, method=method)
    assert status == 501 and "It goes on." not in text


def test_a_page_has_what_is_known_now_and_is_not_asked_for_again_when_its_run_has_ended(
    server: Server, run: Run
) -> None:
    run.page = replace(PAGE, sentences=("It has got on.",))
    whole, part = ask(server)[2], ask(server, f"/{server.token}/?content")[2]
    assert "It has got on." in whole and "It has got on." in part and len(part) < len(whole) / 100
    assert '<meta name="slurmtrain-refresh-s"' in whole
    run.page = replace(PAGE, state="finished", alive=False)
    assert '<meta name="slurmtrain-refresh-s"' not in ask(server)[2]  # it is not asked for again


def test_it_listens_on_this_machine_alone_and_two_servers_have_other_tokens(server: Server, run: Run) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with Server(Latest(run.make, 5.0), 0) as other:
        assert other.token != server.token
    assert len(server.token) >= 32
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/{re.escape(server.token)}/", server.url)
