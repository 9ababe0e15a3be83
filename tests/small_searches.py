"""Searches of plans that take a moment: what commands do with them needs few requests and one core."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

MIN_REQUESTS = 40
"""Of a workload, in place of the 400 that a search needs to mean something."""


@contextmanager
def small_searches() -> Iterator[None]:
    """Searches take fewer requests than they do otherwise, and simulate in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("capacity", "placing", "tune"):
            patch.setattr(f"shoal.plan.{module}.MIN_REQUESTS", MIN_REQUESTS // 2)
        patch.setattr("os.cpu_count", lambda: 1)
        yield
