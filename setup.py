"""How the native library is built; everything else is in pyproject.toml."""

from commands import BuildNative, NativeWheel
from setuptools import Extension, setup

setup(
    ext_modules=[Extension("shoal.native.libshoal", ["csrc/cpu.c"], optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)
