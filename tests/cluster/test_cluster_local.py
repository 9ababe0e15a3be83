"""Engines of a node on this machine: how they are started, watched, killed, orphaned and found again."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from engine_builders import BUILDER, make_options, make_request

from shoal.cluster.backends.interface import EngineConfig
from shoal.cluster.backends.local import LocalBackend
from shoal.cluster.node import EngineExited, EngineMessage, EngineUsage
from shoal.cluster.node.folder import SOCKET, NodeFolder, folder_path
from shoal.core import ConfigError, EngineDied
from shoal.engine import wire
from shoal.engine.process.lifeline import PROTOCOL, Beat, Loading, Ready
from shoal.frontend.engine_connection import EngineConnection

TIMEOUT_S = 60
SETTINGS = {"kv_cache.memory": "64MiB", "threads": "1"}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Folders go to a place of the test's own; it ends with no process, thread, descriptor or folder more."""
    me = psutil.Process()
    threads, files = threading.active_count(), me.num_fds()
    before = set(me.children(recursive=True))  # of multiprocessing, for other tests of this process
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield place
        until = time.monotonic() + TIMEOUT_S
        while (new := set(me.children(recursive=True)) - before) and time.monotonic() < until:
            time.sleep(0.01)
        assert not new
        assert os.listdir(place) == []
    assert (threading.active_count(), me.num_fds()) == (threads, files)


def config(model="fake?step_ms=5&context=4000", heartbeat_s=0.1, **options):
    options = make_options(model, blocks=2000, **options)
    return EngineConfig(options=options, folders={}, builder=BUILDER, heartbeat_s=heartbeat_s)


def is_of(kind, event):
    return isinstance(event.message if isinstance(event, EngineMessage) else event, kind)


class Watched:
    """A backend and all that it tells."""

    def __init__(self, name=None, orphan_after_s=60.0, **options):
        self.backend = LocalBackend(name, orphan_after_s, **{"heartbeat_s": 0.1} | options)
        self.events = []
        self.news = asyncio.Event()

    def _take(self, event):
        self.events.append(event)
        self.news.set()

    async def attach(self, settings=SETTINGS):
        return await self.backend.attach(self._take, settings)

    async def until(self, kind, engine="e", incarnation=1):
        """The first event of a kind, or with a message of that kind, about a start of an engine."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for event in self.events:
                    if is_of(kind, event) and (event.engine, event.incarnation) == (engine, incarnation):
                        return event
                self.news.clear()
                await self.news.wait()

    async def until_lost(self):
        async with asyncio.timeout(TIMEOUT_S):
            while self.backend._link is not None:
                await asyncio.sleep(0.01)

    async def start(self, engine="e", incarnation=1, *args, **fields):
        self.backend.start_engine(engine, incarnation, config(*args, **fields))
        return await self.until(Ready, engine, incarnation)


@asynccontextmanager
async def attached(*args, **options):
    watched = Watched(*args, **options)
    assert await watched.attach() == []
    try:
        yield watched
    finally:
        await watched.backend.close()
        await watched.backend.close()


def run(scenario):
    asyncio.run(scenario())


def test_an_engine_starts_and_serves():
    async def scenario():
        async with attached() as watched:
            loaded = await watched.start()
            assert loaded.message.info.services["a"].decode_s > 0.004
            assert psutil.Process(loaded.pid).cmdline()[-1] == "shoal.engine"
            assert (await watched.until(Loading)).message.what.startswith("loading fake")
            await watched.until(Beat)
            messages = []
            channel = EngineConnection(loaded.message.endpoint, "s", messages.append)
            channel.send(wire.Submit.from_requests([make_request("s-1-0#1")]))
            async with asyncio.timeout(TIMEOUT_S):
                while not messages or messages[-1].events[-1].finish is None:
                    await asyncio.sleep(0.01)
            channel.close()

            def beats():
                return [event for event in watched.events if is_of(Beat, event)]

            seen = len(beats())
            async with asyncio.timeout(TIMEOUT_S):
                while len(beats()) < seen + 3:
                    await asyncio.sleep(0.01)
            assert {event.message.hung for event in beats()} == {""}
            assert {event.pid for event in beats()} == {loaded.pid}
            node = psutil.Process(loaded.pid).parent()
            assert os.getsid(node.pid) == os.getsid(loaded.pid) == node.pid
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
            ):  # as a terminal or a supervisor does
                for pid in (node.pid, loaded.pid):
                    os.kill(pid, number)
            await asyncio.sleep(0.2)
            watched.events.clear()
            await watched.until(Beat)
        assert not [event for event in watched.events if isinstance(event, EngineExited)]

    run(scenario)


async def compute(loaded, *ids, prompt=5):
    """A channel over which requests were sent, some steps ago."""
    messages = []
    channel = EngineConnection(loaded.message.endpoint, "s", messages.append)
    for id in ids:
        channel.send(wire.Submit.from_requests([make_request(id, prompt, max_tokens=3000)]))
    async with asyncio.timeout(TIMEOUT_S):
        while len(messages) < 3 and prompt == 5:
            await asyncio.sleep(0.01)
    return channel


def test_a_killed_engine_leaves_its_suspects_and_starts_again():
    async def scenario():
        async with attached() as watched:
            for incarnation in (1, 2):
                loaded = await watched.start(incarnation=incarnation)
                channel = await compute(loaded, "s-1-0#1", "s-2-0#1")
                if incarnation == 1:
                    os.kill(loaded.pid, signal.SIGKILL)
                else:
                    watched.backend.kill_engine("e", 1)
                    watched.backend.kill_engine("other", 2)
                    watched.backend.kill_engine("e", 2)
                end = await watched.until(EngineExited, incarnation=incarnation)
                channel.close()
                assert (end.reason, end.failure) == ("killed by signal 9 (SIGKILL)", None)
                # None where it died between two steps.
                assert set(end.suspects) <= {"s-1-0#1", "s-2-0#1"}
            assert len([event for event in watched.events if isinstance(event, EngineExited)]) == 2

    run(scenario)


def test_a_stopped_engine_is_silent_and_can_be_killed():
    async def scenario():
        async with attached() as watched:
            loaded = await watched.start()
            await watched.start("other")
            os.kill(loaded.pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            watched.events.clear()
            await watched.until(Beat, "other")
            assert {type(event) for event in watched.events if event.engine == "e"} <= {EngineUsage}
            watched.backend.kill_engine("e", 1)
            assert "SIGKILL" in (await watched.until(EngineExited)).reason

    run(scenario)


def test_an_executor_that_raises_is_reported_with_its_suspects(capfd):
    async def scenario():
        async with attached() as watched:
            loaded = await watched.start()
            channel = await compute(loaded, "s-1-0#1", prompt=[1, 299])
            end = await watched.until(EngineExited)
            channel.close()
            assert (end.failure, end.reason) == ("RuntimeError", "the fake device is on fire")
            assert end.suspects == ("s-1-0#1",)

    run(scenario)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "failure", "reason"),
    [
        ("unsupported", "ModelUnsupported", "computed wrongly"),
        ("crash", "RuntimeError", "out of luck"),
        ("exit", None, "exit code 3"),
    ],
)
def test_an_end_while_loading_is_reported(model, failure, reason, capfd):
    async def scenario():
        async with attached() as watched:
            watched.backend.start_engine("e", 1, config(model))
            end = await watched.until(EngineExited)
            assert end.failure == failure
            assert reason in end.reason

    run(scenario)


def test_an_engine_that_is_killed_at_once_and_one_that_runs_already_end():
    async def scenario():
        async with attached() as watched:
            watched.backend.start_engine("e", 1, config())
            watched.backend.kill_engine("e", 1)
            assert "SIGKILL" in (await watched.until(EngineExited)).reason
            loaded = await watched.start(incarnation=2)
            watched.backend.start_engine("e", 3, config())
            assert "start 2 still runs" in (await watched.until(EngineExited, incarnation=3)).reason
            assert psutil.pid_exists(loaded.pid)

    run(scenario)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.slow
def test_without_their_node_all_engines_end_and_the_next_start_has_a_new_one(how):
    async def scenario():
        async with attached(silence_s=0.5) as watched:
            first = await watched.start("e")
            stopped = await watched.start("f")
            node = psutil.Process(first.pid).parent()
            os.kill(stopped.pid, signal.SIGSTOP)
            node.kill() if how == "kill" else node.suspend()
            for engine in "ef":
                end = await watched.until(EngineExited, engine)
                assert end.reason == (
                    f"the process that owned it ended (node {node.pid}: killed by signal 9 (SIGKILL))"
                )
            watched.backend.kill_engine("e", 1)
            again = await watched.start("e", 2)
            assert psutil.Process(again.pid).ppid() not in (node.pid, os.getpid())
            for loaded in (first, stopped):
                async with asyncio.timeout(TIMEOUT_S):
                    while psutil.pid_exists(loaded.pid):
                        await asyncio.sleep(0.01)

    run(scenario)


def test_every_start_fails_when_the_node_cannot_be_replaced(monkeypatch):
    async def scenario():
        async with attached() as watched:
            os.kill(watched.backend._link.pid, signal.SIGKILL)
            await watched.until_lost()
            with monkeypatch.context() as patched:
                patched.setattr(sys, "executable", "/bin/false")
                for engine in "fg":
                    watched.backend.start_engine(engine, 1, config())
                watched.backend.kill_engine("g", 1)
                assert "killed before" in (await watched.until(EngineExited, "g")).reason
                end = await watched.until(EngineExited, "f")
            assert "ended while it started (exit code 1)" in end.reason
            assert end.failure == "EngineDied"
            shutil.rmtree(watched.backend._path)

    run(scenario)


def test_a_second_server_is_refused_while_one_is_there():
    async def scenario():
        async with attached("shared"):
            why = rf"'shared' cannot be used: another server uses it \(process {os.getpid()}\)"
            with pytest.raises(ConfigError, match=why):
                await Watched("shared").attach()

    run(scenario)


def test_nodes_of_different_names_are_independent():
    async def scenario():
        async with attached("one") as one, attached("two") as two, attached() as three, attached() as four:
            assert len({watched.backend._link.pid for watched in (one, two, three, four)}) == 4

    run(scenario)


# A server that ends uncleanly.

SERVER = """
import asyncio, sys
from test_cluster_local import Watched, compute, config
async def main():
    watched = Watched("left", {orphan_after_s})
    await watched.attach()
    pids = []
    for engine, incarnation in (("e", 1), ("f", 3)):
        loaded = await watched.start(engine, incarnation)
        await compute(loaded, *[f"old-{{n}}-0#1" for n in range(9)])
        pids.append(loaded.pid)
    watched.backend.start_engine("g", 1, config("slow"))
    print(*pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def left_behind():
    """Starts a server with two engines under load, kills it, and returns the engines' process ids."""
    servers = []

    def leave(orphan_after_s=60.0):
        script = SERVER.format(orphan_after_s=orphan_after_s)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
        ) as server:
            servers.append(server)
            pids = [int(pid) for pid in server.stdout.readline().split()]
            server.kill()
        return pids

    yield leave
    for server in servers:
        assert server.returncode == -signal.SIGKILL


def test_another_server_finds_the_engines_and_none_of_the_old_requests(left_behind):
    pids = left_behind()

    async def scenario():
        watched = Watched("left")
        started = time.monotonic()
        found = {engine.engine: engine for engine in await watched.attach()}
        assert time.monotonic() - started < 5
        assert [(found[e].pid, found[e].incarnation) for e in "ef"] == [(pids[0], 1), (pids[1], 3)]
        try:
            for engine in "ef":
                ready = found[engine].ready
                assert ready.info.services["a"].context_tokens == 4000
                messages = []
                channel = EngineConnection(ready.endpoint, "new", messages.append)
                async with asyncio.timeout(TIMEOUT_S):
                    channel.send(wire.AskStats(1))
                    while not (stats := [m.stats for m in messages if isinstance(m, wire.Stats)]):
                        await asyncio.sleep(0.01)
                channel.close()
                service = stats[-1].services["a"]
                assert (service.running, service.waiting, service.live_blocks) == (0, 0, 0)
                assert service.cancelled == 9
                await watched.until(Beat, engine, found[engine].incarnation)
            assert found["g"].ready is None
            assert (await watched.until(Ready, "g")).pid == found["g"].pid
            watched.backend.kill_engine("f", 3)
            assert "SIGKILL" in (await watched.until(EngineExited, "f", 3)).reason
        finally:
            await watched.backend.close()

    run(scenario)


@pytest.mark.slow
def test_engines_that_no_server_wants_end(left_behind):
    pids = left_behind(orphan_after_s=0.2)
    until = time.monotonic() + TIMEOUT_S
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    wait_until_gone(folder_path("left"))


def wait_until_gone(path):
    until = time.monotonic() + TIMEOUT_S
    while path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not path.exists()


@pytest.mark.slow
def test_a_server_with_other_settings_is_refused_with_the_differences(left_behind):
    pids = left_behind()

    async def scenario():
        why = r"other settings \(running / wanted: kv_cache.memory: 64MiB / 1GiB, name: - / x\); start"
        with pytest.raises(ConfigError, match=why):
            await Watched("left").attach({"kv_cache.memory": "1GiB", "threads": "1", "name": "x"})

    run(scenario)
    node = psutil.Process(pids[0]).parent()
    node.terminate()  # no server uses it
    wait_until_gone(folder_path("left"))
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def half_attached(name):
    """A backend that is gone, as its node sees it, before it has started an engine."""
    backend = LocalBackend(name, 60)
    link = await backend._connect()
    link.writer.close()
    return backend


def test_a_node_without_engines_ends_with_its_server():
    async def scenario():
        first = await half_attached("empty")
        async with asyncio.timeout(TIMEOUT_S):
            while first._path.exists():
                await asyncio.sleep(0.01)
        await first.close()
        first = await half_attached("empty")
        second = Watched("empty")  # while the node of the first is ending
        assert await second.attach({"threads": "2"}) == []
        await second.start()
        await second.backend.close()
        await first.close()

    run(scenario)


def test_a_server_of_another_version_is_refused(monkeypatch):
    async def scenario():
        monkeypatch.setattr("shoal.engine.process.lifeline.PROTOCOL", PROTOCOL + 1)
        with pytest.raises(ConfigError, match=rf"another protocol \(protocol: {PROTOCOL} / {PROTOCOL + 1}\)"):
            await Watched("old").attach()

    run(scenario)


def test_a_hung_node_is_replaced_with_its_engines(monkeypatch, caplog):
    monkeypatch.setattr("shoal.cluster.backends.local._ANSWER_TIMEOUT_S", 1.0)

    async def scenario():
        first = Watched("stuck")
        await first.attach()
        loaded = await first.start()
        old = psutil.Process(loaded.pid).parent()
        for pid in (loaded.pid, old.pid):
            os.kill(pid, signal.SIGSTOP)
        async with attached("stuck") as watched:
            assert watched.backend._link.pid != old.pid
            assert not psutil.pid_exists(loaded.pid)
            assert (await watched.start()).pid != loaded.pid
        await first.backend.close()
        assert f"node of cluster 'stuck' (process {old.pid}) hangs, and is replaced" in caplog.text

    run(scenario)


def test_a_hung_process_that_is_not_a_node_is_not_killed(monkeypatch):
    monkeypatch.setattr("shoal.cluster.backends.local._ANSWER_TIMEOUT_S", 0.1)

    async def scenario():
        folder = folder_path("stuck")
        folder.mkdir(0o700)
        connected = []
        server = await asyncio.start_unix_server(
            lambda reader, writer: connected.append(writer), folder / SOCKET
        )
        with pytest.raises(EngineDied, match=r"'stuck' gives no answer; end the process that has"):
            await Watched("stuck").attach()
        server.close()
        for writer in connected:
            writer.close()
            await writer.wait_closed()
        (folder / SOCKET).unlink()
        folder.rmdir()

    run(scenario)


def test_an_error_in_the_callback_does_not_end_the_reading():
    async def scenario():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with attached() as watched:
            watched.backend._on_event = lambda event: 1 / 0
            watched.backend.start_engine("e", 1, config("crash"))
            async with asyncio.timeout(TIMEOUT_S):
                while watched.backend._engines or not errors:
                    await asyncio.sleep(0.01)
            watched.backend._on_event = watched._take
            await watched.start(incarnation=2)
        assert errors

    run(scenario)


def test_a_node_that_was_killed_leaves_its_name_free_and_its_folder_to_the_next():
    async def scenario():
        for name in ("killed", "killed", "abandoned"):
            async with attached(name) as watched:
                os.kill(watched.backend._link.pid, signal.SIGKILL)
                await watched.until_lost()
            assert folder_path(name).exists()
        async with attached():
            assert not folder_path("abandoned").exists()

    run(scenario)


def test_a_node_ends_if_the_process_that_started_it_never_used_it(nothing_left):
    path = folder_path("unused")
    node = subprocess.Popen([sys.executable, "-m", "shoal.cluster.node", str(path)], stdin=subprocess.PIPE)
    until = time.monotonic() + TIMEOUT_S
    while not (path / "node").exists() and time.monotonic() < until:
        time.sleep(0.01)
    second = subprocess.run(
        [sys.executable, "-m", "shoal.cluster.node", str(path)], stdin=subprocess.PIPE, check=False
    )
    assert second.returncode == 3
    assert node.poll() is None
    node.stdin.close()
    assert node.wait(TIMEOUT_S) == 0
    assert os.listdir(nothing_left) == []


def test_folders_of_other_users_are_not_used(nothing_left):
    path = folder_path("mine")
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user can open"):
        NodeFolder(path)
    with pytest.raises(ConfigError, match="only this user can open"):
        run(lambda: Watched("mine").attach())
    path.rmdir()
    path.symlink_to("/")
    with pytest.raises(ConfigError, match="only this user can open"):
        NodeFolder(path)
    path.unlink()


@pytest.mark.parametrize("name", ["", "a/b", "..\0", "x" * 41, "ü"])
def test_a_name_that_no_folder_can_have_is_refused(name):
    with pytest.raises(ConfigError, match=r"cluster\.name must be"):
        folder_path(name)


def test_without_a_short_path_there_is_no_node(monkeypatch, nothing_left):
    deep = Path(nothing_left, "deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert folder_path("name").parent == Path(nothing_left)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert folder_path("name").parent == Path("/tmp")
    deep.rmdir()


def test_the_node_imports_neither_torch_nor_numpy():
    script = "import sys, shoal.cluster.node.__main__; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)
