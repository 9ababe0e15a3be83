"""The process of one search: ``python -m``, started by ``cluster.placing.search_process``.

It reads a task from its standard input, whose end also ends it, and writes the result, or the message of an
error, to its standard output.
"""

import os
import pickle
import sys
from typing import BinaryIO

from shoal.cluster.placing.search_process import HEADER
from shoal.core import ConfigError
from shoal.models.child_process import end_with_parent
from shoal.simulate.live_search import search

_NICENESS = 15


def answer(task: bytes) -> bytes:
    """The pickled result of a pickled task, or the message of its error."""
    try:
        return pickle.dumps(search(pickle.loads(task)))
    except ConfigError as error:
        return pickle.dumps(str(error))


def read_task(source: BinaryIO) -> bytes:
    """One task; raises EOFError if the other end is closed before."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError("the server ended before it sent a task")
    [length] = HEADER.unpack(header)
    task = source.read(length)
    if len(task) < length:
        raise EOFError("the server ended while it sent a task")
    return task


def main() -> int:
    """Run one search; returns the exit status."""
    os.nice(_NICENESS)
    with open(0, "rb", closefd=False) as source:
        task = read_task(source)
    end_with_parent(0)
    sys.stdout.buffer.write(answer(task))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
