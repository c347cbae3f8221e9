"""The report in a real browser: headless Chromium through playwright, and axe-core for contrast, names and keyboard.

They need a Chromium, as Debian's package `chromium`, which `tests/run` installs as root, and are skipped without it.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.report.facts import RunFacts
from slurmtrain.report.page.render import Page, render
from slurmtrain.report.page.run_page import run_page
from slurmtrain.report.page.serve import Latest, Server
from slurmtrain.report.status.state import state
from slurmtrain.runs.run_dir import RunDir
from tests.support.fake_slurm import FakeSlurm
from tests.support.report_runs import BEGAN, interrupted_run, sweep_of_eight

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright axe-playwright-python"
    )
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"there is no browser on this machine: none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of an interrupted run and that of a sweep of eight, as files."""
    root = tmp_path_factory.mktemp("reports")
    monkeypatch = pytest.MonkeyPatch()
    slurm = FakeSlurm.install(root / "slurm")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(slurm.directory), prepend=":")
        run, sweep = interrupted_run(root / "runs"), sweep_of_eight(root / "runs")
        found = {"run": root / "run.html", "sweep": root / "sweep.html"}
        assert main(["report", str(run.path), "--out", str(found["run"])]) == 0
        assert main(["report", str(sweep), "--out", str(found["sweep"])]) == 0
    return found


def page_of(run: RunDir) -> Page:
    return run_page(RunFacts(run, state(run), BEGAN + 1e5))


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a report; at the end nothing may have been complained about, and nothing asked for but the page itself."""
    contexts, complaints, requests = [], [], []

    def open_page(what: str, scheme: str = "light", width: int = 1200) -> Any:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(pages[what].as_uri())
        page.evaluate("dispatchEvent(new Event('beforeprint'))")  # which draws all charts, not only those that are near
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if url not in [path.as_uri() for path in pages.values()]] == []


def check_access(page: Any, width: int) -> None:
    """By axe-core, and that nothing is out of sight."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    nav = page.locator("nav").evaluate("each => [each.scrollWidth, each.clientWidth]")
    assert width < 900 or nav[0] <= nav[1], "a link to a section is out of sight"
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found] == []


def test_a_report_of_a_run_can_be_read_on_a_phone_in_daylight(opened: Callable[..., Any]) -> None:
    check_access(opened("run", "light", 360), 360)


def test_a_report_of_a_sweep_can_be_read_at_night_and_its_table_is_sorted_by_a_column(
    opened: Callable[..., Any],
) -> None:
    page = opened("sweep", "dark", 1200)
    check_access(page, 1200)
    page.get_by_role("button", name="best_valid_loss").click()
    cells = page.locator("table.sortable tbody tr td:nth-child(7)").all_inner_texts()
    assert [float(cell) for cell in cells] == sorted(float(cell) for cell in cells)
    page.get_by_role("button", name="best_valid_loss").click()
    assert page.locator("table.sortable tbody tr td:nth-child(7)").all_inner_texts() == cells[::-1]


def test_each_chart_is_drawn_in_colours_of_its_own_and_dragging_over_one_shows_those_steps_in_all(
    opened: Callable[..., Any],
) -> None:
    page = opened("run", "dark", 1200)
    check_access(page, 1200)
    charts = page.locator("figure.chart")
    assert charts.count() > 10
    for index in range(charts.count()):
        drawn = charts.nth(index).locator(".plot path").count()
        assert drawn > 2, charts.nth(index).get_attribute("id")
    where = "found => found.map(each => [each.getBoundingClientRect().top, each.textContent.trim()])"
    rows = page.locator("#chart-timeline .yaxislayer-above text").evaluate_all(where)
    names = ["submitted", "1: preempted", "2: hang", "3: preempted", "4: finished"]
    assert [name for _, name in sorted(rows)] == names
    keys = page.locator("#chart-timeline .key")
    colors = {
        keys.nth(index).evaluate("each => getComputedStyle(each).backgroundColor") for index in range(keys.count())
    }
    assert len(colors) == keys.count() > 5 and "rgba(0, 0, 0, 0)" not in colors

    def steps(key: str) -> list[float]:
        found = page.evaluate(f"document.querySelector('#chart-{key} .plot').layout.xaxis.range")
        return [float(each) for each in found]

    assert steps("loss") == steps("mfu") == [0, 3000]
    area = page.locator("#chart-loss .nsewdrag")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function("document.querySelector('#chart-mfu .plot').layout.xaxis.range[0] > 700")
    assert steps("loss") == steps("mfu") == pytest.approx([750, 1500], abs=15)
    scale = page.get_by_role("button", name="Logarithmic scale: Loss")
    scale.click()
    assert scale.get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.querySelector('#chart-loss .plot').layout.yaxis.type") == "log"


def test_what_a_run_directory_says_is_never_run(browser: Any, tmp_path: Path, slurm: FakeSlurm) -> None:
    run = interrupted_run(tmp_path / "runs")
    evil = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    info = json.loads(run.info_file.read_text())
    run.info_file.write_text(json.dumps({**info, "name": evil, "overrides": [evil]}))
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 3010, evil: 1.0}) + "\n")
    path = tmp_path / "evil.html"
    path.write_text(render(page_of(run)))
    page = browser.new_page()
    page.goto(path.as_uri())
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("window.hacked") is None
    # Nor would a script that somebody got into the page: the policy names the digest of ours alone.
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    )
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_served_page_is_refreshed_until_its_run_has_ended(browser: Any, tmp_path: Path, slurm: FakeSlurm) -> None:
    found = replace(page_of(interrupted_run(tmp_path / "runs")), alive=True)
    now = [found]
    server = Server(Latest(lambda: now[0], every_s=0.5), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        page = browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        now[0] = replace(found, sentences=("It has got on.",))
        page.get_by_text("It has got on.").wait_for(timeout=10_000)
        page.locator("#chart-loss .plot path").first.wait_for(state="attached", timeout=10_000)
        now[0] = replace(found, state="finished", alive=False)
        page.get_by_text("so this page no longer changes").wait_for(timeout=10_000)
        assert complaints == []
        page.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
