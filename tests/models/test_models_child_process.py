"""Processes that end with their parent."""

import socket
import subprocess
import sys


def test_a_child_ends_with_a_parent_that_has_unread_output():
    ours, its = socket.socketpair()
    program = """
import os, time
from shoal.models.child_process import end_with_parent
os.write(0, b".")
end_with_parent(0)
time.sleep(300)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=its, stderr=subprocess.PIPE)
    its.close()
    ours.recv(1, socket.MSG_PEEK)
    ours.close()
    assert child.communicate(timeout=60)[1] == b""
    assert child.returncode == 1


def test_a_module_runs_as_usual_but_ends_with_its_parent():
    code = "import sys; print(repr(sys.stdin.read()), flush=True); import time; time.sleep(300)"
    command = [sys.executable, "-m", "shoal.models.run_child", "timeit", "-n1", "-r1", code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"''\n"
    child.stdin.close()
    assert child.wait(60) == 1
    assert child.stderr.read() == b""
