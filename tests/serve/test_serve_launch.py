"""Start and stop of a server in its own process."""

import asyncio
import resource
import signal
import socket
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from at_hand import free_port
from shoal.cluster.options import EnginePlan
from shoal.core import ConfigError, ModelUnavailable, ModelUnsupported, Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.serve import ServerOptions, run_server
from shoal.serve.cpu_workers import WorkerProcesses
from shoal.serve.model_download import fetch_service

TESTS = Path(__file__).parents[1]

PROGRAM = """
import asyncio, pathlib, sys
sys.path[:0] = sys.argv[1:4]
import engine_builders, inline_codecs, serve_builders
from shoal.cluster.options import EnginePlan
from shoal.serve import ServerOptions, launch, model_download

class Tokenizer(engine_builders.ByteTokenizer, inline_codecs.InlineCodec):
    has_chat_template = True
    def least_tokens(self, text):
        return 0

class Tokenizers(launch.Tokenizers):
    async def load(self, folder, chat_template=None, *, wait=True):
        return Tokenizer()

class Router(launch.Router):
    @classmethod
    async def start(cls, plans, folders, tokenizers, backend, cluster, *, progress=None, builder):
        if plans[0].options.services[0].model == "endless":
            print("loading", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                print("cleaned up", flush=True)
        return await super().start(
            plans, folders, tokenizers, backend, cluster, progress=progress, builder=engine_builders.BUILDER
        )

launch.Tokenizers, launch.Router = Tokenizers, Router
model_download.resolve_service = lambda service, progress=None: pathlib.Path(sys.argv[5])
launch.check_service = lambda service: None
plans = [EnginePlan(name="0", options=engine_builders.make_options(sys.argv[4]))]
server = ServerOptions(port=int(sys.argv[6]))
cluster = launch.ClusterOptions(heartbeat_s=0.3, hung_after_s=float(sys.argv[7]))
launch.run_server(plans, server, cluster, on_ready=lambda url, router, codecs: print(url, flush=True))
print("ended", flush=True)
"""


async def launch(model, folder="none", stderr=None, port=0, hung_after_s=10.0):
    arguments = [TESTS, TESTS / "serve", TESTS / "engine", model, folder, port, hung_after_s]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    first = await asyncio.wait_for(process.stdout.readline(), 60)
    return process, first.decode().strip()


async def end(process, number):
    process.send_signal(number)
    rest = await asyncio.wait_for(process.stdout.read(), 30)
    assert await process.wait() == 0
    return rest.decode().split("\n")[:-1]


def test_kv_memory_of_all_cpu_engines_must_fit_the_machine() -> None:
    total = psutil.virtual_memory().total
    cache = KVCacheOptions(memory_bytes=total * 2 // 3)
    options = EngineOptions(services=(Service(name="a", model="a"),), kv_cache=cache)
    plans = [EnginePlan(name=name, options=options) for name in "xy"]
    with pytest.raises(ConfigError, match=r"2 engines on the CPU ask for .* together, but the machine has"):
        run_server(plans, ServerOptions(port=free_port()))


def test_random_weights_are_served_with_a_tokenizer_only(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    service = Service(name="a", model=str(tmp_path), weights="random")
    with pytest.raises(ModelUnsupported, match=r"service 'a': .* has no tokenizer files \(tokenizer\.json\)"):
        fetch_service(service)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    fetched = fetch_service(service)
    assert (fetched.folder, fetched.service.random_seed) == (tmp_path, 0)


def test_random_weights_of_a_gguf_file_are_refused_at_once(nothing_is_fetched, tmp_path):
    (tmp_path / "m.gguf").touch()
    service = Service(name="a", model=str(tmp_path / "m.gguf"), weights="random")
    plan = EnginePlan(name="0", options=EngineOptions(services=(service,)))
    with pytest.raises(ConfigError, match=r"GGUF file .*m\.gguf does not have"):
        run_server([plan], ServerOptions(port=0))


def test_a_tokenizer_that_cannot_be_read_ends_the_start(monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr("shoal.serve.launch.check_service", lambda service: None)
    monkeypatch.setattr("shoal.serve.model_download.resolve_service", lambda service, progress: tmp_path)
    services = (Service(name="a", model="a"), Service(name="b", model="a"))
    plans = [EnginePlan(name="0", options=EngineOptions(services=services))]
    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json cannot be read"):
        run_server(plans, ServerOptions(port=free_port()))
    assert not [child for child in psutil.Process().children() if "tokenizer" in str(child.cmdline())]


def test_server_answers_until_it_is_stopped(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')

    async def main():
        process, url = await launch("fake", tmp_path)
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"model": "a", "prompt": "hi", "max_tokens": 3, "temperature": 0}
            response = await client.post("/v1/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == 3
            listed = (await client.get("/v1/models")).json()
            assert listed["data"][0]["sampling_defaults"]["temperature"] == 0.25
        assert await end(process, signal.SIGINT) == ["ended"]

    asyncio.run(main())


def test_stop_while_loading_cleans_up():
    async def main():
        process, said = await launch("endless")
        assert said == "loading"
        assert await end(process, signal.SIGTERM) == ["cleaned up", "ended"]

    asyncio.run(main())


@pytest.mark.slow
def test_a_killed_engine_is_logged_and_restarted():
    async def main():
        process, url = await launch("fake", stderr=asyncio.subprocess.PIPE)
        children = psutil.Process(process.pid).children(recursive=True)
        [engine] = [child for child in children if "shoal.engine" in child.cmdline()]
        engine.kill()
        told = await asyncio.wait_for(process.stderr.readline(), 30)
        assert b"engine 0 died: killed by signal 9 (SIGKILL)" in told
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": "a", "prompt": "hi", "max_tokens": 3, "temperature": 0}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            [engine] = (await client.get("/health")).json()["engines"]
            assert engine["restarts"] == 1
        assert await end(process, signal.SIGTERM) == ["ended"]

    asyncio.run(main())


async def left_by_a_killed_server(port):
    """The node and the engine of a server that was killed."""
    process, _ = await launch("fake", port=port)
    children = psutil.Process(process.pid).children()
    [node] = [child for child in children if "shoal.cluster.node" in child.cmdline()]
    [engine] = node.children()
    process.kill()
    while process.returncode is None:  # ``wait`` waits for its output, which the node has inherited
        await asyncio.sleep(0.01)
    return node, engine


@pytest.mark.slow
@pytest.mark.parametrize("node_hangs", [False, True])
def test_a_restarted_server_replaces_hung_processes(node_hangs):
    async def main():
        port = free_port()
        node, engine = await left_by_a_killed_server(port)
        engine.suspend()
        if node_hangs:
            node.suspend()
        again, url = await launch("fake", port=port, stderr=asyncio.subprocess.PIPE, hung_after_s=1.0)
        told = (await asyncio.wait_for(again.stderr.readline(), 30)).decode()
        assert (f"(process {node.pid}) hangs" if node_hangs else "engine 0 is killed: it was silent") in told
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            [known] = (await client.get("/health")).json()["engines"]
            assert known["pid"] != engine.pid
            body = {"model": "a", "prompt": "hi", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert await end(again, signal.SIGTERM) == ["ended"]
        _, alive = psutil.wait_procs([engine, node], timeout=30)
        assert not alive

    asyncio.run(main())


def test_a_restarted_server_finds_its_engines():
    async def main():
        port = free_port()
        node, engine = await left_by_a_killed_server(port)
        again, url = await launch("fake", port=port, stderr=asyncio.subprocess.PIPE)
        told = (await asyncio.wait_for(again.stderr.readline(), 30)).decode()
        assert f"engine 0: found running (process {engine.pid}); requests of the server before" in told
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            [known] = (await client.get("/health")).json()["engines"]
            assert known["pid"] == engine.pid
            body = {"model": "a", "prompt": "hi", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert await end(again, signal.SIGTERM) == ["ended"]
        psutil.wait_procs([engine, node], timeout=30)
        assert not engine.is_running()

    asyncio.run(main())


def test_stopping_says_what_it_waits_for():
    async def main():
        process, url = await launch("fake?step_ms=20", stderr=asyncio.subprocess.PIPE)
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"model": "a", "prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
                process.send_signal(signal.SIGINT)
                told = await asyncio.wait_for(process.stderr.readline(), 30)
                process.send_signal(signal.SIGINT)
                await process.wait()
        assert b"waiting up to 30 s for requests under way (1)" in told
        assert b"a second Ctrl-C (or SIGTERM) ends them at once" in told

    asyncio.run(main())


@pytest.mark.slow
def test_ctrl_c_does_not_reach_a_worker_that_starts():
    async def main():
        starting = asyncio.create_task(WorkerProcesses(preload="shoal.serve.app").start())
        known = set(psutil.Process().children())
        while not (new := set(psutil.Process().children()) - known):
            await asyncio.sleep(0.001)
        new.pop().send_signal(signal.SIGINT)
        await starting

    asyncio.run(main())


@pytest.fixture
def nothing_is_fetched(monkeypatch):
    from shoal.serve import model_download

    def never(service, progress=None):
        pytest.fail("a model was resolved")

    monkeypatch.setattr(model_download, "resolve_service", never)


def test_an_unknown_model_is_reported_before_any_download(nothing_is_fetched):
    options = EngineOptions(services=(Service(name="a", model="smollm2"), Service(name="b", model="nosuch")))
    with pytest.raises(ModelUnavailable, match="nosuch"):
        run_server([EnginePlan(name="0", options=options)], ServerOptions(port=0))


def test_an_address_in_use_is_reported_before_any_load(nothing_is_fetched):
    options = EngineOptions(services=(Service(name="a", model="a"),))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        run_server([EnginePlan(name="0", options=options)], ServerOptions(port=taken.getsockname()[1]))


def test_too_few_open_files_are_reported_before_any_download(nothing_is_fetched, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    options = EngineOptions(services=(Service(name="a", model="a"),))
    with pytest.raises(ConfigError, match="only 16 files may be open"):
        run_server([EnginePlan(name="0", options=options)], ServerOptions(port=0))


@pytest.mark.slow
@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="servers stay, as the tests run under nohup"
)
def test_a_closed_terminal_drains_the_server():
    async def main():
        process, url = await launch("fake")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": "a", "prompt": "hi", "max_tokens": 40, "temperature": 0}
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGHUP)
            assert (await answer).status_code == 200
        assert (await asyncio.wait_for(process.stdout.read(), 30)).split() == [b"ended"]
        assert await process.wait() == 0

    asyncio.run(main())


@pytest.mark.slow
def test_a_template_of_the_configuration_is_compiled_before_engines_start(monkeypatch, tmp_path):
    from shoal.serve import launch as server
    from shoal.serve.model_download import PulledService

    async def never(*_, **__):
        pytest.fail("engines were started")

    monkeypatch.setattr(server, "pull_service", lambda service, _: PulledService(service, tmp_path, None))
    monkeypatch.setattr(server.Router, "start", never)
    service = Service(name="a", model="smollm2", chat_template="{{ 1 | no_such_filter }}")
    options = EngineOptions(services=(service,))
    with pytest.raises(ConfigError, match=r"chat_template of service 'a': .*no_such_filter"):
        run_server([EnginePlan(name="0", options=options)], ServerOptions(port=free_port()))
