"""Groups, requests and random sequences of operations; packing by brute force."""

from collections.abc import Sequence

from hypothesis import strategies as st

from shoal.cluster.packing import (
    Arrival,
    Changes,
    DeviceGroup,
    Growth,
    Operations,
    Packer,
    Packing,
)

CAPACITY = 1200


def make_packing(groups: int = 40, capacity: int = CAPACITY) -> Packing:
    return Packing([DeviceGroup(name=f"g{n:02}", capacity=capacity) for n in range(groups)])


def arrival(id: str, size: int, expected: int = 0, service: str = "s") -> Arrival:
    return Arrival(id, service, size, max(size, expected))


def arrive(packer: Packer, **sizes: int) -> Changes:
    return packer.apply(Operations(arrivals=[arrival(id, size) for id, size in sizes.items()]))


def grow(packer: Packer, **sizes: int) -> Changes:
    return packer.apply(Operations(updates={id: Growth(size, size) for id, size in sizes.items()}))


def depart(packer: Packer, *ids: str) -> Changes:
    return packer.apply(Operations(departures=ids))


def together(packing: Packing) -> set[frozenset[str]]:
    """The requests of each active group."""
    return {frozenset(one.items) for one in packing.active()}


Steps = list[tuple[str, int, int]]


def sequences(most: int, longest: int = 40) -> st.SearchStrategy[Steps]:
    """Operations as (kind, which, size); ``most`` is the largest size."""
    kinds = st.sampled_from(["arrive", "arrive", "grow", "depart"])
    sizes = st.one_of(st.integers(1, most), st.sampled_from([most // 8 + 1, most // 3 + 1, most // 2 + 1]))
    return st.lists(st.tuples(kinds, st.integers(0, 50), sizes), max_size=longest)


def operations_of(steps: Sequence[tuple[str, int, int]], packing: Packing, first: int) -> Operations:
    """What these steps mean for the requests that are running; a request is in one of the lists at most."""
    running = sorted(packing.items)
    departures: list[str] = []
    updates: dict[str, Growth] = {}
    arrivals: list[Arrival] = []
    for number, (kind, which, size) in enumerate(steps):
        if kind == "arrive":
            arrivals.append(arrival(f"r{first + number}", size, expected=size + which * 10))
            continue
        if not running:
            continue
        id = running[which % len(running)]
        if id in departures or id in updates:
            continue
        if kind == "depart":
            departures.append(id)
        else:
            grown = max(packing.items[id].size, size)
            updates[id] = Growth(grown, grown + which * 10)
    return Operations(departures=departures, updates=updates, arrivals=arrivals)


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """The fewest equal bins, by trying everything; for a dozen items."""
    ordered = sorted(sizes, reverse=True)
    best = len(ordered)

    def search(at: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if at == len(ordered):
            best = len(bins)
            return
        seen = set()
        for n, used in enumerate(bins):
            if used + ordered[at] <= capacity and used not in seen:
                seen.add(used)
                bins[n] += ordered[at]
                search(at + 1, bins)
                bins[n] -= ordered[at]
        bins.append(ordered[at])
        search(at + 1, bins)
        bins.pop()

    search(0, [])
    return best
