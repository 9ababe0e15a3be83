"""The crash journal: what the owner reads after a crash."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from engine_builders import FakeExecutor, make_engine, make_request, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.engine.process.crash_journal import Journal, create_journal, read_journal

PLANS = st.lists(st.lists(st.text(max_size=9), max_size=5), max_size=8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("journal") / "journal"


@given(PLANS)
def test_requests_of_plans_in_flight_are_read_back(path, plans):
    create_journal(path)
    journal = Journal(path)
    for number, ids in enumerate(plans):
        journal.begin(number, ids)
        assert set(read_journal(path)) == {*ids, *(plans[number - 1] if number else ())}
    for number in range(max(0, len(plans) - 2), len(plans)):
        journal.end(number)
        assert set(read_journal(path)) == set(plans[-1] if number < len(plans) - 1 else ())
    journal.close()


@given(PLANS.filter(len), st.data())
@settings(max_examples=examples(200))
def test_a_damaged_journal_reads_as_less(path, plans, data):
    create_journal(path)
    journal = Journal(path)
    for number, ids in enumerate(plans):
        journal.begin(number, ids)
    journal.close()
    content = bytearray(path.read_bytes())
    known = {request for ids in plans[-2:] for request in ids}
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, 40) | st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    assert set(read_journal(path)) <= known


def test_a_missing_or_invalid_journal_reads_as_empty(tmp_path):
    assert read_journal(tmp_path / "none") == ()
    (tmp_path / "nonsense").write_bytes(os.urandom(1 << 19))
    assert read_journal(tmp_path / "nonsense") == ()
    assert read_journal(tmp_path) == ()


def test_too_many_requests_leave_a_plan_without_suspects(tmp_path):
    create_journal(tmp_path / "journal")
    journal = Journal(tmp_path / "journal")
    journal.begin(0, ["request"])
    journal.begin(2, ["x" * 99] * 5000)
    assert read_journal(tmp_path / "journal") == ()


def test_a_journal_survives_a_killed_process(tmp_path):
    create_journal(tmp_path / "journal")
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from shoal.engine.process.crash_journal import Journal
        journal = Journal(Path(sys.argv[1]))
        journal.begin(0, ["a", "b"])
        journal.begin(1, ["c"])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "journal")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert read_journal(tmp_path / "journal") == ("a", "b", "c")


class _Watching(FakeExecutor):
    """Records the observer's state while each plan is computed."""

    def collect(self):
        self.seen.append({request for ids in self.observer.plans.values() for request in ids})
        return super().collect()


class _Observer:
    def __init__(self):
        self.plans = {}

    def begin(self, plan, request_ids):
        assert len(request_ids) == len(plan.seq_ids)
        self.plans[plan.number] = list(request_ids)

    def end(self, plan):
        del self.plans[plan.number]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_observer_is_called_before_every_plan(depth):
    engine, _ = make_engine(blocks=200, scheduler={"depth": depth})
    engine.observer = engine.fake_executor.observer = _Observer()
    engine.fake_executor.seen = []
    engine.fake_executor.__class__ = _Watching
    for name in "xyz":
        engine.submit(make_request(name, 6))
    while engine.busy:
        engine.step()
    assert engine.observer.plans == {}
    assert {"x", "y", "z"} in engine.fake_executor.seen


def test_a_plan_that_ends_the_engine_stays_in_the_journal():
    engine, _ = make_engine()
    engine.observer = _Observer()
    engine.submit(make_request("poison", [1, 299]))
    with pytest.raises(RuntimeError, match="on fire"):
        run_all(engine)
    assert list(engine.observer.plans.values()) == [["poison"]]
