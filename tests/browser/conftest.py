"""A browser, the stand-in server, and pages of it whose errors are collected."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser_stand_in import StandIn

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server


class Visitor:
    """Opens scenes of a stand-in server; ``errors`` are those of the console and of scripts."""

    def __init__(self, browser: Any, server: StandIn) -> None:
        self._browser, self._server = browser, server
        self.errors: list[str] = []
        self._contexts: list[Any] = []

    def open(self, scene: str, tab: str = "live", *, width: int = 1280, scheme: Any = "light") -> Any:
        context = self._browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{self._server.url}/{scene}/#{tab}")
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _note(self, kind: str, text: str) -> None:
        # The browser itself says so of every refused request.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.errors.append(text)


@pytest.fixture
def visitor(browser: Any, server: StandIn) -> Iterator[Visitor]:
    """Fails the test if any page had an error."""
    visitor = Visitor(browser, server)
    yield visitor
    visitor.close()
    assert visitor.errors == []
