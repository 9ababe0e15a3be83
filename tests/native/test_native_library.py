"""Finding the library, choosing an instruction set, and saying what is in use."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.core import ConfigError
from shoal.native import library, load_native, native_status, native_variants


@pytest.fixture
def installed(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is taken for that of the package; its library was built from ``tmp_path / "csrc"``."""
    shutil.copytree(built / "csrc", tmp_path / "csrc")
    folder = tmp_path / "native"
    shutil.copytree(built / "src/shoal/native", folder)
    monkeypatch.setattr(library, "_FOLDER", folder)
    monkeypatch.setattr(library, "_SOURCES", tmp_path / "csrc")
    for variable in ("SHOAL_NATIVE", "SHOAL_ISA"):
        monkeypatch.delenv(variable, raising=False)
    load_native.cache_clear()
    yield folder
    load_native.cache_clear()


def assert_not_in_use(reason: str) -> None:
    assert load_native() is None
    assert native_variants() == ()
    assert native_status().startswith(f"torch only: {reason}")


def test_ci_has_the_library() -> None:
    if os.environ.get("CI", "").lower() in ("", "0", "false") or os.environ.get("SHOAL_NATIVE") == "off":
        pytest.skip("only CI must have it")
    assert native_status().startswith("native kernels")


def test_kernels_are_compiled_for_their_instruction_set(installed: Path) -> None:
    levels = [native.kernel("shoal_level", result=ctypes.c_int64)() for native in native_variants()]
    assert levels == list(range(len(levels)))
    assert levels


def test_the_best_instruction_set_is_chosen_and_named(installed: Path) -> None:
    native, best = load_native(), native_variants()[-1].variant
    assert native is not None
    assert native.variant == best
    compiler = json.loads((installed / "build.json").read_text())["compiler"]
    assert native_status() == f"native kernels ({best}, built by {compiler})"


def test_a_smaller_instruction_set_can_be_chosen(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ISA", "scalar")
    native = load_native()
    assert native is not None
    assert native.variant == "scalar"
    assert "(scalar, " in native_status()
    assert native_variants()[-1].variant != "scalar"


@pytest.mark.parametrize(
    ("features", "best"),
    [(0, "scalar"), (1, "avx2"), (3, "avx512"), (11, "avx512"), (15, "vnni_bf16"), (31, "amx")],
)
def test_an_instruction_set_includes_all_before_it(features: int, best: str) -> None:
    cpu = SimpleNamespace(shoal_cpu_features=lambda: features)
    assert library._supported(cpu)[-1] == best


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ("avx1024", "SHOAL_ISA=avx1024 is not known; possible here are scalar, avx2"),
        ("vnni", "SHOAL_ISA=vnni is not an instruction set of this CPU; possible here are scalar, avx2"),
    ],
)
def test_an_impossible_instruction_set_is_an_error(
    installed: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, complaint: str
) -> None:
    monkeypatch.setenv("SHOAL_ISA", chosen)
    monkeypatch.setattr(library, "_supported", lambda _: ("scalar", "avx2"))
    for function in (load_native, native_variants, native_status):
        with pytest.raises(ConfigError, match=f"^{complaint}$"):
            function()


def test_it_can_be_switched_off(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NATIVE", "off")
    assert_not_in_use("SHOAL_NATIVE=off")
    monkeypatch.setenv("SHOAL_NATIVE", "no")
    with pytest.raises(ConfigError, match="SHOAL_NATIVE=no is not known; possible are on and off"):
        native_status()


def test_a_missing_build_has_a_reason(installed: Path) -> None:
    (installed / "build.json").write_text('{"reason": "this CPU is aarch64"}\n')
    assert_not_in_use("this CPU is aarch64")


@pytest.mark.parametrize("content", [None, "", "{"])
def test_without_an_install_it_is_not_built(installed: Path, content: str | None) -> None:
    (installed / "build.json").unlink()
    if content is not None:
        (installed / "build.json").write_text(content)
    assert_not_in_use("not built")


@pytest.mark.parametrize("damage", ["missing", "no library", "another library"])
def test_a_library_that_cannot_be_loaded_is_not_used(installed: Path, damage: str) -> None:
    file = installed / "libshoal.so"
    file.unlink()
    if damage == "no library":
        file.write_bytes(b"no library")
    elif damage == "another library":
        file.symlink_to(Path(torch.__file__).parent / "lib" / "libc10.so")
    assert_not_in_use("the library cannot be loaded: ")


@pytest.mark.parametrize("change", ["changed", "added", "removed"])
def test_a_library_of_other_sources_is_not_used(installed: Path, tmp_path: Path, change: str) -> None:
    kernel = tmp_path / "csrc/kernels/level.c"
    if change == "changed":
        kernel.write_text(kernel.read_text().replace("int64_t KERNEL", "int32_t KERNEL"))
    elif change == "added":
        kernel.with_name("more.c").write_text("")
    else:
        kernel.unlink()
    assert_not_in_use("the library was built from other sources than those in csrc")


def test_installed_without_sources_it_is_used(installed: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "csrc")
    assert load_native() is not None


def test_a_torch_without_the_symbols_is_detected(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cpu.so").symlink_to(installed / "libshoal.so")
    assert_not_in_use("torch does not tell its number of threads: ")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_torchs_number_of_threads_runs_each_task_once(installed: Path, threads: int) -> None:
    native, before = load_native(), torch.get_num_threads()
    assert native is not None
    done: list[int] = []
    task_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    task = task_type(lambda _, index: done.append(index))
    shared = native._library
    shared.shoal_threads.restype = ctypes.c_int64
    shared.shoal_parallel.argtypes = (ctypes.c_int64, task_type, ctypes.c_void_p)
    try:
        torch.set_num_threads(threads)
        assert shared.shoal_threads() == threads
        for count in (0, 1, 100):
            done.clear()
            shared.shoal_parallel(count, task, None)
            assert sorted(done) == list(range(count))
    finally:
        torch.set_num_threads(before)


def test_the_status_does_not_import_torch() -> None:
    program = (
        "import sys; from shoal.native import native_status; print(native_status(), 'torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == f"{native_status()} False\n"
