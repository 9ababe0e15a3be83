"""Nodes that are started before it is known what for."""

import errno
import os
import subprocess
import sys
import time

import psutil
import pytest
from test_cluster_local import TIMEOUT_S, Watched, attached, left_behind, nothing_left, run

from shoal.cluster.backends import node_start
from shoal.cluster.backends.make import make_backend
from shoal.cluster.backends.node_start import drop_early_node, start_early_node
from shoal.cluster.node import EngineExited
from shoal.cluster.node.folder import folder_path
from shoal.cluster.options import ClusterOptions
from shoal.engine.process.child_process import BUILDER

__all__ = ["left_behind", "nothing_left"]  # fixtures


def bare_engine(node):
    """The engine that an early node has started."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        for engine in psutil.Process(node.pid).children():
            if engine.cmdline()[-2:] == ["shoal.engine", BUILDER.partition(":")[0]]:
                return engine
        time.sleep(0.01)
    raise AssertionError("it starts no engine")


def early():
    start_early_node()
    node = node_start._early
    assert node is not None
    return node, bare_engine(node)


def test_the_first_engine_is_the_one_that_is_ready():
    node, bare = early()

    async def scenario():
        async with attached("early") as watched:
            assert watched.backend._link.pid == node.pid
            assert folder_path("early").exists()
            assert (await watched.start("e")).pid == bare.pid
            loaded = await watched.start("f")
            assert psutil.Process(loaded.pid).cmdline()[-1] == "shoal.engine"
            # Who starts anew has a process of its own.
            watched.backend.kill_engine("e", 1)
            await watched.until(EngineExited)
            assert (await watched.start("e", 2)).pid != bare.pid

    run(scenario)


@pytest.mark.parametrize("dead", ["engine", "node"])
def test_a_dead_early_node_is_replaced(dead):
    node, bare = early()
    if dead == "engine":
        bare.kill()
    else:
        node.kill()
        node.wait()

    async def scenario():
        async with attached() as watched:
            assert (await watched.start()).pid != bare.pid

    run(scenario)


def test_an_unused_prestarted_engine_ends_with_its_node():
    early()

    async def scenario():
        async with attached("idle"):
            pass

    run(scenario)


def test_the_early_node_ends_when_a_node_is_found(left_behind):
    pids = left_behind()
    node, _ = early()

    async def scenario():
        watched = Watched("left")
        found = await watched.attach()
        await watched.backend.close()
        assert {engine.pid for engine in found} >= set(pids)
        assert node.poll() == 0

    run(scenario)


def test_an_unneeded_early_node_ends():
    node, _ = early()
    drop_early_node()
    assert node.poll() == 0
    drop_early_node()


def test_another_backend_drops_the_early_node():
    pytest.importorskip("ray")
    node, _ = early()
    make_backend(ClusterOptions(backend="ray"))
    assert node.poll() == 0


def test_a_node_without_a_folder_ends_with_its_parent():
    script = (
        "from shoal.cluster.backends import node_start; node_start.start_early_node();"
        "print(node_start._early.pid);"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        node = psutil.Process(int(starter.stdout.readline()))
        bare = bare_engine(node)
        starter.kill()
    _, left = psutil.wait_procs([node, bare], TIMEOUT_S)
    assert not left


def test_a_folder_may_have_any_name(monkeypatch, nothing_left):
    place = os.path.join(os.fsencode(nothing_left), b"a\nb\xff")
    os.mkdir(place)
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fsdecode(place))
    node, _ = early()

    async def scenario():
        async with attached("any") as watched:
            assert watched.backend._link.pid == node.pid

    run(scenario)
    os.rmdir(place)


def test_where_no_process_can_be_started_the_command_goes_on(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EAGAIN, "too many processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        start_early_node()
    drop_early_node()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["serve", "no-such-model"], ["serve", "--no-such-flag"]])
def test_a_command_that_fails_leaves_nothing(words):
    end = subprocess.run([sys.executable, "-m", "shoal.cli", *words], capture_output=True, check=False)
    assert end.returncode in (1, 2)
