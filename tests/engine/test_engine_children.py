"""What processes that the engine room starts do about signals, and what they leave behind."""

import asyncio
import os
import resource
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from engine_builders import BUILDER, make_options

from shoal.core import ConfigError
from shoal.engine import private_folder
from shoal.engine.children import interrupts_held_back
from shoal.engine.launch import EngineProcess
from shoal.engine.private_folder import PrivateFolder


def test_ctrl_c_does_not_reach_an_engine_that_starts():
    async def main():
        process = await EngineProcess.start(make_options("fake"), {}, BUILDER)
        try:
            os.kill(process.pid, signal.SIGINT)
            assert "a" in (await process.wait_ready(None)).services
        finally:
            await process.stop()

    asyncio.run(main())


def test_too_few_open_files_are_told_before_an_engine_starts(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    with pytest.raises(ConfigError, match="only 16 files may be open"):
        asyncio.run(EngineProcess.start(make_options("fake"), {}, BUILDER))


def test_interrupts_come_through_again_afterwards():
    first, second = interrupts_held_back(), interrupts_held_back()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    second.__exit__(None, None, None)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def temporary(monkeypatch):
    """Temporary files go to a short folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def test_a_socket_has_a_private_folder_also_where_temporary_files_have_long_paths(temporary, monkeypatch):
    deep = os.path.join(temporary, "deep" * 30)
    os.mkdir(deep)
    monkeypatch.setattr(tempfile, "tempdir", deep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", temporary)
    folder = PrivateFolder("engine")
    assert folder.path.parent == Path(temporary)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    assert os.listdir(temporary) == ["deep" * 30]


def test_without_a_short_path_there_is_no_socket():
    with pytest.raises(ConfigError, match="set TMPDIR"):
        PrivateFolder("engine" * 20)


def test_folders_that_were_left_behind_are_removed_and_those_in_use_are_not(temporary):
    in_use = PrivateFolder("engine")
    left = tempfile.mkdtemp(prefix=private_folder._PREFIX, dir=temporary)
    for folder in (in_use.path, left):
        os.utime(folder, (0, 0))
    young = tempfile.mkdtemp(prefix=private_folder._PREFIX, dir=temporary)
    another = PrivateFolder("engine")
    assert {os.path.join(temporary, name) for name in os.listdir(temporary)} == {
        str(in_use.path),
        young,
        str(another.path),
    }
    in_use.remove()
    another.remove()
