"""`DevicePoolGroup`: from the transfers of components to the pools that hold their bytes.

A component speaks of KV, of windows, of states. Physically each of these may be several pools: a
sidecar (an indexer's keys, a draft model's KV) holds more for the same pages and borrows the
transfer of its `source`. A group fans a transfer out to all pools that take it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from typing_extensions import override

from radixlink_contracts import PoolGroup, PoolHitPolicy, PoolLayout, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from radixlink_contracts import CacheIdentity
    from radixlink_pools._device_pool import DevicePoolEntry
    from radixlink_pools._page_layout import Piece


class DevicePoolGroup(PoolGroup):
    """The physical pools of one rank, by name.

    Thread: any; nothing here changes after construction.
    """

    def __init__(self, entries: Iterable[DevicePoolEntry], num_layers: int | None = None) -> None:
        """Take the pools.

        Args:
            entries: The pools, in the order in which transfers are fanned out.
            num_layers: Layers of the model. None: as many as the pools know of.

        Raises:
            ContractError: Two have the same name, or there is none, or one borrows from a sidecar,
                or has a layer that the model has not.
        """
        by_name: dict[PoolName, DevicePoolEntry] = {}
        for entry in entries:
            if by_name.setdefault(entry.name, entry) is not entry:
                msg = f"DevicePoolGroup: expected one pool of each name, got two of {entry.name}"
                raise ContractError(msg)
        if not by_name:
            msg = "DevicePoolGroup: expected at least one pool, got none"
            raise ContractError(msg)
        by_source: dict[PoolName, list[DevicePoolEntry]] = {}
        for entry in by_name.values():
            source = by_name.get(entry.source, entry)
            if source.source is not entry.source:
                msg = (
                    f"DevicePoolGroup: expected {entry.name} to borrow from a component's pool, "
                    f"got {entry.source}, which borrows from {source.source}"
                )
                raise ContractError(msg)
            by_source.setdefault(entry.source, []).append(entry)
        known = 1 + max(max(entry.layout.layers) for entry in by_name.values())
        if num_layers is not None and known > num_layers:
            msg = f"DevicePoolGroup: expected {num_layers} layers, got a pool of layer {known - 1}"
            raise ContractError(msg)
        self._by_name: Final[Mapping[PoolName, DevicePoolEntry]] = by_name
        self._by_source: Final[Mapping[PoolName, list[DevicePoolEntry]]] = by_source
        self._num_layers: Final = known if num_layers is None else num_layers

    @property
    def pools(self) -> frozenset[PoolName]:
        """Which pools there are."""
        return frozenset(self._by_name)

    @property
    @override
    def sources(self) -> frozenset[PoolName]:
        """Which transfers the pools take."""
        return frozenset(self._by_source)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._num_layers

    @property
    def rank_replicated(self) -> bool:
        """True when every rank holds the same bytes in every pool, so that one stores for all."""
        return all(entry.replicated for entry in self._by_name.values())

    def pool(self, name: PoolName) -> DevicePoolEntry:
        """The pool of a name.

        Raises:
            ContractError: There is none.
        """
        try:
            return self._by_name[name]
        except KeyError as exc:
            msg = f"DevicePoolGroup: expected one of {sorted(self._by_name)}, got {name}"
            raise ContractError(msg) from exc

    def pieces_of(self, layer: int) -> tuple[tuple[DevicePoolEntry, Piece], ...]:
        """What must have landed, in which pool, before a layer may run.

        Raises:
            ContractError: The model has no such layer.
        """
        if not 0 <= layer < self._num_layers:
            msg = f"DevicePoolGroup: expected a layer in 0..{self._num_layers - 1}, got {layer}"
            raise ContractError(msg)
        return tuple(
            (entry, piece) for entry in self._by_name.values() for piece in entry.pieces_of(layer)
        )

    def layouts(
        self, identity: CacheIdentity, *, rank: int = 0, num_ranks: int = 1
    ) -> tuple[tuple[DevicePoolEntry, PoolLayout], ...]:
        """A store's layout beside each pool it stores for: one for each stored object.

        The identity of an object that is one of several says which it is, so that keys and values
        of equal size are never taken for each other. A place of stores holds one identity for each
        pool and shard, and refuses the second object of a page: where a pool is unpacked, open each
        of these layouts with a factory for a place of its own.

        Args:
            identity: What the engine's pages mean.
            rank: Which shard this rank holds, where pools are sharded.
            num_ranks: Shards there are.

        Raises:
            ContractError: There is no such rank.
        """
        found: list[tuple[DevicePoolEntry, PoolLayout]] = []
        for entry in self._by_name.values():
            for place, stored in enumerate(entry.objects):
                part = f";part={place}/{len(entry.objects)}" if len(entry.objects) > 1 else ""
                layout = PoolLayout(
                    identity=attrs.evolve(identity, layout=identity.layout + part),
                    pool=entry.name,
                    shard=entry.shard(rank, num_ranks),
                    range_bytes=stored.range_bytes,
                )
                found.append((stored, layout))
        return tuple(found)

    @override
    def resolve(
        self,
        transfers: Iterable[PoolTransfer],
        *,
        allow_partial: bool = False,
        allow_missing_kv: bool = False,
    ) -> tuple[tuple[DevicePoolEntry, PoolTransfer], ...]:
        """The physical transfers: one for each pool that takes one of these, beside the pool.

        A lookup takes neither flag, since a prefix that lacks one pool cannot be restored. A load
        and an offload take both: what is still to be fetched or stored may be any part, like a
        state that came to a node whose KV is stored.

        Args:
            transfers: At most one for each source; those without keys are left out.
            allow_partial: Sources may be missing.
            allow_missing_kv: KV may be missing too.

        Returns:
            In the order of the transfers, and then of the pools. The policy of what borrows from KV
            is ALL_PAGES. Empty where a source is missing that may not be.

        Raises:
            ContractError: No pool takes a transfer, or two are of one source.
        """
        present: dict[PoolName, PoolTransfer] = {}
        for transfer in transfers:
            if not len(transfer.keys):
                continue
            if transfer.name not in self._by_source:
                msg = (
                    f"DevicePoolGroup: expected one of {sorted(self.sources)}, got {transfer.name}"
                )
                raise ContractError(msg)
            if present.setdefault(transfer.name, transfer) is not transfer:
                msg = (
                    "DevicePoolGroup: expected one transfer for each pool, "
                    f"got two of {transfer.name}"
                )
                raise ContractError(msg)
        missing = self.sources.difference(present)
        if PoolName.KV in missing and not allow_missing_kv:
            return ()
        if missing.difference({PoolName.KV}) and not allow_partial:
            return ()
        return tuple(
            (stored, physical)
            for transfer in present.values()
            for entry in self._by_source[transfer.name]
            for physical in (_physical(entry, transfer),)
            for stored in entry.objects
        )


def _physical(entry: DevicePoolEntry, transfer: PoolTransfer) -> PoolTransfer:
    """A pool's own form of a transfer that it takes: the same one where it is that already."""
    indices = transfer.device_indices
    own = None if indices is None else entry.own_indices(indices)
    of_kv = transfer.name is PoolName.KV
    policy = PoolHitPolicy.ALL_PAGES if of_kv else transfer.hit_policy
    if own is indices and entry.name is transfer.name and policy is transfer.hit_policy:
        return transfer
    return attrs.evolve(transfer, name=entry.name, device_indices=own, hit_policy=policy)
