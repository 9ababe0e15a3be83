"""Service names with tags over Ollama's API: NAME and NAME:latest are one, unless both exist."""

import asyncio
from dataclasses import replace

import pytest
from serve_builders import ByteTokenizer, FakeEngine, InlineWorkers, make_client

from shoal.core import Service
from shoal.serve import create_app


class Serving(FakeEngine):
    """An engine with services of these names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    @property
    def info(self):
        limits = super().info.services["chat"]
        return replace(super().info, services=dict.fromkeys(self.names, limits))


def ask(method, path, *names, **body):
    services = [Service(name=name, model="m") for name in names]
    tokenizers = {name: ByteTokenizer() for name in names}
    app = create_app(Serving(*names), tokenizers, services, workers=InlineWorkers())

    async def main():
        async with make_client(app) as client:
            return await client.request(method, path, json=body or None)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("served", "asked", "found"),
    [
        (["llama3:latest"], "llama3:latest", "llama3:latest"),
        (["llama3:latest"], "llama3", "llama3:latest"),
        (["llama3"], "llama3:latest", "llama3"),
        (["llama3"], "llama3", "llama3"),
        (["llama3", "llama3:latest"], "llama3:latest", "llama3:latest"),
        (["llama3", "llama3:latest"], "llama3", "llama3"),
        (["llama3:8b", "llama3:latest"], "llama3:8b", "llama3:8b"),
    ],
)
def test_names_with_and_without_latest(served, asked, found):
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
    for path, body in (
        ("chat", chat),
        ("generate", {"prompt": "hi", "stream": False}),
        ("embed", {"input": "hi"}),
    ):
        answer = ask("POST", f"/api/{path}", *served, model=asked, **body)
        assert (answer.status_code, answer.json().get("model")) == (200, found), answer.text
    assert ask("POST", "/api/embeddings", *served, model=asked, prompt="hi").status_code == 200
    assert ask("POST", "/api/show", *served, model=asked).json()["name"].removesuffix(":latest") in found


@pytest.mark.parametrize("asked", ["llama3", "llama3:latest", "llama3:70b", "llama3:8b:latest:latest"])
def test_another_tag_is_another_model(asked):
    answer = ask("POST", "/api/show", "llama3:8b", model=asked)
    assert answer.status_code == 404
    assert answer.json()["error"].startswith(f"model '{asked}' is not served here")


def test_every_listed_name_is_found():
    served = ["llama3", "llama3:latest", "other"]
    listed = [model["name"] for model in ask("GET", "/api/tags", *served).json()["models"]]
    assert listed == ["llama3", "llama3:latest", "other:latest"]
    for name in listed:
        assert ask("POST", "/api/show", *served, model=name).json()["name"] == name
