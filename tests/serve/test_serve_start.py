"""The start of a server with many services: tokenizers are read beside engines, and do not delay it."""

import asyncio

import pytest
from serve_builders import (
    SERVICES,
    ByteTokenizer,
    FakeEngine,
    InlineWorkers,
    make_client,
    until,
)
from test_serve_tokenizers import make_folder

from shoal.cluster.options import EnginePlan
from shoal.core import ModelUnavailable, Service, ServiceUnavailable
from shoal.engine import EngineOptions
from shoal.models.tokenizer import added_tokens
from shoal.serve import ServerOptions, create_app, launch, tokenizer_subprocess
from shoal.serve.model_download import FetchedService
from shoal.serve.service_manager import ServiceManager
from shoal.serve.tokenizers import Tokenizers
from shoal.serve.tracing import NoTracing


class FakeRouter:
    """In place of the router: its engines are ready once ``loaded`` is set."""

    def __init__(self, *, loaded=True):
        self.loaded = asyncio.Event()
        if loaded:
            self.loaded.set()
        self.cancelled = self.closed = False

    async def start(self, *_, **__):
        try:
            await self.loaded.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return self

    async def close(self):
        self.closed = True


def play(scenario, monkeypatch, folders, **router):
    """Run ``scenario(start, router, tokenizers)``; ``start`` starts a server of these model folders."""

    async def main():
        fake, tokenizers = FakeRouter(**router), Tokenizers()
        monkeypatch.setattr(launch, "Router", fake)
        services = tuple(Service(name=folder.name, model=str(folder)) for folder in folders)
        plans = [EnginePlan(name="0", options=EngineOptions(services=services))]
        fetched = [FetchedService(*each) for each in zip(services, folders, strict=True)]
        manager = ServiceManager({}, extension_s=1.0)
        cluster = launch.ClusterOptions()
        server = launch._Server(plans, fetched, ServerOptions(), cluster, NoTracing(), manager)
        try:
            async with asyncio.timeout(120):
                await scenario(lambda: server._start(tokenizers, InlineWorkers(), None), fake, tokenizers)
        finally:
            await tokenizers.aclose()

    asyncio.run(main())


def hold_readings(monkeypatch):
    """An event before which no tokenizer is read, and the processes that are asked to."""
    ask, allowed, asked = tokenizer_subprocess.TokenizerSubprocess.ask, asyncio.Event(), []

    async def held(child, message):
        asked.append(child.pid)
        await allowed.wait()
        return await ask(child, message)

    monkeypatch.setattr(tokenizer_subprocess.TokenizerSubprocess, "ask", held)
    return allowed, asked


def make_broken_folder(folder):
    """A model's folder whose tokenizer has no vocabulary, which shows when it is read."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    return folder


def test_engines_do_not_wait_for_tokenizers_which_are_read_one_at_a_time(monkeypatch, tmp_path):
    folders = [make_folder(tmp_path / name, name) for name in ("ab", "cd", "ef")]

    async def scenario(start, router, tokenizers):
        allowed, asked = hold_readings(monkeypatch)
        started, codecs = await start()
        assert started is router
        assert len(asked) <= 1
        allowed.set()
        assert (await codecs["ef"].encode_texts(["fe"])).tokens == [[1, 0]]
        await tokenizers._reading
        assert [codec.decode([1, 0]) for codec in codecs.values()] == ["ba", "dc", "fe"]

    play(scenario, monkeypatch, folders)


def test_a_tokenizer_in_use_is_read_before_those_in_the_background(monkeypatch, tmp_path):
    folders = [make_folder(tmp_path / name, name) for name in ("ab", "cd", "ef")]

    async def scenario(start, router, tokenizers):
        allowed, asked = hold_readings(monkeypatch)
        _, codecs = await start()
        await until(lambda: asked)
        later = [codec for codec in codecs.values() if codec._worker._starting is None]
        assert len(later) == 2
        using = asyncio.create_task(later[1].ready())
        await until(lambda: len(asked) == 2)
        assert later[0]._worker._starting is None
        allowed.set()
        await using
        assert later[1].decode([0]) in "ace"

    play(scenario, monkeypatch, folders)


def test_a_tokenizer_that_cannot_be_read_ends_the_start_and_the_engines(monkeypatch, tmp_path):
    folders = [make_folder(tmp_path / "ab", "ab"), make_broken_folder(tmp_path / "cd")]

    async def scenario(start, router, tokenizers):
        with pytest.raises(ModelUnavailable, match=r"tokenizer\.json cannot be read"):
            await start()
        assert router.cancelled

    play(scenario, monkeypatch, folders, loaded=False)


def test_one_found_after_the_start_is_logged_and_its_requests_get_the_error(monkeypatch, tmp_path, caplog):
    folders = [make_folder(tmp_path / "ab", "ab"), make_broken_folder(tmp_path / "cd")]

    async def scenario(start, router, tokenizers):
        allowed, _ = hold_readings(monkeypatch)
        _, codecs = await start()
        allowed.set()
        await asyncio.wait((tokenizers._reading,))
        await asyncio.sleep(0)
        assert "tokenizer.json cannot be read" in caplog.text
        await codecs["ab"].ready()
        with pytest.raises(ServiceUnavailable, match=r"tokenizer\.json cannot be read"):
            await codecs["cd"].ready()

    play(scenario, monkeypatch, folders)


def test_a_start_that_is_cancelled_cancels_the_engines(monkeypatch, tmp_path):
    async def scenario(start, router, tokenizers):
        starting = asyncio.create_task(start())
        await until(lambda: tokenizers._reading is not None)
        starting.cancel()
        await asyncio.wait((starting,))
        assert starting.cancelled()
        assert router.cancelled

    play(scenario, monkeypatch, [make_folder(tmp_path / "ab", "ab")], loaded=False)


def test_services_with_equal_tokenizers_have_them_compared_once(monkeypatch, tmp_path):
    compared = []
    compare = added_tokens._named_tokens

    def note(folder, stored):
        compared.append(folder)
        return compare(folder, stored)

    monkeypatch.setattr(added_tokens, "_named_tokens", note)
    letters = tmp_path.name  # so that no earlier test has read the same
    folders = [make_folder(tmp_path / f"m{number}", letters) for number in range(4)]

    async def scenario(start, router, tokenizers):
        await start()
        assert len(tokenizers._workers) == 1

    play(scenario, monkeypatch, folders)
    assert len(compared) == 1


class LateTokenizer(ByteTokenizer):
    """Its methods may be called once ``ready`` was awaited."""

    is_ready = False

    async def ready(self):
        await asyncio.sleep(0)
        self.is_ready = True

    def token_bytes(self, token):
        assert self.is_ready
        return super().token_bytes(token)

    def special_token(self, text):
        assert self.is_ready
        return super().special_token(text)


GREETING = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6], "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": [5, 6], "stream": True, "bad_words": ["a"]}),
        ("/v1/chat/completions", {"messages": GREETING, "logprobs": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": [5, 6]}),
        ("/tokenize", {"messages": GREETING}),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/chat", {"messages": GREETING}),
    ],
)
def test_every_route_waits_until_the_tokenizer_is_read(path, body):
    async def main():
        tokenizers = {service.name: LateTokenizer() for service in SERVICES}
        engine = FakeEngine(decoder=tokenizers["chat"])
        app = create_app(engine, tokenizers, SERVICES, ServerOptions(), workers=InlineWorkers())
        async with make_client(app) as client:
            return await client.post(path, json={"model": "chat"} | body)

    response = asyncio.run(main())
    assert response.status_code == 200, response.text
