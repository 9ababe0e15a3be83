"""What processes that the engine room starts do about signals, and what they leave behind."""

import signal

from shoal.engine.children import interrupts_held_back


def test_interrupts_come_through_again_afterwards():
    first, second = interrupts_held_back(), interrupts_held_back()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    second.__exit__(None, None, None)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
