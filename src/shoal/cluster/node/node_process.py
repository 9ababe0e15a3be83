"""The process of a node, as another process sees it that has nothing but a connection to its socket."""

import asyncio
import os
import socket
import struct

import psutil

_MODULE = "shoal.cluster.node"
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_END_TIMEOUT_S = 5.0


def node_behind(writer: asyncio.StreamWriter) -> psutil.Process | None:
    """The node that listens at the other end of a connection.

    None: it is not known, as outside Linux, or it is no node of this user.
    """
    end = writer.get_extra_info("socket")
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    said = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(said)
    try:
        process = psutil.Process(pid)
        return process if user == os.getuid() and _MODULE in process.cmdline() else None
    except psutil.Error:
        return None


def kill_node(node: psutil.Process) -> None:
    """Kill a node and its engines, also those that would not notice its end, and wait until they are gone."""
    try:
        processes = [node, *node.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()  # which looks whether the number is another's by now
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, _END_TIMEOUT_S)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used; 0 where that cannot be known."""
    try:
        user_s, system_s, *_ = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(user_s + system_s)
