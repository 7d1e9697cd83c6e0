"""`PoolStores`: which store holds the pages of which physical pool, and what both say of a transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import (
    PageBits,
    PageKeys,
    PoolGroup,
    PoolName,
    PoolTransferResult,
    Touchable,
)
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from radixlink_contracts import DevicePool, PageStore, PoolTransfer


class OnePoolEach(PoolGroup):
    """A group in which each transfer has one pool of its own name, and a page is one object."""

    def __init__(self, pools: Mapping[PoolName, DevicePool]) -> None:
        """Take the pools by the transfers that they take."""
        self._pools = dict(pools)

    @property
    @override
    def sources(self) -> frozenset[PoolName]:
        """Which transfers the pools take."""
        return frozenset(self._pools)

    @override
    def resolve(
        self,
        transfers: Iterable[PoolTransfer],
        *,
        allow_partial: bool = False,
        allow_missing_kv: bool = False,
    ) -> Sequence[tuple[DevicePool, PoolTransfer]]:
        """Each transfer beside its pool; see `PoolGroup.resolve`."""
        resolved: dict[PoolName, tuple[DevicePool, PoolTransfer]] = {}
        for transfer in transfers:
            pool = self._pools.get(transfer.name)
            if pool is None or transfer.name in resolved:
                msg = (
                    f"resolve: expected one transfer for each of {sorted(self._pools)}, "
                    f"got one more of {transfer.name}"
                )
                raise ContractError(msg)
            if len(transfer.keys):
                resolved[transfer.name] = (pool, transfer)
        missing = self._pools.keys() - resolved.keys()
        if PoolName.KV in missing and not allow_missing_kv:
            return ()
        if missing - {PoolName.KV} and not allow_partial:
            return ()
        return tuple(resolved.values())


class PoolStores:
    """A store for each stored object of each pool of a group.

    Thread: any; nothing here changes.
    """

    def __init__(self, group: PoolGroup, stores: Iterable[tuple[DevicePool, PageStore]]) -> None:
        """Join pools and stores.

        Args:
            group: Resolves transfers to pools.
            stores: A store beside each pool that the group resolves to.

        Raises:
            ContractError: A store is of another pool, page size or layer ranges than its pool.
        """
        self._group = group
        # Pools are few and kept alive here, so their ids are theirs alone; no order comes of them.
        self._stores: dict[int, tuple[DevicePool, PageStore]] = {}
        for pool, store in stores:
            layout = store.layout
            expected = (pool.name, pool.page_size, pool.range_bytes)
            got = (
                layout.pool,
                self._page_size(layout.pool, layout.identity.page_size),
                layout.range_bytes,
            )
            if expected != got:
                msg = (
                    "StoreLinker: expected a store of (pool, page size, layer ranges) "
                    f"{expected}, got {got}"
                )
                raise ContractError(msg)
            self._stores[id(pool)] = (pool, store)

    @staticmethod
    def _page_size(pool: PoolName, page_size: int) -> int:
        """Slots of a page of a pool in an engine with this page size: a state is one slot."""
        return 1 if pool is PoolName.MAMBA else page_size

    @property
    def sources(self) -> frozenset[PoolName]:
        """Which transfers can be held."""
        return self._group.sources

    @property
    def num_layers(self) -> int:
        """Layers of the model that have anything in the pools, from layer 0 on."""
        return 1 + max(max(pool.layers) for pool, _ in self._stores.values())

    def store_of(self, pool: DevicePool) -> PageStore:
        """The store of a pool.

        Raises:
            ContractError: There is none.
        """
        found = self._stores.get(id(pool))
        if found is None:
            msg = f"StoreLinker: expected a store beside each pool, got none for one of {pool.name}"
            raise ContractError(msg)
        return found[1]

    def resolve(
        self, transfers: Sequence[PoolTransfer]
    ) -> Sequence[tuple[DevicePool, PoolTransfer]]:
        """The physical transfers of a load or an offload: any part of what there is."""
        return self._group.resolve(transfers, allow_partial=True, allow_missing_kv=True)

    def touch(self, nodes: Sequence[Sequence[PoolTransfer]]) -> list[bool]:
        """Raise the recency of the pages of nodes; each store is asked once for all of them.

        Returns:
            For each node whether all its pages are there.
        """
        asked: dict[PageStore, list[tuple[int, PageKeys]]] = {}
        for place, transfers in enumerate(nodes):
            for pool, transfer in self.resolve(transfers):
                run = (place, transfer.keys.resolve())
                asked.setdefault(self.store_of(pool), []).append(run)
        present = [True] * len(nodes)
        for store, runs in asked.items():
            keys = _joined([run for _, run in runs])
            there = store.touch(keys) if isinstance(store, Touchable) else store.contains(keys)
            for (place, _), bits in zip(runs, _parts(there, [run for _, run in runs]), strict=True):
                present[place] = present[place] and bits.complete
        return present

    def restorable(self, transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        """Which prefixes all stores together can restore, and what each pool has for it.

        Args:
            transfers: Of a lookup, the one of KV with all pages.

        Raises:
            ContractError: KV is not among them.
        """
        kv = [transfer for transfer in transfers if transfer.name is PoolName.KV]
        if not kv:
            msg = f"lookup: expected at least one transfer, of KV, got {[transfer.name for transfer in transfers]}"
            raise ContractError(msg)
        keys = kv[0].keys.resolve()
        resolved = self._group.resolve(transfers)
        lengths = PageBits.all(len(keys)) if resolved else PageBits.none(len(keys))
        found: dict[PoolName, PageBits] = {}
        for pool, transfer in resolved:
            there = self.store_of(pool).contains(keys)
            lengths &= transfer.restorable(there)
            # A page of several objects is there when all of them are.
            before = found.get(pool.name)
            found[pool.name] = there if before is None else before & there
        return PoolTransferResult(restorable_prefix_pages=lengths, found=found)


def _joined(runs: Sequence[PageKeys]) -> PageKeys:
    """Some runs as one."""
    return PageKeys(b"".join(run.data for run in runs))


def _parts(bits: PageBits, runs: Sequence[PageKeys]) -> list[PageBits]:
    """The bits of each of some runs, that were asked about as one."""
    parts: list[PageBits] = []
    at = 0
    for run in runs:
        mask = bits.mask >> at & ((1 << len(run)) - 1)
        parts.append(PageBits(mask, len(run)))
        at += len(run)
    return parts
