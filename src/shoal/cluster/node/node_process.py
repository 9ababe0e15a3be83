"""Finds the process of a node from a connection to its socket, to kill one that hangs."""

import asyncio
import os
import socket
import struct

import psutil

_MODULE = "shoal.cluster.node"
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_END_TIMEOUT_S = 5.0


def find_node(writer: asyncio.StreamWriter) -> psutil.Process | None:
    """The node process at the other end of a connection.

    None: unknown, as outside Linux, or not a node of this user.
    """
    end = writer.get_extra_info("socket")
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    try:
        process = psutil.Process(pid)
        return process if user == os.getuid() and _MODULE in process.cmdline() else None
    except psutil.Error:
        return None


def kill_node(node: psutil.Process) -> None:
    """Kill a node and its engines, and wait until they are gone."""
    try:
        processes = [node, *node.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()  # psutil checks that the pid was not reused
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, _END_TIMEOUT_S)


def cpu_s(pid: int) -> float:
    """CPU time of a process; 0 if unknown."""
    try:
        user_s, system_s, *_ = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(user_s + system_s)
