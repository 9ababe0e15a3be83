"""`benchmarks.gpu_check` keeps its measurements when parts fail, crash, hang or are interrupted."""

import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_check import run
from benchmarks.gpu_check.cases import Cases, quantile
from benchmarks.gpu_check.part_list import PARTS, Part, environment, visible, wheels
from benchmarks.gpu_check.report import format_figure, line_of, tables
from benchmarks.gpu_check.run import PartResult, Setting, run_part
from gpu_check_builders import ROOT, environment_of, write_check


def check(folder: Path, command: list[str], *arguments: str) -> tuple[int, list[str], Mapping[str, Any]]:
    """Exit status, lines, and the parts of the JSON file by name."""
    written_to = folder / "check.json"
    done = subprocess.run(
        [*command, "--json", str(written_to), *arguments],
        cwd=folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    parts = json.loads(written_to.read_text())["parts"]
    return done.returncode, done.stdout.splitlines(), {part["name"]: part for part in parts}


def states_of(part: Mapping[str, Any]) -> dict[str, str]:
    return {case["case"]: case["state"] for case in part["cases"]}


def test_errors_in_a_part_do_not_stop_other_parts(tmp_path: Path) -> None:
    names = ("raises", "no_cases", "dies", "not_here", "short_of_time", "fine")
    status, lines, parts = check(tmp_path, write_check(tmp_path, *names), "--seconds", "600")
    assert status == 1
    assert {name: part["state"] for name, part in parts.items()} == {
        "raises": "failed",
        "no_cases": "failed",
        "dies": "failed",
        "not_here": "left out",
        "short_of_time": "cut",
        "fine": "ok",
    }
    assert states_of(parts["raises"]) == {"wrong": "failed", "right": "ok"}
    assert parts["raises"]["cases"][0]["error"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in parts["raises"]["log"]
    assert parts["no_cases"]["reason"] == "its process ended with status 1: OSError: no room"
    assert states_of(parts["short_of_time"]) == {"long": "cut", "short": "ok"}
    assert [line.split()[0] for line in lines[1:7]] == list(names)
    assert lines[1].endswith(
        "1 of 2 cases ok; 1 failed, wrong: ZeroDivisionError: division by zero; right anyway"
    )
    assert lines[6].endswith("1.5 ms")
    assert "| one | 1.50 | cpu |" in lines
    assert "| large | left out: too small a device |" in lines
    assert lines[-1].startswith("Not all of it was measured: raises (failed), no_cases (its process ended")


def test_a_part_continues_after_the_case_that_killed_its_process(tmp_path: Path) -> None:
    _, _, parts = check(tmp_path, write_check(tmp_path, "dies"))
    assert states_of(parts["dies"]) == {"before": "ok", "deadly": "failed", "after": "ok"}
    assert parts["dies"]["cases"][1]["error"] == "the process ended with signal 9"
    assert (tmp_path / "noted").read_text().split() == ["before", "deadly", "after"]


def test_a_part_and_its_children_are_killed_at_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps past the limit as soon as the part hangs."""
    write_check(tmp_path, "hangs")
    hung = tmp_path / "child"
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + (1e6 if hung.exists() else 0), sleep=time.sleep
    )
    monkeypatch.setattr(run, "time", clock)
    monkeypatch.chdir(tmp_path)
    result = PartResult(Part("hangs", "hangs", "part_hangs", 1000, ()))
    seen: list[int] = []
    run_part(
        result, 1e5, Setting("cpu", True, environment_of(tmp_path)), lambda: seen.append(len(result.cases))
    )
    assert (result.state, result.reason) == ("cut", "its time was over")
    assert [case["case"] for case in result.cases] == ["quick"]
    assert seen[-1] == 1
    assert is_gone(int(hung.read_text()))
    assert "3 ms" in line_of(result)


def is_gone(process: int) -> bool:
    """Whether it has ended; without an init process it stays a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_measurements_are_kept_after_an_interruption(tmp_path: Path, number: int) -> None:
    command = write_check(tmp_path, "fine", "hangs", "raises")
    file = tmp_path / "check.json"
    running = subprocess.Popen(
        [*command, "--json", str(file)],
        cwd=tmp_path,
        env=environment_of(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "child").exists():
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    out, errors = running.communicate()
    assert running.returncode == 130
    assert "interrupted" in errors
    parts = {part["name"]: part for part in json.loads(file.read_text())["parts"]}
    assert {name: part["state"] for name, part in parts.items()} == {"fine": "ok", "hangs": "cut"}
    assert states_of(parts["hangs"]) == {"quick": "ok"}
    assert "| quick | 3.00 |" in out
    assert is_gone(int((tmp_path / "child").read_text()))


def test_the_file_is_updated_while_a_part_runs(tmp_path: Path) -> None:
    """So a kill loses no measurements."""
    file = tmp_path / "check.json"
    running = subprocess.Popen(
        [*write_check(tmp_path, "hangs"), "--json", str(file)], cwd=tmp_path, env=environment_of(tmp_path)
    )
    while not (file.exists() and json.loads(file.read_text())["parts"][0]["cases"]):
        assert running.poll() is None
        time.sleep(0.02)
    while not (tmp_path / "child").exists():
        time.sleep(0.02)
    running.kill()
    running.wait()
    child = int((tmp_path / "child").read_text())
    while not is_gone(child):  # a process without its parent ends by itself
        time.sleep(0.02)


def test_selected_parts_and_the_list_of_all(tmp_path: Path) -> None:
    command = write_check(tmp_path, "fine", "raises")
    _, _, parts = check(tmp_path, command, "--only", "fine")
    assert list(parts) == ["fine"]
    script = [sys.executable, "-m", "benchmarks.gpu_check"]
    listed = subprocess.run([*script, "--list"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [part.name for part in PARTS]
    wrong = subprocess.run([*script, "--only", "kernel"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "kernels" in wrong.stderr


def test_parts_without_time_are_left_out(tmp_path: Path) -> None:
    status, lines, parts = check(tmp_path, write_check(tmp_path, "fine"), "--seconds", "30")
    assert (status, parts["fine"]["state"]) == (0, "left out")
    assert "s were left" in lines[1]
    assert sum(part.seconds for part in PARTS) == 480


def test_missing_packages_are_named_in_the_versions_of_the_constraints(tmp_path: Path) -> None:
    command = write_check(tmp_path, "fine", needs=("json", "a_tiny_package"))
    status, lines, parts = check(tmp_path, command)
    assert (status, parts["fine"]["state"]) == (0, "left out")
    assert parts["fine"]["reason"] == "it needs a_tiny_package"
    assert lines[1].startswith("missing here: a_tiny_package")
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert set(wheels(["zmq", "yaml", "msgspec", "prometheus_client", "xdist", "pytest_timeout"])) < set(
        pinned
    )


def test_wheels_of_a_folder_are_installed(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "a_tiny_package-1.0.dist-info"
    with zipfile.ZipFile(folder / "a_tiny_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_tiny_package.py", "VALUE = 'from a wheel'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a_tiny_package\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    command = write_check(tmp_path, "imports", needs=("a_tiny_package",))
    status, lines, _ = check(tmp_path, command, "--wheels", str(folder))
    assert status == 0
    assert lines[1].endswith("from a wheel")


def test_parts_see_one_gpu() -> None:
    assert visible({}, 1) == "1"
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 1) == "GPU-b"
    assert visible({"CUDA_VISIBLE_DEVICES": "3"}, 1) == visible({"CUDA_VISIBLE_DEVICES": ""}, 0) == "-1"
    made = environment({"PYTEST_ADDOPTS": "-x"}, gpu="3", folders=[Path("/wheels")], cache=Path("/cache"))
    assert made["CUDA_VISIBLE_DEVICES"] == "3"
    assert made["PYTHONPATH"].split(":")[0] == "/wheels"
    assert "PYTEST_ADDOPTS" not in made
    assert "TRITON_INTERPRET" not in made


def test_without_a_device_no_part_starts(tmp_path: Path) -> None:
    command = [part for part in write_check(tmp_path, "fine", "raises") if part != "--cpu"]
    status, _, parts = check(tmp_path, command, "--gpu", "99")
    assert status == 1
    assert {part["reason"] for part in parts.values()} == {"there is no such device"}
    assert [part["state"] for part in parts.values()] == ["failed", "left out"]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1), st.floats(0, 1))
def test_quantiles(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value < found for value in values) <= share * len(values)
    assert sum(value <= found for value in values) > share * len(values) or found == max(values)


def test_figures_have_three_digits() -> None:
    given_ = (12_345.6, 1234, 123.4, 12.34, 1.234, 0.1234, 0.01234, 0.0, "text")
    shown = ["12,346", "1,234", "123", "12.3", "1.23", "0.12", "0.012", "0", "text"]
    assert [format_figure(each) for each in given_] == shown


def test_tables_have_a_column_for_each_figure(tmp_path: Path) -> None:
    cases = Cases(tmp_path / "records", "cpu", tiny=True, ends_s=float("inf"))
    cases.report("a | b", "ok", {"ms": 1.0})
    cases.report("c", "failed", {"us": 2.0}, error="why\nnot")
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    result = PartResult(Part("name", "what it does", "module", 1, ()), "failed", 1.0, records)
    assert tables({"card": "H100"}, [result]).splitlines() == [
        *("card H100.", "", "What it does:", ""),
        "| name | ms | us | not ok |",
        "| --- | --- | --- | --- |",
        "| a \\| b | 1.00 |  |  |",
        "| c |  | 2.00 | failed: why not |",
        *("", "Not all of it was measured: name (failed)."),
    ]
