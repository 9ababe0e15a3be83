"""Signals of child processes, and their exit status."""

import asyncio
import signal
import subprocess
import threading

from shoal.engine.process.child_signals import interrupts_held_back, kill_child


def test_interrupts_are_delivered_again_afterwards():
    first, second = interrupts_held_back(), interrupts_held_back()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    second.__exit__(None, None, None)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_threads_hold_interrupts_back_for_themselves():
    """Blocked signals are those of a thread: the last of several threads cannot unblock them for all."""
    held = interrupts_held_back()
    held.__enter__()
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with interrupts_held_back():
            entered.set()
            leave.wait()

    other = threading.Thread(target=hold)
    other.start()
    entered.wait()
    held.__exit__(None, None, None)
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    leave.set()
    other.join()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert not blocked


def test_a_killed_process_has_its_own_exit_status():
    """Also after a second kill while asyncio is about to read the exit status."""

    async def kill_some() -> list[int]:
        started = [await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE) for _ in range(20)]
        for process in started:
            for _ in range(1_000):
                kill_child(process)
        return [await process.wait() for process in started]

    assert asyncio.run(kill_some()) == [-signal.SIGKILL] * 20
