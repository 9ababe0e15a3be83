"""The process of one part of `benchmarks/gpu_check`, which starts it.

Its argument is a JSON object: `module` (of the part), `device`, `tiny`, `ends_s`, `records` and `begun`.
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
    wanted = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    if wanted["device"] != "cpu" and not _is_there(wanted["device"]):
        sys.exit(NO_DEVICE)
    cases = Cases(
        Path(wanted["records"]),
        wanted["device"],
        tiny=wanted["tiny"],
        ends_s=wanted["ends_s"],
        begun=wanted["begun"],
    )
    import_module(wanted["module"]).run(cases)


def _is_there(device: str) -> bool:
    import torch

    return (torch.device(device).index or 0) < torch.cuda.device_count()


def _end_with_parent(parent: int) -> None:
    """A parent that was killed leaves nothing behind: this process leads a group of its own."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
