"""Prompts that end with the content of the last message."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from models_builders import CHATML

from shoal.core import InvalidRequest
from shoal.models.chat_template.template import ChatTemplate, Layout

# What each template writes behind the content of the last message.
REASONING = """\
{%- for m in messages %}<{{ m.role }}>
{%- set content = m.content %}
{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>
{%- elif '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}{{ content }}<end>
{%- endfor %}"""
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>\n"),
    "trimmed": ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}", "<end>"),
    "trimmed-lines": (
        "{% for m in messages %}{{ m.role }}\n{{ m.content.strip('\\n') }}\n\n{% endfor %}",
        "\n\n",
    ),
    "right": ("{% for m in messages %}[{{ m.role }}] {{ m.content.rstrip() }} [/]{% endfor %}", " [/]"),
    "nothing-behind": ("{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}", ""),
    "trimmed-whole": (
        "{% set t %}{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% endset %}{{ t | trim }}",
        "",
    ),
    "twice": (
        "{{ messages[-1].content | trim }}{% for m in messages %}<|{{ m.content }}|end>{% endfor %}!",
        "|end>!",
    ),
    "said-again": (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}({{ messages[-1].content | trim }})",
        ")",
    ),
    "if-any": (
        "{% for m in messages %}{% if m.content.strip() %}<|\n{{ m.content.strip() }}|>{% endif %}"
        "{% endfor %}",
        "|>",
    ),
    "reasoning": (REASONING, "<end>"),
}
PIECES = [
    "<",
    "|",
    ">",
    "end",
    "<|im_end|>",
    "<end>",
    "assistant",
    "user",
    "\n",
    " ",
    "\n\n",
    "a",
    "[/]",
    "EndOf",
]
CONTENTS = st.one_of(
    st.lists(st.sampled_from([*PIECES, "</think>", "<think>", "EndOfContent0.", "{{ x }}"]), max_size=6).map(
        "".join
    ),
    st.text(max_size=8),
)


def written(template: str, messages: list[dict[str, str]], continued: bool) -> str:
    layout = Layout(add_generation_prompt=False, continue_final_message=continued)
    return ChatTemplate(template, {}).render(messages, None, layout)


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=CONTENTS, before=CONTENTS, reasoning=st.none() | CONTENTS, same=st.booleans())
@example(content="<", before="", reasoning=None, same=False)
@example(content="|", before="", reasoning=None, same=True)
@example(content="end", before="end", reasoning="end", same=True)
@example(content="a \n", before="a", reasoning=None, same=True)
@example(content="a</think>b", before="", reasoning=None, same=False)
def test_the_prompt_ends_with_the_last_content(
    name: str, content: str, before: str, reasoning: str | None, same: bool
) -> None:
    template, behind = TEMPLATES[name]
    last = {"role": "assistant", "content": content}
    if reasoning is not None:
        last["reasoning_content"] = reasoning
    messages = [{"role": "user", "content": content if same else before}, last]
    whole = written(template, messages, continued=False)
    assert whole.endswith(behind) or not content.strip()
    expected = whole.removesuffix(behind)
    if name == "reasoning" and content.strip() not in expected:  # it leaves out what was thought
        with pytest.raises(InvalidRequest, match="does not show"):
            written(template, messages, continued=True)
        return
    prompt = written(template, messages, continued=True)
    if content.strip():
        assert prompt == expected
    else:  # templates may leave out what has no text
        assert prompt.startswith(expected.rstrip())


@pytest.mark.parametrize("content", ["", " ", "\n"])
@pytest.mark.parametrize("name", ["chatml", "nothing-behind", "twice"])
def test_an_answer_may_begin_with_blanks(name: str, content: str) -> None:
    template, behind = TEMPLATES[name]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    assert written(template, messages, True) + behind == written(template, messages, False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content | tojson }}",
        "{{ messages[-1].content.split('\\n') | join('|') }}",
        "{{ messages[-1].content.replace('\\n', '\\n\\n') }}",
        "{{ messages[-1].content[:3] }}",
        "{{ messages[-1].content | length }}",
        "{{ messages[-1].content | length }}:{{ messages[-1].content }}",
        "{% if messages[-1].content.endswith('b') %}yes{% endif %}{{ messages[-1].content }}",
        "{{ messages[0].content }}",
    ],
)
def test_a_content_that_is_changed_or_not_shown_cannot_be_continued(template: str) -> None:
    messages = [{"role": "user", "content": "x\ny"}, {"role": "assistant", "content": "a\nb"}]
    with pytest.raises(InvalidRequest, match="does not show the content") as caught:
        written(template, messages, True)
    assert caught.value.param == "continue_final_message"


def test_a_message_without_content_cannot_be_continued() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match="no content"):
        written(CHATML, messages, True)
