"""The running requests of a service, as others see them."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from shoal.schedule.tracked import Tracked


class Running(Sequence[Tracked]):
    """A list of requests whose books are brought up to date when somebody looks at one.

    Counting them, or passing them on, is not looking.
    """

    def __init__(self, rows: list[Tracked], settle: Callable[[], None]) -> None:
        self._rows = rows
        self._settle = settle

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Tracked]:
        self._settle()
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tracked: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tracked]: ...
    def __getitem__(self, index: int | slice) -> Tracked | list[Tracked]:
        self._settle()
        return self._rows[index]
