"""Client input and chat templates cannot block or harm the server."""

import asyncio
import json
import os

import pytest
from pydantic import ValidationError
from serve_builders import (
    SERVICES,
    ByteTokenizer,
    FakeEngine,
    InlineWorkers,
    chat,
    completion,
    make_client,
    make_tokenizers,
    post,
)

from shoal.core import InvalidRequest
from shoal.models.chat_template.template import ChatTemplate
from shoal.serve import create_app
from shoal.serve.body_parsing import read_body
from shoal.serve.cpu_workers import TaskLimits, WorkerProcesses
from shoal.serve.openai.request_bodies import MAX_MESSAGES, MAX_PARTS, ChatBody, CompletionBody
from shoal.serve.strict_model import MAX_FIELDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = 20_000
WRONG_MANY_TIMES = {
    "messages": (ChatBody, chat(messages=[0] * MANY)),
    "unknown fields of a message": (
        ChatBody,
        chat(messages=[{f"f{i}": 1 for i in range(MANY)}]),
    ),
    "parts": (ChatBody, chat(messages=[{"role": "user", "content": [{}] * MANY}])),
    "tool calls": (ChatBody, chat(messages=[{"role": "user", "content": "x", "tool_calls": [{}] * MANY}])),
    "unknown fields": (ChatBody, chat(**{f"f{i}": 1 for i in range(MANY)})),
    "options": (ChatBody, chat(stream_options={f"f{i}": 1 for i in range(MANY)})),
    "modalities": (ChatBody, chat(modalities=[1] * MANY)),
    "token ids": (CompletionBody, completion(prompt=[-1] * MANY)),
    "texts": (CompletionBody, completion(prompt=["a", *[1] * MANY])),
    "lists of ids": (CompletionBody, completion(prompt=[[-1]] * MANY)),
    "stop strings": (CompletionBody, completion(stop=[1] * MANY)),
    "stop tokens": (CompletionBody, completion(stop_token_ids=[-1] * MANY)),
    "biases": (CompletionBody, completion(logit_bias={str(i): 1 for i in range(MANY)})),
}


@pytest.mark.parametrize("what", WRONG_MANY_TIMES)
def test_a_body_with_many_errors_reports_few(what):
    kind, body = WRONG_MANY_TIMES[what]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(**{"x" * 10**6: 1})),
        (CHAT, chat(**{"x" * 100: 1})),
        (CHAT, chat(model="x" * 10**6)),
        (CHAT, chat(messages=[{"role": "x" * 10**6, "content": ""}])),
        (CHAT, chat(stream_options={"x" * 10**5: True}, stream=True)),
        (COMPLETIONS, completion(stream="x" * 10**6)),
        (COMPLETIONS, b'{"model": "base", "prompt": ' + b"[" * 10**5),
        (COMPLETIONS, b'{"model": "base", "prompt": ' + b"[" * 10**4 + b"]" * 10**4 + b"}"),
        (COMPLETIONS, b'{"model": "base", "user": ' + b'{"a":' * 10**4 + b"1" + b"}" * 10**4 + b"}"),
    ],
)
def test_errors_quote_at_most_a_line_of_the_input(path, body):
    response = asyncio.run(post(path, body, max_body_bytes=2**21, unknown_fields="refuse"))
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert len(error["message"]) <= 1000
    assert len(error["param"] or "") <= 200


def test_limits_of_lists_and_objects():
    messages = [{"role": "user", "content": ""}] * MAX_MESSAGES
    parts = [{"type": "text", "text": ""}] * MAX_PARTS
    for fields, limit in (
        ({"messages": [*messages, messages[0]]}, MAX_MESSAGES),
        ({"messages": [{"role": "user", "content": [*parts, parts[0]]}]}, MAX_PARTS),
        ({f"f{i}": 1 for i in range(MAX_FIELDS)}, MAX_FIELDS),
        ({"metadata": {f"f{i}": 1 for i in range(MAX_FIELDS + 1)}}, MAX_FIELDS),
    ):
        response = asyncio.run(post(CHAT, chat(**fields)))
        assert response.status_code == 400
        assert f"at most {limit}" in response.json()["error"]["message"]
    engine = FakeEngine(context=10**6)
    for fine in (messages, [{"role": "user", "content": parts}]):
        assert asyncio.run(post(CHAT, chat(messages=fine, max_tokens=1), engine)).status_code == 200


class RecordingWorkers(InlineWorkers):
    """Records the queue of each task."""

    def __init__(self):
        self.queues = []

    async def run(self, queue, task, function, *arguments):
        self.queues.append(queue)
        return await super().run(queue, task, function, *arguments)


def test_large_bodies_and_templates_are_handled_in_worker_processes():
    workers = RecordingWorkers()
    app = create_app(FakeEngine(context=10**6), make_tokenizers(), SERVICES, workers=workers)

    async def main():
        async with make_client(app) as client:
            for path, body, queues in (
                (COMPLETIONS, completion(), []),
                (COMPLETIONS, completion(user="x" * 2**15), ["bodies"]),
                (COMPLETIONS, completion(user="x" * 2**18), ["large bodies"]),
                (CHAT, chat(), ["chats of chat"]),
            ):
                workers.queues.clear()
                assert (await client.post(path, json=body)).status_code == 200
                assert workers.queues == queues

    asyncio.run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_text_that_cannot_fit_is_refused_before_tokenization(path):
    tokenizers = make_tokenizers()
    app = create_app(FakeEngine(context=50), tokenizers, SERVICES, workers=InlineWorkers())
    body = (
        completion(prompt="x" * 60)
        if path == COMPLETIONS
        else chat(messages=[{"role": "user", "content": "x" * 60}])
    )

    async def main():
        async with make_client(app) as client:
            return await client.post(path, json=body)

    error = asyncio.run(main()).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at least 6" in error["message"]
    assert not any(tokenizer.encoded for tokenizer in tokenizers.values())


def test_only_a_part_of_a_far_too_long_text_is_tokenized():
    tokenizers = make_tokenizers()
    tokenizers["base"].least_tokens = lambda text: 0
    app = create_app(FakeEngine(context=40_000), tokenizers, SERVICES, workers=InlineWorkers())

    async def main():
        async with make_client(app) as client:
            return [await client.post(COMPLETIONS, json=completion(prompt="x" * n)) for n in (10**6, 35_000)]

    refused, served = asyncio.run(main())
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert served.status_code == 200
    assert max(map(len, tokenizers["base"].encoded)) == 35_000


def test_small_bodies_are_parsed_one_by_one_and_other_tasks_run_between(monkeypatch):
    order = []

    def recording(*arguments):
        order.append("body")
        return read_body(*arguments)

    monkeypatch.setattr("shoal.serve.body_parsing.read_body", recording)
    app = create_app(FakeEngine(), make_tokenizers(), SERVICES, workers=InlineWorkers())

    async def other():
        for _ in range(100):
            order.append("other")
            await asyncio.sleep(0)

    async def main():
        async with make_client(app) as client:
            posts = [client.post(COMPLETIONS, json=completion(max_tokens=1)) for _ in range(20)]
            await asyncio.gather(*posts, other())

    asyncio.run(main())
    assert order.count("body") == 20
    first, last = order.index("body"), len(order) - 1 - order[::-1].index("body")
    assert ["body", "body"] not in [order[at : at + 2] for at in range(first, last)]


def test_token_prompts_that_cannot_fit_are_refused_while_parsing():
    response = asyncio.run(post(COMPLETIONS, completion(prompt=[[1], [1] * 300])))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "300 tokens" in error["message"]


@pytest.fixture
def worker_functions(monkeypatch):
    """Functions that other processes find."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    import worker_functions

    return worker_functions


@pytest.mark.slow
def test_work_beyond_its_limits_is_refused_and_the_next_is_done(worker_functions):
    async def main():
        workers = WorkerProcesses(TaskLimits(cpu_s=1.0, memory_bytes=2**26), preload="shoal.serve.app")
        await workers.start()
        for function, says in (
            (worker_functions.run_forever, "more than 1 seconds of CPU or 64 MiB"),
            (worker_functions.fill_memory, "more than 1 seconds of CPU or 64 MiB"),
            (worker_functions.go_deep, "too deep"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                await workers.run("queue", "this task", function)
            assert await workers.run("queue", "this task", sum, [1, 2]) == 3
        with pytest.raises(InvalidRequest, match=r"^no$") as caught:
            await workers.run("queue", "this task", worker_functions.refuse)
        assert (caught.value.param, caught.value.code) == ("field", "a_code")

    asyncio.run(main())


def test_queues_do_not_wait_for_each_other(worker_functions):
    async def main():
        workers = WorkerProcesses(TaskLimits(cpu_s=30.0), preload="shoal.serve.app")
        stuck = asyncio.create_task(workers.run("a", "this task", worker_functions.run_forever))
        await asyncio.sleep(0)
        assert await workers.run("b", "this task", sum, [1, 2]) == 3
        assert not stuck.done()
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck

    asyncio.run(main())


@pytest.fixture(scope="module")
def limited_workers():
    """An event loop, and workers whose process stays alive between tasks."""
    with asyncio.Runner() as runner:
        yield runner, WorkerProcesses(TaskLimits(cpu_s=1.0, memory_bytes=2**26), preload="shoal.serve.app")


@pytest.mark.parametrize(
    ("template", "answers_meanwhile"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 2),
        ("{{ 'x' * 10000000000 }}", 1),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", 1),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 1),
        ("{{ '\\ud800' }}", 1),
        ("{{ raise_exception('\\ud800') }}", 1),
        ("{% for x in cycler() %}{% endfor %}", 1),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, 1),
        ("{{ 9**(9**9) }}", 1),  # Jinja computes it when it compiles
    ],
)
def test_a_runaway_template_is_a_400_and_does_not_block_the_server(
    template, answers_meanwhile, limited_workers
):
    class Wild(ByteTokenizer):
        pass

    Wild.template = template
    runner, workers = limited_workers
    app = create_app(FakeEngine(), {**make_tokenizers(), "chat": Wild()}, SERVICES, workers=workers)

    async def main():
        await workers.start()
        async with make_client(app) as client:
            posting = asyncio.create_task(client.post(CHAT, json=chat()))
            answered = 0
            while not posting.done():
                assert (await client.get("/health")).status_code == 200
                answered += 1
                await asyncio.sleep(0.01)
            response = await posting
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"]
            assert answered >= answers_meanwhile

    runner.run(main())


def test_templates_have_no_filler_text():
    with pytest.raises(InvalidRequest, match="lipsum"):
        ChatTemplate("{{ lipsum(n=3) }}", {}).render([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        "{{ ['{0.__class__}']|map('format', messages)|list }}",
        "{{ '{a.__class__}'.format_map({'a': messages}) }}",
        "{{ messages.__class__ }}",
    ],
)
def test_templates_cannot_leave_their_sandbox(template):
    # Versions of Jinja before 3.1.6 leave the first of these through.
    try:
        text = ChatTemplate(template, {}).render([{"role": "user", "content": ""}])
    except InvalidRequest:
        return
    assert "class" not in text
