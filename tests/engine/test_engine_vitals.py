"""Signs of life of an engine process, by a clock of our own."""

from shoal.engine.vitals import Vitals


def test_a_silent_process_is_told_from_a_step_that_does_not_end():
    now = [0]
    vitals = Vitals(process_limit_s=10, step_limit_s=60, clock=lambda: now[0] * 10**9)
    found = []
    for second in range(0, 90, 5):
        now[0] = second
        # The process stops at 40 and goes on at 60; its engine is in one step from 0 to 75.
        if not 40 <= second < 60:
            vitals.heartbeat()
        if second == 75:
            vitals.update(None)
        silence = vitals.silence()
        found.append((second, silence and (silence.duration_s, "sign" in silence.what)))
    assert [pair for pair in found if pair[1]] == [
        (50, (15, True)),
        (55, (20, True)),
        (65, (65, False)),
        (70, (70, False)),
    ]
