"""Detection of hung steps: by CPU time, on a GPU by wall time."""

import pytest

from shoal.core import StepPlan
from shoal.engine.process.hang_detector import HangDetector, PresentStep, StepTimer


class Clock:
    now_ns = 0

    def __call__(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9)


def plan(number, tokens, iterations=1, service="a"):
    return StepPlan(
        number=number,
        service=service,
        seq_ids=(0,),
        new_tokens=(tokens,),
        sampled=(0,),
        iterations=iterations,
    )


def test_a_step_is_compared_with_those_of_its_service_and_its_size():
    clock = Clock()
    watch = StepTimer(clock)
    assert watch.present is None
    for number, (seconds, usual_s) in enumerate([(4.0, None), (2.0, 4.0)]):
        watch.begin(plan(number, 1000))
        assert watch.present == PresentStep(number, "a", usual_s)
        clock.sleep(seconds)
        watch.end()
        assert watch.present is None
    for number, (tokens, iterations, service, usual_s) in enumerate(
        [(600, 1, "a", 3.0), (400, 1, "a", None), (1, 700, "a", 2.0), (600, 1, "b", None)], start=2
    ):
        watch.begin(plan(number, tokens, iterations, service))
        expected = usual_s if usual_s is None else pytest.approx(usual_s)
        assert watch.present == PresentStep(number, service, expected)
        watch.end()


def test_a_plan_is_timed_from_the_end_of_the_plan_before():
    clock = Clock()
    watch = StepTimer(clock)
    watch.begin(plan(0, 1))
    clock.sleep(1)
    watch.begin(plan(1, 100))
    clock.sleep(2)
    assert watch.present.plan == 0
    watch.end()
    assert watch.present.plan == 1
    clock.sleep(5)
    watch.end()
    for tokens, mean_s in ((1, 3), (100, 5)):
        watch.begin(plan(2, tokens))
        assert watch.present.usual_s == mean_s
        watch.end()


def first_report(detector, step, seconds, share, every_s=1.0):
    """When a step that uses a share of a core is first reported as hung, and the message."""
    for second in range(int(seconds / every_s)):
        if why := detector.observe(step, every_s, share * every_s):
            return (second + 1) * every_s, why
    return None


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_a_slow_step_on_a_busy_machine_is_not_hung(threads, share):
    """It needs 20 s of CPU time on its threads, and gets a share of a core."""
    detector = HangDetector(30, threads, max_s=2)
    step = PresentStep(1, "a", 20.0)
    assert detector.observe(step, 1, 1) == ""
    assert first_report(detector, step, 20 / share, share * threads) is None


def test_a_step_without_cpu_time_is_stalled():
    detector = HangDetector(30, 2, max_s=2)
    for plan_number, usual_s in enumerate((None, 0.01, 500.0)):
        step = PresentStep(plan_number, "chat", usual_s)
        assert detector.observe(step, 1, 1) == ""
        assert first_report(detector, step, 5, 1.0) is None
        seconds, why = first_report(detector, step, 100, 0.0002)
        assert seconds == 31
        assert why == (
            "a step of chat stands still: it used 0.006 s of CPU time in 31.0 s"
            " (the limit, cluster.step_timeout, is 30 s)"
        )


@pytest.mark.parametrize(
    ("usual_s", "max_s", "says"),
    [
        (None, 600, "it is the first of its size, which may take 20 times cluster.step_timeout (30 s)"),
        (
            0.5,
            30,
            "steps of its size take 0.5 s, and this may take 20 times that or cluster.step_timeout",
        ),
        (4.0, 80, "steps of its size take 4 s"),
    ],
)
def test_an_endless_step_is_detected_by_its_cpu_time(usual_s, max_s, says):
    step = PresentStep(1, "a", usual_s)
    for share in (0.25, 2.0):
        detector = HangDetector(30, 2, max_s=2)
        assert detector.observe(step, 1, 1) == ""
        seconds, why = first_report(detector, step, 10_000, share)
        assert seconds == max_s * 2 / share + 1
        assert "a step of a does not end" in why
        assert "of CPU time on each of 2 threads" in why
        assert says in why


def test_on_a_gpu_only_wall_time_counts():
    for share in (0.0, 1.0):
        detector = HangDetector(30, None, max_s=2)
        assert detector.observe(PresentStep(1, "a", 4.0), 1, share) == ""
        seconds, why = first_report(detector, PresentStep(1, "a", 4.0), 1000, share)
        assert seconds == 81
        assert "CPU" not in why
        assert detector.observe(PresentStep(2, "a", None), 1, share) == ""
        assert first_report(detector, PresentStep(2, "a", None), 600, share) is None


def test_no_step_is_hung_after_the_process_slept():
    detector = HangDetector(30, 1, max_s=2)
    step = PresentStep(7, "a", 1.0)
    assert detector.observe(None, 100, 0) == ""
    assert detector.observe(step, 100, 0) == ""
    assert all(detector.observe(step, 1000, 0) == "" for _ in range(15))
    assert detector.observe(step, 1, 0) != ""
    assert detector.observe(PresentStep(8, "a", 1.0), 1, 0) == ""
    assert detector.observe(PresentStep(8, "a", 1.0), 1, 0) == ""
