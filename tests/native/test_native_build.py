"""Installing: which compiler builds the library, what is said where none can, what a wheel holds."""

import tarfile
import zipfile
from pathlib import Path

import compile as compiling
import pytest
from compilers import VARIANTS, ZIGLANG, NotBuilt, compiler_requirements, refuse_platform, system_compiler
from native_builders import build_info, in_tree, make_compiler, make_tree

from shoal.native.library import VARIANTS as KNOWN_VARIANTS

pytest.importorskip("setuptools", "77")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all commands of the machine: none so far."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for variable in ("CC", "SHOAL_NATIVE"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def test_the_package_and_the_build_know_the_same_instruction_sets() -> None:
    assert tuple(VARIANTS) == KNOWN_VARIANTS


def test_the_first_working_compiler_is_used(machine: Path) -> None:
    make_compiler(machine, "clang")
    make_compiler(machine, "cc", "exit 1")
    make_compiler(machine, "gcc")
    assert system_compiler().name == "gcc 1.2.3"


def test_cc_names_the_compiler_with_its_arguments(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_compiler(machine, "cc")
    other = make_compiler(machine, "other")
    monkeypatch.setenv("CC", f"{other} --quick")
    found = system_compiler()
    assert found.command == (other, "--quick")
    assert found.name.startswith(f"{other} --quick ")


@pytest.mark.parametrize(
    ("script", "chosen", "reason"),
    [
        (None, None, "not built, because no compiler was found"),
        (None, "missing", "not built, because there is no CC=missing"),
        ("exit 3", None, "not built, because cc failed: exit status 3"),
        (
            "echo probe.c:3: fatal error: no math.h >&2; exit 1", None,
            "not built, because cc failed: probe.c:3: fatal error: no math.h",
        ),
        ("exit 3", "missing", "not built, because there is no CC=missing"),
    ],
)  # fmt: skip
def test_without_a_working_compiler_ziglang_is_required(
    machine: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, chosen: str | None, reason: str
) -> None:
    if script:
        make_compiler(machine, "cc", script)
    if chosen:
        monkeypatch.setenv("CC", chosen)
    with pytest.raises(NotBuilt, match=f"^{reason}$"):
        system_compiler()
    assert compiler_requirements() == [ZIGLANG]


def test_with_a_compiler_nothing_else_is_required(machine: Path) -> None:
    make_compiler(machine, "cc")
    assert compiler_requirements() == []


@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [
        ("platform.machine", lambda: "aarch64", "this CPU is aarch64"),
        ("sys.platform", "darwin", "this system is "),
        ("sys.maxsize", 2**31 - 1, "this Python is one for 32 bits"),
    ],
)
def test_other_platforms_are_left_alone(
    machine: Path, monkeypatch: pytest.MonkeyPatch, what: str, value: object, reason: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(what, value)
    with pytest.raises(NotBuilt, match=f"^{reason}"):
        refuse_platform()
    assert compiler_requirements() == []


def test_it_can_be_switched_off(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NATIVE", "off")
    assert compiler_requirements() == []
    (tmp_path / "libshoal.so").write_text("of the last install")
    reason = compiling.build_library(tmp_path)
    assert build_info(tmp_path) == {"reason": reason} == {"reason": "it was installed with SHOAL_NATIVE=off"}
    assert not (tmp_path / "libshoal.so").exists()
    monkeypatch.setenv("SHOAL_NATIVE", "no")
    with pytest.raises(ValueError, match="possible are on and off"):
        compiler_requirements()


def test_a_failed_build_reports_the_compilers_output(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "case $* in *cpu.c*) echo cpu.c:1:1: error: tired >&2; exit 1; esac"
    monkeypatch.setenv("CC", make_compiler(machine, "other", script))
    reason = compiling.build_library(tmp_path)
    assert reason == f"not built, because {machine}/other 1.2.3 failed: cpu.c:1:1: error: tired"
    assert build_info(tmp_path) == {"reason": reason}


WHEEL = "import backend; print('built', backend.build_wheel('dist'))"


@pytest.mark.slow
def test_a_wheel_holds_the_library_for_its_platform_or_none_for_any(built: Path, tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    platform = build_info(built / "src/shoal/native")["platform"] or "linux_x86_64"
    library, info = "shoal/native/libshoal.so", "shoal/native/build.json"
    (tree / "src" / library).write_text("of an editable install")
    for switch, tag, expected in (("on", platform, {library, info}), ("off", "any", {info})):
        name = in_tree(tree, WHEEL, SHOAL_NATIVE=switch).split()[-1]
        assert name.endswith(f"-py3-none-{tag}.whl")
        wheel = zipfile.ZipFile(tree / "dist" / name)
        assert {file for file in wheel.namelist() if file.endswith((".so", ".json"))} == expected
        if switch == "on":
            assert wheel.read(library)[:4] == b"\x7fELF"


def test_an_editable_install_has_the_library_in_the_sources(built: Path, tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    in_tree(tree, "import backend; backend.build_editable('dist')")
    info = build_info(tree / "src/shoal/native")
    assert info == build_info(built / "src/shoal/native")
    assert (tree / "src/shoal/native/libshoal.so").read_bytes()[:4] == b"\x7fELF"


def test_the_hooks_require_a_compiler_only_if_something_is_built(tmp_path: Path) -> None:
    hooks = ", ".join(f"backend.get_requires_for_build_{what}()" for what in ("wheel", "editable", "sdist"))
    output = in_tree(make_tree(tmp_path), f"import backend; print([{hooks}])", PATH="")
    assert output.splitlines()[-1] == str([[ZIGLANG], [ZIGLANG], []])


def test_a_source_distribution_has_all_that_a_build_needs(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    (tree / "src/shoal/native/libshoal.so").write_text("of an editable install")
    name = in_tree(tree, "import backend; print('built', backend.build_sdist('dist'))").split()[-1]
    with tarfile.open(tree / "dist" / name) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    for folder in ("build_backend", "csrc"):
        files = {
            path.relative_to(tree).as_posix() for path in (tree / folder).rglob("*.[chp]*") if path.is_file()
        }
        assert {file for file in files if "__pycache__" not in file} <= names
    assert "src/shoal/native/libshoal.so" not in names
