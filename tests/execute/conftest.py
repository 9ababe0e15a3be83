import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _without_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test marked ``without_native`` that asks for the native library, itself or in a child process.

    ``make test-torch`` leaves those tests out, since without the library they would do the same again.
    """
    if not request.node.get_closest_marker("without_native"):
        yield
        return
    from shoal.native import library

    def opened() -> NoReturn:
        pytest.fail("asks for the native library; take the mark without_native away")

    monkeypatch.setattr(library, "_open", opened)
    monkeypatch.setenv("SHOAL_NATIVE", "not to be asked for")  # an error where a child reads it
    library.load_native.cache_clear()
    yield
    library.load_native.cache_clear()
