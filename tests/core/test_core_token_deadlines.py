from shoal.core import NO_GOALS, SLO, TokenDeadlines

DEADLINES = TokenDeadlines(arrival_ns=1_000, ttft_s=2.0, tpot_s=0.5)


def test_a_token_is_due_after_the_first_and_a_gap_for_each_further_one() -> None:
    assert [DEADLINES.due_ns(number) for number in (0, 1, 4)] == [2_000_001_000, 2_500_001_000, 4_000_001_000]


def test_tokens_that_come_together_are_late_up_to_one_that_is_not_due_yet() -> None:
    now_ns = DEADLINES.due_ns(3)
    assert DEADLINES.num_on_time(0, 5, now_ns) == 2
    assert DEADLINES.num_on_time(0, 5, now_ns + 1) == 1
    assert DEADLINES.num_on_time(2, 1, now_ns) == 0
    assert DEADLINES.num_on_time(3, 1, now_ns) == 1
    assert DEADLINES.num_on_time(3, 0, now_ns) == 0


def test_both_goals_are_needed() -> None:
    assert TokenDeadlines.of(SLO(ttft_s=2.0, tpot_s=0.5, e2e_s=9.0), 1_000) == DEADLINES
    assert TokenDeadlines.of(SLO(ttft_s=2.0), 1_000) is TokenDeadlines.of(SLO(tpot_s=2.0), 1_000) is None
    assert TokenDeadlines.of(NO_GOALS, 1_000) is None
