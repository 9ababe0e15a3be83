"""Setuptools' commands that build the native library and name the wheel that holds it."""

import json
from pathlib import Path

from compile import INFO, LIBRARY, TARGET, build_library
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("shoal", "native")


class BuildNative(build_ext):
    """Builds the library, or leaves word why not: into the wheel, or the sources of an editable install."""

    def run(self) -> None:
        """Never fails: without the library Shoal computes with torch alone."""
        build_library(TARGET if self.inplace else Path(self.build_lib) / PACKAGE)

    def get_source_files(self) -> list[str]:
        """MANIFEST.in lists them."""
        return []

    def get_outputs(self) -> list[str]:
        """None that setuptools would have to copy."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is built in one place for another."""
        return {}


class NativeWheel(bdist_wheel):
    """A wheel for every Python 3: no code in it is compiled against one."""

    def get_tag(self) -> tuple[str, str, str]:
        """For the platform of the library, or any without one."""
        folder = Path(self.get_finalized_command("build_ext").build_lib) / PACKAGE
        if not (folder / LIBRARY).exists():
            return "py3", "none", "any"
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        return "py3", "none", info["platform"] or super().get_tag()[2]
