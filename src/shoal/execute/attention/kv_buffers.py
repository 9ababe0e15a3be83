"""The KV pool's buffers, and the copies of whole blocks between them and inside them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from shoal.core import BlockCopy
from shoal.execute.attention.kv_views import MergedCache, ServiceCache, SplitCache, UnitIds
from shoal.execute.huge_pages import huge_empty, prefault
from shoal.kvcache import PoolLayout


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy with fixed addresses, which stay valid whatever the pool does with the blocks afterwards."""

    source: ServiceCache
    """The cache to read from."""
    source_place: int | torch.Tensor
    """Index of the block in the source's ``rows``."""
    target: ServiceCache
    """The cache to write to."""
    target_place: int | torch.Tensor
    """Index of the block in the target's ``rows``."""

    def carry_out(self) -> None:
        """Copy the whole block; between host and device as one transfer, ordered with the device's work."""
        content = self.source.rows[self.source_place]
        if isinstance(self.target_place, int):
            self.target.rows[self.target_place].copy_(content, non_blocking=True)
        else:
            self.target.rows[self.target_place] = content.to(self.target.device)


class KVStore:
    """The pool's flat buffer, the buffer for swapped KV in host memory, and every service's views of them.

    The buffers are not initialised: rows that no step has written may contain anything.

    unit_ids, host_unit_ids: needed for the split layout. host_layout: None if nothing is swapped.
    """

    def __init__(
        self,
        layout: PoolLayout,
        device: torch.device,
        unit_ids: UnitIds | None = None,
        host_layout: PoolLayout | None = None,
        host_unit_ids: UnitIds | None = None,
    ) -> None:
        self.buffer = _empty(layout.total_bytes, device)
        """The pool's bytes."""
        self.services: dict[str, ServiceCache] = {}
        """Each service's view of them."""
        self.host_buffer: torch.Tensor | None = None
        """Bytes of swapped KV."""
        self.host_services: dict[str, ServiceCache] = {}
        """Each service's view of those."""
        self._unit_ids, self._host_unit_ids = unit_ids, host_unit_ids
        if host_layout is not None:
            self.host_buffer = torch.empty(
                host_layout.total_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
        self._layout: PoolLayout | None = None
        self.lay_out(layout, host_layout)

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """See the same bytes in another way. Copies that were located before keep their addresses.

        The view of a service for which nothing changes stays the same object.
        """
        before, self._layout = self._layout, layout
        views = _views(self.buffer, layout, self._unit_ids)
        if before is not None and replace(before, services=layout.services) == layout:
            same = [name for name in views if before.services.get(name) == layout.services[name]]
            views |= {name: self.services[name] for name in same}
        self.services = views
        if host_layout is not None:
            assert self.host_buffer is not None
            self.host_services = _views(self.host_buffer, host_layout, self._host_unit_ids)

    def zero(self, merged_block: int) -> None:
        """Clear a merged block that changes dtype."""
        assert self._layout is not None
        start = merged_block * self._layout.merged_bytes
        self.buffer[start : start + self._layout.merged_bytes] = 0

    def locate(self, copies: Iterable[BlockCopy]) -> list[Transfer]:
        """Look up the addresses of a plan's copies; must be called before the next plan is scheduled.

        A source in the pool is the block as it was before the plan's step, which may have freed it.
        """
        transfers: list[Transfer] = []
        for (name, from_host, to_host), same in groupby(
            copies, key=lambda copy: (copy.service, copy.source_host, copy.target_host)
        ):
            run = list(same)
            source = self._cache(name, from_host)
            target = self._cache(name, to_host)
            sources = source.places([copy.source for copy in run], before=not from_host)
            targets = target.places([copy.target for copy in run])
            transfers += [
                Transfer(source, source_place, target, target_place)
                for source_place, target_place in zip(sources, targets, strict=True)
            ]
        return transfers

    def _cache(self, service: str, host: bool) -> ServiceCache:
        if not host:
            return self.services[service]
        if self.host_buffer is None:
            raise ValueError("a plan swaps KV, but the executor was given no host_layout")
        return self.host_services[service]

    def copy(self, copy: BlockCopy) -> None:
        """Copy one block of a service onto another."""
        self.copy_all((copy,))

    def copy_all(self, copies: Iterable[BlockCopy]) -> None:
        """Make copies one after the other: a later one may read what an earlier one wrote."""
        for transfer in self.locate(copies):
            transfer.carry_out()


def _empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # attention reads blocks from all over it
        buffer = huge_empty(num_bytes)
        prefault(buffer)
        return buffer
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _views(buffer: torch.Tensor, layout: PoolLayout, unit_ids: UnitIds | None) -> dict[str, ServiceCache]:
    if layout.kind == "merged":
        return {name: MergedCache(buffer, layout, view) for name, view in layout.services.items()}
    if unit_ids is None:
        raise ValueError("the split layout needs the pool's unit_ids")
    return {name: SplitCache(buffer, layout, view, unit_ids) for name, view in layout.services.items()}
