"""Free host memory of this process: of the machine, and within the limits of its control groups."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
"""Files and keys of a control group: limit, usage, and the parts of the usage that are page cache."""


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can still be allocated without swapping or being killed.

    Control groups (of containers, batch systems and systemd; v1 and v2) limit it on Linux. root: folder of
    ``/sys`` and ``/proc``.
    """
    available: int = psutil.virtual_memory().available
    return max(0, min((available, *_left_in_groups(root))))


def _left_in_groups(root: Path) -> Iterator[int]:
    for group, (limit, use, *caches) in _groups(root):
        try:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / use).read_text()) - sum(int(stat[cache]) for cache in caches)
            yield int((group / limit).read_text()) - used
        except (OSError, ValueError, KeyError):  # the group is not visible, or has no limit ("max")
            continue


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The memory groups of this process and all their parents: each may have the lowest limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        elif not controllers:
            mount, names = root / "sys/fs/cgroup", _V2
        else:
            continue
        # Inside a container the path may be that of the host; then only the files of the mount itself exist.
        parts = [part for part in path.split("/") if part]
        yield from ((mount.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1))
