"""The tab Live, the connection, and keys."""

from html import unescape
from typing import Any

import pytest
from browser_scenes import MARKUP, MIB, SCENES
from browser_stand_in import ADMIN_KEY, KEY, StandIn

# The page's content security policy forbids what wait_for_function does; expect waits without it.
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def widths(page: Any, selector: str) -> list[float]:
    return list(
        page.eval_on_selector_all(selector, "nodes => nodes.map(n => n.getBoundingClientRect().width)")
    )


def test_the_pool_is_drawn_as_wide_as_its_bytes(visitor: Any) -> None:
    page = visitor.open("shared")
    page.locator(".pool .part.unowned").wait_for()
    kv = SCENES["shared"](0)["engines"][0]["kv"]
    whole = page.eval_on_selector(".pool", "node => node.clientWidth")
    parts = ["live", "cached", "free"]
    drawn = [widths(page, f".pool [data-service=smollm2] [data-part={part}]")[0] for part in parts]
    wanted = [kv["services"]["smollm2"][f"{part}_bytes"] for part in parts]
    others = kv["total_bytes"] - sum(wanted) - kv["free_bytes"]
    drawn += widths(page, ".pool > .other") + widths(page, ".pool > .unowned")
    shares = [width / whole for width in drawn]
    assert shares == pytest.approx(
        [part / kv["total_bytes"] for part in [*wanted, others, kv["free_bytes"]]], abs=0.004
    )
    assert others == 200 * MIB
    assert page.locator(".legend").inner_text().split("\n") == [
        "1", "smollm2", "40%", "live 200 MiB · cached 100 MiB · free 100 MiB",
        "other services", "20%", "200 MiB",
    ]  # fmt: skip


def test_why_a_service_is_slow_is_said_in_words(visitor: Any) -> None:
    page = visitor.open("loaded")
    page.locator("#panel-live .services tbody tr").first.wait_for()
    assert page.locator(".attention li").all_inner_texts() == ["▲smollm2 waits for KV memory"]
    row = page.locator("#panel-live .services tbody tr").first
    assert "waits for KV memory" in row.inner_text()
    assert "900 ms / 2.88 s" in row.inner_text()


def test_an_engine_that_ended_is_described_in_words(visitor: Any) -> None:
    page = visitor.open("degraded")
    page.locator("#status", has_text="degraded").wait_for()
    card = page.get_by_role("article", name="Engine 1")
    assert "waiting for its restart" in card.inner_text()
    assert "killed by signal 9" in card.inner_text()
    assert "Engine 1 ended and waits for its restart." in page.locator(".attention").inner_text()
    assert (
        "gemma3-270m failed: the file model.safetensors is cut off" in page.locator(".attention").inner_text()
    )
    assert page.title() == "degraded – Shoal"


def test_the_focus_stays_when_a_snapshot_comes(visitor: Any) -> None:
    page = visitor.open("loaded")
    link = page.locator("#panel-live .services td a").first
    link.focus()
    link.evaluate("node => { window.focused = node; }")
    waiting = page.locator(".services tbody tr .number").nth(1)
    expect(waiting).not_to_have_text(waiting.inner_text())
    assert page.evaluate("document.activeElement === window.focused && window.focused.isConnected")


def test_a_lost_connection_is_said_and_comes_back(visitor: Any, server: StandIn) -> None:
    page = visitor.open("idle")
    page.locator("#status", has_text="ok").wait_for()
    server.hold.set()
    page.locator("#status", has_text="no connection").wait_for()
    assert page.locator("#connection").inner_text().startswith("no connection since")
    server.hold.clear()
    page.locator("#status", has_text="ok").wait_for()
    assert page.locator("#connection").inner_text() == ""


def test_a_paused_page_stands_still(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded")
    page.locator("#panel-live .services tbody tr").first.wait_for()
    page.get_by_role("button", name="Pause").click()
    html = page.locator("#panel-live").inner_html()
    server.await_snapshots(5)
    assert page.locator("#panel-live").inner_html() == html
    assert page.locator("#connection").inner_text() == "paused"
    page.get_by_role("button", name="Go on").click()
    waiting = page.locator(".services tbody tr .number").nth(1)
    expect(waiting).not_to_have_text(waiting.inner_text())


def test_a_key_is_asked_for_and_then_sent(visitor: Any, server: StandIn) -> None:
    page = visitor.open("key")
    assert page.get_by_role("alert").first.inner_text() == "This route needs an API key"
    page.get_by_label("API key or admin key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_label("API key or admin key")).to_have_value("")
    page.get_by_label("API key or admin key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator("#status", has_text="ok").wait_for()
    page.locator("#tab-services").click()
    page.get_by_label("Admin key").fill(ADMIN_KEY)
    expect(page.get_by_text("No operation is known.")).to_be_hidden()
    page.keyboard.press("Enter")
    page.get_by_text("No operation is known.").wait_for()
    sent = [(path, headers.get("Authorization")) for _, path, headers, _ in server.received]
    assert ("live", f"Bearer {KEY}") in sent
    assert ("admin/operations", f"Bearer {ADMIN_KEY}") in sent
    page.get_by_role("button", name="Forget keys").click()
    page.get_by_text("This route needs an API key").first.wait_for()


def test_markup_in_names_is_shown_as_text(visitor: Any) -> None:
    page = visitor.open("markup")
    page.locator("#panel-live .services tbody tr").first.wait_for()
    for tab in ("live", "requests", "playground", "services"):
        page.locator(f"#tab-{tab}").click()
        page.locator(f"#panel-{tab}").wait_for()
        if tab == "requests":
            page.locator(".row-button").click()
            page.get_by_text("preempted", exact=True).first.wait_for()
        assert MARKUP in unescape(page.locator(f"#panel-{tab}").inner_html())
        assert page.locator("img").count() == 0
    assert page.title() == "Shoal"


def test_arrow_keys_change_the_tab(visitor: Any) -> None:
    page = visitor.open("idle")
    page.locator("#tab-live").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-services"
    page.locator("#panel-services").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#panel-live").wait_for()
    assert page.evaluate("location.hash") == "#live"


def test_colours_and_numbers_of_services_stay_by_position(visitor: Any) -> None:
    page = visitor.open("twenty")
    page.locator("#panel-live .services tbody tr").nth(19).wait_for()
    rows = page.locator("#panel-live .services tbody tr th").all_inner_texts()
    assert [row.split() for row in rows][::19] == [["1", "service-01"], ["20", "service-20"]]
