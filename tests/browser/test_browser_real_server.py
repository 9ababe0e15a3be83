"""The page of a real server with two engines: an answer, its request, a pin, and an engine that is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
_START_S = 240
_STEP_MS = 60_000


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a bundled model; its two engines can hold the weights of both its services."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "server": {"port": port},
        "services": [{"name": name, "model": "smollm2", "dtype": "float32"} for name in ("chat", "code")],
        "devices": [{"device": "cpu", "threads": 1}, {"device": "cpu", "threads": 1}],
        "weights": {"memory": "2GiB"},
        "kv_cache": {"memory": "64MiB"},
    }
    (folder / "shoal.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "shoal.cli", "serve", "--config", "shoal.yaml"]
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(command, cwd=folder, stdout=written, stderr=written)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        with suppress(URLError), urlopen(f"{url}/health") as answer:
            if json.load(answer)["status"] == "ok":
                return
        time.sleep(0.2)
    pytest.fail(f"the server did not start: {log.read_text()}")


@pytest.fixture
def page(browser: Any, server_url: str) -> Iterator[Any]:
    """A page that has loaded without any error by its end."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(_STEP_MS)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{server_url}/")
    yield page
    context.close()
    assert errors == []


def test_an_answer_is_streamed_and_its_request_shown(page: Any) -> None:
    page.get_by_role("tab", name="Playground").click()
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Most output tokens").fill("12")
    page.get_by_label("Message").fill("Name three fish.")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("12 output tokens").wait_for(timeout=_STEP_MS)
    assert page.locator(".answer .text:visible").inner_text().strip()
    page.get_by_role("tab", name="Requests").click()
    row = page.locator("#panel-requests .summary").first
    expect(row).to_contain_text("chat", timeout=_STEP_MS)
    expect(row.locator(".tokens")).to_contain_text("12", timeout=_STEP_MS)


def test_a_service_is_pinned_and_unpinned(page: Any) -> None:
    page.get_by_role("tab", name="Services").click()
    row = page.get_by_role("row", name="code").first
    page.get_by_role("button", name="Pin code", exact=True).click()
    expect(row).to_contain_text("0 (resident), 1 (resident); pinned", timeout=_STEP_MS)
    page.get_by_role("button", name="Unpin code").click()
    expect(row).not_to_contain_text("pinned", timeout=_STEP_MS)


def test_an_engine_that_is_killed_is_shown_until_it_is_back(page: Any, server_url: str) -> None:
    status = page.locator("#status")
    expect(status).to_contain_text("ok", timeout=_STEP_MS)
    with urlopen(f"{server_url}/health") as answer:
        pid = next(engine["pid"] for engine in json.load(answer)["engines"] if engine["name"] == "1")
    os.kill(pid, signal.SIGKILL)
    expect(status).to_contain_text("degraded", timeout=_STEP_MS)
    expect(page.get_by_role("article", name="Engine 1")).to_contain_text("SIGKILL", timeout=_STEP_MS)
    expect(status).to_contain_text("ok", timeout=_STEP_MS)
