"""The tab Requests."""

from typing import Any


def names(page: Any) -> list[str]:
    return list(page.locator(".row-button").all_inner_texts())


def test_the_preempted_requests_are_found_by_the_filter(visitor: Any) -> None:
    page = visitor.open("loaded", "requests")
    page.locator(".row-button").first.wait_for()
    assert len(names(page)) == 90
    page.get_by_label("State").select_option("preempted, now or before")
    assert names(page) == ["client-7", "client-12"]
    page.locator("#panel-requests").get_by_label("Service").select_option("smollm2")
    assert names(page) == ["client-7"]
    page.get_by_label("Find").fill("client-12")
    assert page.get_by_text("No request matches the filter.").is_visible()


def test_the_count_of_preemptions_leads_to_the_requests(visitor: Any) -> None:
    page = visitor.open("loaded")
    page.locator("#panel-live .services tbody tr").first.get_by_role("link", name="4", exact=True).click()
    page.locator("#panel-requests .row-button").first.wait_for()
    assert names(page) == ["client-7"]


def test_a_row_opens_to_the_lengths_of_its_phases(visitor: Any) -> None:
    page = visitor.open("loaded", "requests")
    page.locator(".row-button").first.wait_for()
    page.get_by_label("State").select_option("preempted, now or before")
    page.get_by_role("button", name="client-7").click()
    rows = [row.split("\t") for row in page.locator(".phases tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["waiting", "prefill", "decode", "preempted", "decode"]
    assert rows[3][3] == "8.00 s"
    assert "9f3c1a2b-7-0" in page.locator(".request-details").first.inner_text()


def test_the_address_says_what_is_shown(visitor: Any) -> None:
    page = visitor.open("loaded", "requests")
    page.locator(".row-button").first.wait_for()
    page.get_by_label("State").select_option("preempted, now or before")
    page.get_by_label("Find").fill("client")
    assert page.evaluate("location.hash") == "#requests?state=preempted&find=client"
    shown = names(page)
    page.reload()
    page.locator(".row-button").first.wait_for()
    assert page.get_by_label("Find").input_value() == "client"
    assert names(page)[0] == shown[0]
    page.evaluate("location.hash = '#requests?state=bogus'")
    page.locator(".row-button").nth(50).wait_for()
    assert page.get_by_label("State").input_value() == "all"


def test_a_click_anywhere_in_a_row_opens_it(visitor: Any) -> None:
    page = visitor.open("loaded", "requests")
    page.locator(".summary .line").first.click()
    page.locator(".phases").first.wait_for()
    page.locator(".summary .tokens").first.click()
    page.locator(".phases").first.wait_for(state="hidden")


def test_a_moved_request_shows_the_move(visitor: Any) -> None:
    page = visitor.open("moving", "requests")
    page.locator(".row-button").first.wait_for()
    row = page.locator("#panel-requests .summary").first
    assert "moved" in row.inner_text()
    assert row.locator(".span[data-change=moved] .change").inner_text() == "▸1"
    assert "moved to engine 1" in row.locator(".hidden-text").inner_text()
    page.get_by_label("State").select_option("moved to another engine")
    assert names(page) == ["client-1", "client-3"]
    page.get_by_label("State").select_option("resumed after an engine ended")
    assert names(page) == []


def test_a_request_that_resumed_is_told_from_one_that_moved(visitor: Any) -> None:
    page = visitor.open("degraded", "requests")
    page.locator(".row-button").first.wait_for()
    page.get_by_label("State").select_option("moved to another engine")
    assert names(page) == []
    page.get_by_label("State").select_option("resumed after an engine ended")
    assert len(names(page)) == 3


def test_phases_are_drawn_where_they_were(visitor: Any) -> None:
    page = visitor.open("moving", "requests")
    bar = page.locator("#panel-requests .summary").first.locator(".phase-prefill")
    bar.wait_for()
    left, width = page.evaluate(
        """node => {
          const line = node.closest('.bars').getBoundingClientRect(), bar = node.getBoundingClientRect();
          return [(bar.left - line.left) / line.width, bar.width / line.width]; }""",
        bar.element_handle(),
    )
    # Of a minute: it began 19 s before the scene did, and lasted 3 s; the scene has gone on since.
    assert abs(width - 3 / 60) < 0.005
    assert 0 < left <= (60 - 19) / 60


def test_the_keyboard_is_enough(visitor: Any) -> None:
    page = visitor.open("loaded", "requests")
    page.locator(".row-button").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    second = page.locator(".row-button").nth(1)
    assert second.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Escape")
    assert second.get_attribute("aria-expanded") == "false"
    assert second.evaluate("node => document.activeElement === node")
