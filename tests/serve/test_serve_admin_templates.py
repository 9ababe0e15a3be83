"""Chat templates of added services."""

import asyncio

import pytest
from admin_builders import ChangingCluster, Operator

from shoal.serve.cpu_workers import TaskLimits, WorkerProcesses

SOUND = "{{ messages[0].content }}"


def refused(response):
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template"
    return response.json()["error"]["message"]


BODY = {"name": "new", "model": "smollm2"}


@pytest.mark.slow
def test_a_template_is_compiled_within_limits(tmp_path):
    async def main():
        workers = WorkerProcesses(TaskLimits(cpu_s=1.0), preload="shoal.serve.app")
        await workers.start()
        async with Operator(ChangingCluster(), tmp_path, workers) as operator:
            # Jinja computes constants when it compiles.
            template = "{% if false %}{{ 9**(9**9) }}{% endif %}"
            adding = asyncio.create_task(operator.add(**BODY, chat_template=template))
            answered = 0
            while not adding.done():
                assert (await operator.client.get("/health")).status_code == 200
                answered += 1
                await asyncio.sleep(0.01)
            assert answered > 1
            assert "takes more than 1 seconds of CPU" in refused(await adding)
            await operator.done(await operator.add(**BODY, chat_template=SOUND))

    asyncio.run(main())


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 | no_such_filter }}",
        "{% if %}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused_at_once(template, tmp_path):
    async def main():
        async with Operator(ChangingCluster(), tmp_path) as operator:
            refused(await operator.add(**BODY, chat_template=template))
            assert operator.pulled == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["{folder}/secret.txt", "secret.txt", "~/secret.txt", "/etc/hostname", "Hello."]
)
def test_a_template_is_never_read_from_a_file(path, tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("{# hidden #}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    async def main():
        async with Operator(ChangingCluster(), tmp_path) as operator:
            template = path.replace("{folder}", str(tmp_path))
            message = refused(await operator.add(**BODY, chat_template=template))
            assert "paths are not read here" in message
            assert "hidden" not in message

    asyncio.run(main())
