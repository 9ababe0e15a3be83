"""The tabs Playground and Services."""

import json
import shlex
from typing import Any

from browser_scenes import MARKUP
from browser_stand_in import ANSWER, KEY, StandIn


def send(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_an_answer_is_streamed_by_two_services_side_by_side(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "playground")
    page.get_by_label("Beside it").select_option("gemma3-270m")
    page.get_by_label("System prompt").fill("Be short.")
    send(page, "Name three fish.")
    page.get_by_text("8 output tokens").nth(1).wait_for()
    assert page.locator(".answer .text:visible").all_inner_texts() == ["".join(ANSWER)] * 2
    assert "TTFT" in page.locator(".answer .figures").first.inner_text()
    send(page, "And birds?")
    page.get_by_text("8 output tokens").nth(3).wait_for()
    roles = [message["role"] for message in server.bodies("v1/chat/completions")[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    # The base model continues the texts.
    assert server.bodies("v1/completions")[-1]["prompt"] == f"Name three fish.{''.join(ANSWER)}And birds?"


def test_settings_become_fields_of_the_request(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "playground")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Stop at").fill("END\n\nSTOP")
    page.get_by_text("Structured output", exact=True).click()
    page.get_by_label("JSON schema").fill("{")
    send(page, "Hello")
    assert "The JSON schema is not valid JSON" in page.locator(".composer .error").inner_text()
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    page.get_by_role("button", name="Send").click()
    page.get_by_text("8 output tokens").wait_for()
    (body,) = server.bodies("v1/chat/completions")
    assert body == {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0.5,
        "stop": ["END", "STOP"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_settings_outlive_a_reload(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "playground")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Log-probabilities").check()
    page.reload()
    assert page.get_by_label("System prompt").input_value() == "Be short."
    send(page, "Hello")
    page.get_by_text("8 output tokens").wait_for()
    (body,) = server.bodies("v1/chat/completions")
    assert (body["temperature"], body["logprobs"]) == (0.5, True)
    assert body["messages"][0] == {"role": "system", "content": "Be short."}


def test_a_request_is_copied_without_the_key(visitor: Any, server: StandIn) -> None:
    page = visitor.open("key", "playground")
    page.get_by_label("API key or admin key").fill(KEY)
    page.keyboard.press("Enter")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    send(page, 'It\'s "me"')
    page.get_by_text("8 output tokens").wait_for()
    page.get_by_role("button", name="Copy as curl").click()
    page.locator(".said").first.get_by_text("copied").wait_for()
    command = page.evaluate("window.copied")
    assert KEY not in command
    words = shlex.split(command)
    assert "Authorization: Bearer $SHOAL_API_KEY" in words
    assert json.loads(words[words.index("-d") + 1]) == server.bodies("v1/chat/completions")[0]
    page.get_by_role("button", name="Copy as Python").click()
    page.locator(".said").nth(1).get_by_text("copied").wait_for()
    program = page.evaluate("window.copied")
    assert KEY not in program
    compile(program, "copied", "exec")


def test_tokens_show_their_log_probabilities(visitor: Any) -> None:
    page = visitor.open("loaded", "playground")
    page.get_by_label("Log-probabilities").check()
    send(page, "Name three fish.")
    page.get_by_text("8 output tokens").wait_for()
    page.locator(".token").nth(0).focus()
    page.keyboard.press("ArrowRight")
    table = page.locator(".alternatives").inner_text()
    assert "Token 2: “, ”" in table
    assert "81.9%" in table
    assert "-2.900" in table


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(visitor: Any, server: StandIn) -> None:
    server.pace_s = 60
    page = visitor.open("loaded", "playground")
    send(page, "Name three fish.")
    page.get_by_text("answering").wait_for()
    page.get_by_label("Message").press("Escape")
    page.locator(".answer-state", has_text="stopped").wait_for()
    assert "#requests?find=" in page.get_by_role("link", name="Its life").get_attribute("href")
    assert page.get_by_role("status").get_by_text("The answer of smollm2 is stopped.").count() == 1
    server.pace_s = 0
    send(page, "Go on.")
    page.get_by_text("8 output tokens").wait_for()
    messages = server.bodies("v1/chat/completions")[-1]["messages"]
    assert [message["content"] for message in messages] == ["Name three fish.", "Herring", "Go on."]


def test_errors_are_words_and_the_message_counts_as_not_sent(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "playground")
    send(page, "break")
    page.get_by_text("max_tokens must be at least 1").wait_for()
    assert MARKUP in page.locator(".answer-error").inner_text()
    assert page.get_by_label("Message").input_value() == "break"  # to be mended and sent again
    assert page.locator("img").count() == 0
    send(page, "again")
    page.get_by_text("8 output tokens").wait_for()
    assert len(server.bodies("v1/chat/completions")[-1]["messages"]) == 1


def test_results_of_tools_are_sent(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "playground")
    page.get_by_text("Tools", exact=True).click()
    tool = {"type": "function", "function": {"name": "get_weather"}}
    page.get_by_label("Tools, as JSON").fill(json.dumps([tool]))
    send(page, "Is it dry in Oslo?")
    page.get_by_label("Result of get_weather").fill("rain")
    page.get_by_role("button", name="Send results").click()
    page.get_by_text("calls tools").nth(1).wait_for()
    asked, called, result = server.bodies("v1/chat/completions")[-1]["messages"]
    assert asked["role"] == "user"
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def test_a_service_is_removed_only_after_a_question(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "services")
    page.get_by_role("button", name="Remove smollm2").click()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert not any(method == "DELETE" for method, *_ in server.received)
    page.get_by_role("button", name="Remove smollm2").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("row", name="remove service smollm2").wait_for()
    assert [path for method, path, *_ in server.received if method == "DELETE"] == ["admin/services/smollm2"]


def test_a_service_is_added_and_its_operation_followed(visitor: Any, server: StandIn) -> None:
    page = visitor.open("loaded", "services")
    page.get_by_text("Add a service").first.click()
    form = page.locator("form.add").first
    form.locator("[name=model]").fill("org/model")
    form.get_by_label("Further settings").fill('{"idle_after": "10min"}')
    form.get_by_role("button").click()
    page.get_by_role("row", name="add service").get_by_text("done").wait_for()
    assert server.bodies("admin/services") == [{"model": "org/model", "idle_after": "10min"}]


def test_a_service_is_pinned_and_a_pinned_one_unpinned(visitor: Any, server: StandIn) -> None:
    page = visitor.open("twenty", "services")
    assert page.get_by_role("row", name="service-06").get_by_text("; pinned").is_visible()
    page.get_by_role("button", name="Unpin service-06").click()
    page.get_by_role("row", name="unpin service service-06").wait_for()
    page.get_by_role("button", name="Pin service-01").click()
    page.get_by_role("row", name="pin service service-01").wait_for()
    posted = [path for method, path, *_ in server.received if method == "POST"]
    assert posted == ["admin/services/service-06/unpin", "admin/services/service-01/pin"]


def test_a_refused_change_is_explained(visitor: Any) -> None:
    page = visitor.open("loaded", "services")
    page.get_by_role("button", name="Unload gemma3-270m").click()
    page.get_by_text("unload: operation 1 (load_service) is still running; wait for it").wait_for()
