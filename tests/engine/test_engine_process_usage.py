"""What an engine reports of its use of the machine."""

import time

import pytest
import torch

from shoal.engine.process_usage import DeviceUsage, measure_usage


def test_cpu_time_and_memory_grow_with_work():
    before = measure_usage("cpu")
    assert before.device is None
    assert before.rss_bytes > 10 << 20
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert measure_usage("cpu").cpu_s >= before.cpu_s + 0.04
    held = b"x" * (100 << 20)
    assert measure_usage("cpu").rss_bytes > before.rss_bytes + (90 << 20)
    assert len(held) == 100 << 20


def test_a_gpu_is_as_its_driver_says(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def answer(value: int):
        def ask(device: str) -> int:
            asked.append(device)
            return value

        return ask

    monkeypatch.setattr(torch.cuda, "utilization", answer(73))
    monkeypatch.setattr(torch.cuda, "device_memory_used", answer(5 << 30), raising=False)
    monkeypatch.setattr(torch.cuda, "power_draw", answer(412_500))
    found = measure_usage("cuda:1").device
    assert found == DeviceUsage(utilisation=0.73, memory_bytes=5 << 30, power_w=412.5)
    assert asked == ["cuda:1"] * 3


def test_a_driver_that_does_not_answer_leaves_no_figures(monkeypatch: pytest.MonkeyPatch):
    def refuse(device: str) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed or it can't be imported.")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert measure_usage("cuda:0").device is None
