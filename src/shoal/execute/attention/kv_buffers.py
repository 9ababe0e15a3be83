"""KV pool buffers on device and host, and block copies: swap out, swap in, and copies inside the pool."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from shoal.core import BlockCopy
from shoal.execute.attention.kv_views import MergedCache, ServiceCache, SplitCache, UnitIds
from shoal.execute.huge_pages import huge_empty, prefault
from shoal.execute.transfers import host_memory
from shoal.kvcache import PoolLayout


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A copy of a block (a row of ``ServiceCache.rows``) between fixed addresses, which stay valid when the
    pool reassigns the blocks."""

    source: ServiceCache
    source_index: int | torch.Tensor
    target: ServiceCache
    target_index: int | torch.Tensor

    def run(self) -> None:
        """Copy the block; between host and device as one asynchronous transfer, in the order of the device's
        work."""
        content = self.source.rows[self.source_index]
        if isinstance(self.target_index, int):
            self.target.rows[self.target_index].copy_(content, non_blocking=True)
        else:
            self.target.rows[self.target_index] = content.to(self.target.device)


class KVStore:
    """The pool's flat buffer, the host buffer for swapped KV, and each service's views of them.

    The buffers are not initialised: rows that no step has written may contain anything.

    unit_ids, host_unit_ids: required for the split layout. host_layout: None if nothing is swapped.
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
        self.services: dict[str, ServiceCache] = {}
        self.host_buffer: torch.Tensor | None = None
        self.host_services: dict[str, ServiceCache] = {}
        self._unit_ids, self._host_unit_ids = unit_ids, host_unit_ids
        if host_layout is not None:
            self.host_buffer = host_memory(host_layout.total_bytes, device)
        self._layout: PoolLayout | None = None
        self.lay_out(layout, host_layout)

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """Change the layout of the same bytes. Transfers that were located before keep their addresses.

        The view of a service that does not change stays the same object.
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
        """Zero a merged block that changes dtype."""
        assert self._layout is not None
        start = merged_block * self._layout.merged_bytes
        self.buffer[start : start + self._layout.merged_bytes] = 0

    def locate(self, copies: Iterable[BlockCopy]) -> list[BlockTransfer]:
        """Find the addresses of a plan's copies; must be called before the next plan is scheduled.

        A source in the pool is the block as it was before the plan, which may have freed it.
        """
        transfers: list[BlockTransfer] = []
        for (name, from_host, to_host), same in groupby(
            copies, key=lambda copy: (copy.service, copy.source_host, copy.target_host)
        ):
            run = list(same)
            source = self._cache(name, from_host)
            target = self._cache(name, to_host)
            sources = source.row_indices([copy.source for copy in run], before=not from_host)
            targets = target.row_indices([copy.target for copy in run])
            transfers += [
                BlockTransfer(source, source_index, target, target_index)
                for source_index, target_index in zip(sources, targets, strict=True)
            ]
        return transfers

    def _cache(self, service: str, host: bool) -> ServiceCache:
        if not host:
            return self.services[service]
        if self.host_buffer is None:
            raise ValueError("a plan swaps KV, but the executor was given no host_layout")
        return self.host_services[service]

    def copy(self, copy: BlockCopy) -> None:
        self.copy_all((copy,))

    def copy_all(self, copies: Iterable[BlockCopy]) -> None:
        """Copy in order: a later copy may read what an earlier one wrote."""
        for transfer in self.locate(copies):
            transfer.run()


def _empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # attention reads blocks all over the buffer
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
