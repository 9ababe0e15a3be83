"""Reasoning, and fields about the chat template."""

import asyncio

import pytest
from serve_builders import FakeEngine, chat, events, post, tool

CHAT = "/v1/chat/completions"
# In the style of models that always reason, and of models with a variable for it.
OPENED = """\
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant><think>
{% endif %}"""
SWITCHED = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}"""
PLAIN = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}|{% endif %}"""


def ask(body, says, template):
    """(prompt, response)"""
    engine = FakeEngine(context=4000, says=says)
    response = asyncio.run(post(CHAT, body, engine, template=template))
    assert response.status_code == 200, response.text
    return engine.decoder.decode(engine.submitted[0].prompt), response


def message_of(body, says, template):
    message = ask(body, says, template)[1].json()["choices"][0]["message"]
    assert message.pop("role") == "assistant"
    assert message.pop("refusal") is None
    return message


@pytest.mark.parametrize(
    ("template", "says"),
    [(OPENED, "Hm.\n</think>\n\nYes."), (SWITCHED, "<think>\nHm.\n</think>\n\nYes.")],
)
def test_reasoning_is_separate_from_content(template, says):
    assert message_of(chat(), says, template) == {"content": "Yes.", "reasoning_content": "Hm."}
    assert message_of(chat(include_reasoning=False), says, template) == {"content": "Yes."}


def test_reasoning_without_an_end_leaves_no_content():
    assert message_of(chat(), "Hm", OPENED) == {"content": None, "reasoning_content": "Hm"}


def test_models_without_tags_have_no_reasoning():
    assert message_of(chat(), "<think>Hm.</think>Yes.", PLAIN) == {"content": "<think>Hm.</think>Yes."}


def test_reasoning_is_streamed():
    _, response = ask(chat(stream=True), "Hm. So.\n</think>\n\nYes.", OPENED)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response.text)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm. So."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


def test_calls_come_after_reasoning():
    says = 'Hm.</think>{"name": "f", "arguments": {}}'
    message = message_of(chat(tools=[tool("f")]), says, OPENED)
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_constrained_output_has_no_reasoning():
    body = chat(tools=[tool("f")], tool_choice="required")
    says = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
    for template in (OPENED, SWITCHED):
        prompt, response = ask(body, says, template)
        assert prompt.endswith("</think>\n\n")
        message = response.json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "</think>"}'


def test_reasoning_of_earlier_messages_reaches_the_template():
    for name in ("reasoning_content", "reasoning"):
        messages = [
            {"role": "assistant", "content": "Yes.", name: "Hm."},
            {"role": "user", "content": "Sure?"},
        ]
        prompt, _ = ask(chat(messages=messages), "", OPENED)
        assert prompt.startswith("<assistant><think>Hm.</think>Yes.<user>Sure?")


def test_variables_of_the_template():
    prompt, _ = ask(chat(chat_template_kwargs={"enable_thinking": False}), "", SWITCHED)
    assert prompt.endswith("<assistant><think>\n\n</think>\n\n")
    prompt, _ = ask(chat(reasoning_effort="none"), "", SWITCHED)
    assert prompt.endswith("<assistant><think>\n\n</think>\n\n")
    prompt, _ = ask(chat(reasoning_effort="high"), "", "{{ reasoning_effort }}!")
    assert prompt == "high!"
    prompt, _ = ask(
        chat(chat_template_kwargs={"a": [1, {"b": "c"}]}), "", "{{ a[1].b }}{{ messages | length }}"
    )
    assert prompt == "c1"


def test_documents_reach_a_template_that_shows_them():
    prompt, _ = ask(
        chat(documents=[{"text": "a"}, {"text": "b"}]), "", "{% for d in documents %}{{ d.text }}{% endfor %}"
    )
    assert prompt == "ab"


def test_without_generation_prompt():
    assert ask(chat(), "", PLAIN)[0] == "<user>hi|"
    assert ask(chat(add_generation_prompt=False), "", PLAIN)[0] == "<user>hi"


@pytest.mark.parametrize("said", ["Once upon", "Once upon a "])
def test_the_final_message_is_continued(said):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    body = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    prompt, response = ask(body, " a time", template)
    assert prompt == f"<user>{said.strip()}<end><assistant>{said.strip()}"
    assert response.json()["choices"][0]["message"]["content"] == " a time"
    prompt, _ = ask(body, "", PLAIN)
    assert prompt == f"<user>{said}<assistant>{said}"
