"""Entry point of the process that runs one part of `benchmarks.gpu_check`.

The argument is a JSON object with `module` (of the part), `device`, `tiny`, `ends_s`, `records` and `begun`.
"""

import json
import os
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_check.cases import NO_DEVICE, Cases

_PARENT_CHECK_S = 1.0


def main() -> None:
    job = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    if job["device"] != "cpu" and not _exists(job["device"]):
        sys.exit(NO_DEVICE)
    cases = Cases(
        Path(job["records"]),
        job["device"],
        tiny=job["tiny"],
        ends_s=job["ends_s"],
        begun=job["begun"],
    )
    import_module(job["module"]).run(cases)


def _exists(device: str) -> bool:
    import torch

    return (torch.device(device).index or 0) < torch.cuda.device_count()


def _end_with_parent(parent: int) -> None:
    """End this process's group when the parent is gone, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
