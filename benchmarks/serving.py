"""A ``shoal serve`` of its own for a benchmark, from its start to its end."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(config: Mapping[str, Any], port: int, *, verbose: bool = False) -> Iterator[str]:
    """Start a server with a configuration, without ``server``, on a port of this machine; its address.

    It may not be ready yet. verbose: print what it said, at its end.
    """
    whole = {**config, "server": {"host": "127.0.0.1", "port": port}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(whole, file)
        file.flush()
        command = [sys.executable, "-m", "shoal.cli", "serve", "--config", file.name]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
            if verbose:
                print(said, file=sys.stderr)
