"""Every tab in every scene: no errors, no findings of axe, no page wider than its window, in both schemes."""

from typing import Any

import pytest
from browser_scenes import SCENES

TABS = ("live", "requests", "playground", "services")
WIDTHS = (360, 1600)
# Without resultTypes axe describes all that it found right, which takes long.
AXE = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"],
    "resultTypes": ["violations"],
}


def findings(page: Any) -> list[str]:
    """Serious and critical findings of axe."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    return [
        f"{found['id']}: {[node['html'] for node in found['nodes'][:3]]}"
        for found in axe.run(page, options=AXE).response["violations"]
        if found["impact"] in ("serious", "critical")
    ]


def overflow(page: Any) -> int:
    """How many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def show(page: Any, tab: str) -> None:
    page.locator(f"#tab-{tab}").click()
    page.locator(f"#panel-{tab}").wait_for()


@pytest.mark.parametrize(
    ("scene", "width", "scheme", "tabs"),
    [
        ("loaded", 1600, "light", TABS),
        ("loaded", 360, "dark", TABS),
        ("twenty", 1600, "dark", ["live"]),
        ("degraded", 360, "light", ["live", "requests"]),
    ],
)
def test_tabs_are_accessible(scene: str, width: int, scheme: str, tabs: list[str], visitor: Any) -> None:
    page = visitor.open(scene, scheme=scheme, width=width)
    page.locator("#panel-live .services tbody tr").first.wait_for()
    for tab in tabs:
        show(page, tab)
        if tab == "requests":
            page.get_by_label("Find").fill("client-1")
            page.locator(".row-button").first.click()
        if page.get_by_role("button", name="Pause").count():
            page.get_by_role("button", name="Pause").click()
        assert findings(page) == [], tab


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_no_scene_is_wider_than_the_window(scene: str, visitor: Any) -> None:
    page = visitor.open(scene)
    page.locator("#status:not(:text('connecting'))").wait_for()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        for tab in TABS:
            show(page, tab)
            assert overflow(page) <= 0, f"{tab} at {width}"


def test_the_form_for_a_key_is_accessible(visitor: Any) -> None:
    page = visitor.open("key")
    page.get_by_label("API key or admin key").wait_for()
    assert findings(page) == []
