"""The running requests of a service, as others see them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shoal.schedule.tracked import Tracked


class Running(Sequence[Tracked]):
    """All running requests of a service, whose books are brought up to date when somebody looks at one.

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


class Lineup(Running):
    """All running requests of a service, smallest urgency first; they are put in order when somebody looks.

    rows: in the order of admission, which equals keep; not to be changed by others. urgencies: of each [n].
    """

    def __init__(self, rows: list[Tracked], urgencies: npt.NDArray[np.floating[Any]]) -> None:
        super().__init__(rows, self._sort)
        self._urgencies: npt.NDArray[np.floating[Any]] | None = urgencies

    def _sort(self) -> None:
        if self._urgencies is not None:
            places = self._urgencies.argsort(kind="stable").tolist()
            self._rows = [self._rows[at] for at in places]
            self._urgencies = None
