"""Memory limits of control groups count, of both versions and on every level."""

from pathlib import Path

import psutil
import pytest

from shoal.execute.free_memory import free_memory_bytes

pytestmark = pytest.mark.without_native

MIB = 1 << 20


def write_group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def v1(limit: object) -> dict[str, object]:
    stat = f"cache 1\ntotal_inactive_file {3 * MIB}\ntotal_active_file {MIB}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": 10 * MIB, "memory.stat": stat}


def v2(limit: object) -> dict[str, object]:
    stat = f"anon 1\ninactive_file {3 * MIB}\nactive_file {MIB}"
    return {"memory.max": limit, "memory.current": 10 * MIB, "memory.stat": stat}


@pytest.mark.parametrize("inside_container", [False, True])
def test_limits_of_cgroups_v1_count(tmp_path: Path, inside_container: bool) -> None:
    write_group(tmp_path / "proc/self", {"cgroup": "4:cpu,memory:/job/task\n0::/"})
    mount = tmp_path / "sys/fs/cgroup/memory"
    write_group(mount if inside_container else mount / "job", v1(16 * MIB))
    write_group(mount / "other", v1(MIB))
    assert free_memory_bytes(tmp_path) == 10 * MIB


def test_limits_of_cgroups_v2_count(tmp_path: Path) -> None:
    write_group(tmp_path / "proc/self", {"cgroup": "0::/user.slice/task.scope"})
    mount = tmp_path / "sys/fs/cgroup"
    write_group(mount / "user.slice", v2(26 * MIB))
    write_group(mount / "user.slice/task.scope", v2("max"))
    assert free_memory_bytes(tmp_path) == 20 * MIB
    write_group(mount / "user.slice/task.scope", v2(5 * MIB))
    assert free_memory_bytes(tmp_path) == 0


def test_without_limits_the_machines_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7 * MIB}))
    assert free_memory_bytes(tmp_path) == 7 * MIB
    write_group(tmp_path / "proc/self", {"cgroup": "4:memory:/"})
    write_group(tmp_path / "sys/fs/cgroup/memory", v1(9223372036854771712))
    assert free_memory_bytes(tmp_path) == 7 * MIB
