"""Setuptools' build backend (PEP 517), with a compiler for the native library where the system has none."""

from compilers import compiler_requirements
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """Setuptools' own wants, and a compiler if need be."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *compiler_requirements()]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    """As for a wheel."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *compiler_requirements()]
