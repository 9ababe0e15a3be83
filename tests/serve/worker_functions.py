"""Functions that tests run in worker processes, which import this module."""

from shoal.core import InvalidRequest


def run_forever():
    while True:
        pass


def fill_memory():
    return len("x" * 10**10)


def go_deep(levels=10**6):
    return go_deep(levels - 1) if levels else 0


def refuse():
    raise InvalidRequest("no", param="field", code="a_code")
