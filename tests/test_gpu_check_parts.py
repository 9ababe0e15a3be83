"""Parts of `benchmarks.gpu_check` on a CPU: traces, model sizes, comparisons with the reference, tests."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_check.cases import Cases
from benchmarks.gpu_check.part_list import PARTS
from benchmarks.gpu_check.parts import tests as tests_part
from benchmarks.gpu_check.shapes import LLAMA_1B, LLAMA_8B
from benchmarks.gpu_check.timing import summary
from gpu_check_builders import ROOT
from shoal.execute.attention.torch_backends import BatchedAttention

timed_kernels = st.tuples(st.sampled_from("abcd"), st.integers(0, 20), st.integers(1, 6))


@given(st.lists(timed_kernels, min_size=1, max_size=12))
def test_idle_time_is_the_time_without_a_running_kernel(lengths: list[tuple[str, int, int]]) -> None:
    ran = [(name, float(start), float(start + length)) for name, start, length in lengths]
    first, last = min(start for _, start, _ in ran), max(end for _, _, end in ran)
    instants = [at + 0.5 for at in range(int(first), int(last))]
    idle = [at for at in instants if not any(start < at < end for _, start, end in ran)]
    found = summary(ran)
    assert found is not None
    assert found.kernels == len(ran)
    assert found.idle == pytest.approx(len(idle) / len(instants))
    took = {name: sum(end - start for other, start, end in ran if other == name) for name, _, _ in ran}
    most = max(took.values())
    assert took[found.longest[0]] == most
    assert f" {most / sum(took.values()):.0%}" in found.longest


def test_no_kernels_give_no_summary() -> None:
    assert summary([]) is None


@pytest.mark.parametrize("model", [LLAMA_1B, LLAMA_8B], ids=lambda model: model.name)
def test_weight_bytes_equal_those_of_transformers(model: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**model.config())
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    made.tie_weights()
    assert 2 * sum(parameter.numel() for parameter in made.parameters()) == model.weight_bytes
    embeddings = 2 * made.get_input_embeddings().weight.numel()
    assert model.read_bytes == model.weight_bytes - (0 if model.tied else embeddings)


if TYPE_CHECKING or find_spec("triton") is not None:
    from benchmarks.gpu_check.parts import kernels as kernels_part

    class WithoutWindow(BatchedAttention):
        """Attends beyond the window."""

        def attend(self, *arguments: Any) -> torch.Tensor:
            *others, spec = arguments
            return super().attend(*others, replace(spec, window=None))

    class WithoutWriting(BatchedAttention):
        """Does not write new keys and values to the pool."""

        def attend(self, *arguments: Any) -> torch.Tensor:
            with pytest.MonkeyPatch.context() as broken:
                broken.setattr(self.cache, "write", lambda *_: None)
                return super().attend(*arguments)


@pytest.mark.skipif(find_spec("triton") is None, reason="the part needs triton")
@pytest.mark.parametrize("layout", ["merged", "split"])
@pytest.mark.parametrize("spare_bytes", [0, 1 << 20])
def test_attention_that_differs_from_the_reference_is_found(
    layout: str, spare_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(17, 18), (0, 1), (0, 9), (3, 9)]
    heads = kernels_part.TINY_SHAPES[1]

    def compare(step: type[BatchedAttention]) -> Any:
        monkeypatch.setattr(kernels_part, "TritonAttention", step)
        return kernels_part.compare("cpu", heads, rows, "float32", layout, spare_bytes)

    assert compare(BatchedAttention)["decodes, largest error"] < 1e-5
    with pytest.raises(AssertionError, match=r"3 of 4 rows differ: tokens 17 to 18 by .*, tokens 0 to 9 by"):
        compare(WithoutWindow)
    with pytest.raises(AssertionError, match=r"tokens 17 to 18 by inf"):
        compare(WithoutWriting)


TESTS = """
import pytest

def test_right():
    pass

def test_wrong():
    assert 1 == 2

@pytest.mark.skip
def test_elsewhere():
    pass
"""


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes do not see that they run under pytest."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("outside")
def test_failing_tests_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    cases = Cases(tmp_path / "records", "cpu", tiny=True, ends_s=float("inf"))
    tests_part.run(cases, [str(file)])
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [each["state"] for each in records] == ["failed"] * 3
    assert records[0]["figures"] == records[2]["figures"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert records[1]["case"].endswith("test_some.py::test_wrong")
    assert records[1]["error"] == "assert 1 == 2"
    assert records[2]["line"] == "1 passed, 1 failed, 1 skipped"


@pytest.mark.usefixtures("outside")
def test_tests_that_cannot_be_collected_fail(tmp_path: Path) -> None:
    file = tmp_path / "test_broken.py"
    file.write_text("import a_package_that_is_not_there\n")
    cases = Cases(tmp_path / "records", "cpu", tiny=True, ends_s=float("inf"))
    tests_part.run(cases, [str(file)])
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert {each["state"] for each in records} == {"failed"}
    assert records[1]["error"] == "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
    assert records[-1]["error"] == "pytest ended with status 2"


def test_all_listed_tests_exist() -> None:
    for name in (*tests_part.TESTS, *tests_part.TINY_TESTS):
        file, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_dry_run_measures_all_parts(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--cpu",
        "--seconds",
        "2000",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    parts = {part["name"]: part for part in json.loads(file.read_text())["parts"]}
    assert done.returncode == 0, json.dumps(parts, indent=1)
    shown = [line.split()[:2] for line in done.stdout.splitlines()]
    for part in PARTS:
        there = find_spec("triton") is not None or "triton" not in part.needs
        state = "ok" if there else "left out"
        assert parts[part.name]["state"] == state, parts[part.name]
        assert [part.name, *state.split()][:2] in shown
        assert not there or any(case["figures"] for case in parts[part.name]["cases"])
