"""The page in a real browser: curves are drawn, move while steps are written, and a kill is shown."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.watched_runs import watching, write_histograms, write_run, write_steps, write_timeline

from meshwright.launch.heartbeat import Heartbeat, HeartbeatFile, heartbeat_path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: the page is not tested in a browser"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no chromium: the page is not tested in a browser (apt install chromium)",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens an address; errors of the page's script fail the test."""
    errors: list[str] = []
    contexts: list[Any] = []

    def opened(address: str, *, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.append(request.url) if is_outside(request.url) else None)
        page.goto(address)
        page.wait_for_selector(".chart .line")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def is_outside(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1", "data:"))


def text(page: Any, selector: str) -> str:
    return " ".join(page.locator(selector).all_inner_texts())


def wait_for_text(page: Any, selector: str, part: str) -> None:
    """Wait until elements show a text: each part of the page comes with an answer of its own."""
    deadline = time.monotonic() + 120
    while part not in text(page, selector):
        assert time.monotonic() < deadline, (selector, part, text(page, selector))
        page.wait_for_timeout(50)


def wait_until(page: Any, expression: str) -> None:
    """Wait until an expression is true; the page's own policy forbids what playwright has for this."""
    deadline = time.monotonic() + 120
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def num_lines(count: int) -> str:
    return f"document.querySelectorAll('.chart:first-child .line').length === {count}"


def test_two_runs_are_drawn_over_each_other(open_page: Any, tmp_path: Path):
    write_run(tmp_path / "base")
    write_run(tmp_path / "other", num_steps=40)
    with watching(str(tmp_path / "base"), str(tmp_path / "other")) as address:
        page = open_page(address)
        wait_until(page, num_lines(4))
        page.wait_for_selector(".level", state="attached")  # the prediction
        wait_for_text(page, ".chart h2", "Loss")
        wait_for_text(page, "#ranks h2", "Step time by rank")
        wait_for_text(page, "#heat-labels span:first-child", "rank 5")  # the slowest
        wait_for_text(page, "#slowest", "50% above the median rank")
        wait_for_text(page, "#events", "<img src=x onerror=alert(1)>")  # as text
        page.locator(".swatch").nth(1).click()
        wait_until(page, num_lines(2))


def test_curves_move_and_a_killed_run_is_shown(open_page: Any, tmp_path: Path):
    run_dir = write_run(tmp_path / "live", num_steps=10)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    heartbeats = HeartbeatFile(heartbeat_path(run_dir, 0))
    heartbeats.write(Heartbeat(0, socket.gethostname(), process.pid, 10, "step", time.time() + 1))
    try:
        with watching(str(run_dir)) as address:
            page = open_page(address)
            page.wait_for_selector(".state.running")
            before = page.locator(".chart .line").first.get_attribute("d")
            write_steps(run_dir, 11, 30)
            wait_until(page, "document.title.includes('step 30')")
            wait_until(page, f"document.querySelector('.chart .line').getAttribute('d') !== {before!r}")
            wait_for_text(page, ".tile", "7 min")  # 70 steps of 6.25 s
            process.kill()
            process.wait()
            page.wait_for_selector(".state.killed")
            wait_for_text(page, ".run", "rank 0 ended without a word after step 10")
    finally:
        process.kill()
        process.wait()
        heartbeats.close()


def test_the_pipeline_of_a_profile_is_drawn(open_page: Any, tmp_path: Path):
    write_timeline(write_run(tmp_path / "base"), pp=4)
    with watching(str(tmp_path / "base")) as address:
        page = open_page(address)
        page.wait_for_selector("#timeline")
        wait_for_text(page, "#pipeline-note", "1f1b: measured 32.4 s")
        wait_for_text(page, "#pipeline-note", "27 s.")
        wait_for_text(page, "#pipeline-labels span:last-child", "rank 3")
        # The first forward of rank 0 and, below it, its thin prediction.
        context = "document.getElementById('timeline').getContext('2d')"
        for row in (8, 25):
            wait_until(page, f"{context}.getImageData(5, {row} * devicePixelRatio, 1, 1).data[3] > 0")


def test_magnitudes_are_drawn_by_layer_and_over_steps(open_page: Any, tmp_path: Path):
    run_dir = write_run(tmp_path / "base")
    write_histograms(run_dir, num_layers=4)
    with watching(str(run_dir)) as address:
        page = open_page(address)
        wait_until(page, "document.getElementById('histogram-layers').height === 4")
        wait_for_text(page, "#histogram-at", "step 60")
        wait_for_text(page, "#histogram-note", "In e4m3 without a scale")
        page.select_option("#histogram-kind", "output_gradient")
        wait_until(page, "document.getElementById('histogram-note').textContent.includes('In e5m2')")
        page.locator("#histogram-layers").click(position={"x": 20, "y": 85})
        wait_until(page, "document.getElementById('histogram-steps-title').textContent.startsWith('Layer 3')")
        write_histograms(run_dir, num_layers=4, steps=(80,))
        wait_until(page, "document.getElementById('histogram-at').textContent === 'step 80'")


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_page_fits_a_phone_and_the_dark(open_page: Any, tmp_path: Path, width: int, scheme: str):
    write_histograms(write_run(tmp_path / "base"))
    with watching(str(tmp_path / "base")) as address:
        page = open_page(address, width=width, scheme=scheme)
        page.wait_for_selector("#heat")
        page.wait_for_selector("#histogram-layers")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(19, 22, 25)" if scheme == "dark" else "rgb(246, 245, 241)")
