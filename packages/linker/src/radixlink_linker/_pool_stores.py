"""`PoolStores`: which store holds the pages of which physical pool, and what both say of a transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import (
    PAGE_KEY_BYTES,
    PageBits,
    PageKeys,
    PoolGroup,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    Touchable,
)
from radixlink_contracts.errors import ContractError
from radixlink_linker._answers import answer_of
from radixlink_linker._runtime import give_way
from radixlink_linker._transfers import transfer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from radixlink_contracts import DevicePool, PageStore


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
            ContractError: A store is of another pool, page size or layer ranges than its pool, a
                pool has none, or there is no pool.
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
        one_page = PageKeys(bytes(PAGE_KEY_BYTES))
        every = [PoolTransfer(name=source, keys=one_page) for source in sorted(group.sources)]
        for pool, _ in self.resolve(every):
            self.store_of(pool)
        if not self._stores:
            msg = "StoreLinker: expected at least one pool and its store, got none"
            raise ContractError(msg)

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
        places: list[int] = []
        questions: list[tuple[PageStore, PageKeys]] = []
        for place, transfers in enumerate(nodes):
            for pool, transfer in self.resolve(transfers):
                places.append(place)
                questions.append((self.store_of(pool), transfer.keys.resolve(give_way)))
        present = [True] * len(nodes)
        for place, bits in zip(places, _ask_together("touch", questions, _touch), strict=True):
            present[place] = present[place] and bits.complete
        return present

    def restorable(self, lookups: Sequence[Sequence[PoolTransfer]]) -> list[PoolTransferResult]:
        """Which prefixes all stores together can restore, and what each pool has for them.

        Each store is asked once for all lookups, of each pool only about pages that the device lacks.

        Args:
            lookups: The transfers of each, the one of KV with all pages.

        Raises:
            ContractError: KV is not among the transfers of one, or a store answers for other pages.
        """
        keys_of = [_kv_keys(transfers) for transfers in lookups]
        resolved_of = [self._group.resolve(transfers) for transfers in lookups]
        answers = iter(
            _ask_together(
                "contains",
                [
                    (self.store_of(pool), _lacking(keys, transfer.held))
                    for keys, resolved in zip(keys_of, resolved_of, strict=True)
                    for pool, transfer in resolved
                ],
                _contains,
            )
        )
        results: list[PoolTransferResult] = []
        for keys, resolved in zip(keys_of, resolved_of, strict=True):
            lengths = PageBits.all(len(keys)) if resolved else PageBits.none(len(keys))
            found: dict[PoolName, PageBits] = {}
            for pool, transfer in resolved:
                there = _spread(next(answers), transfer.held)
                lengths &= transfer.restorable(there)
                # A page of several objects is there when all of them are.
                before = found.get(pool.name)
                found[pool.name] = there if before is None else before & there
            results.append(PoolTransferResult(restorable_prefix_pages=lengths, found=found))
        return results


def _kv_keys(transfers: Sequence[PoolTransfer]) -> PageKeys:
    """The keys of all pages of a lookup.

    Raises:
        ContractError: KV is not among its transfers.
    """
    transfer = transfer_of(transfers, PoolName.KV)
    if transfer is not None:
        return transfer.keys.resolve(give_way)
    msg = f"lookup: expected at least one transfer, of KV, got {[transfer.name for transfer in transfers]}"
    raise ContractError(msg)


def _lacking(keys: PageKeys, held: PageBits | None) -> PageKeys:
    """The keys of those pages that the device lacks."""
    if held is None:
        return keys
    return PageKeys(b"".join([keys.span(start, stop).data for start, stop in (~held).runs()]))


def _spread(answer: PageBits, held: PageBits | None) -> PageBits:
    """An answer about the pages that the device lacks, as one about all pages."""
    if held is None:
        return answer
    mask, left = 0, answer.mask
    for start, stop in (~held).runs():
        mask |= (left & ((1 << (stop - start)) - 1)) << start
        left >>= stop - start
    return PageBits(mask, held.count)


def _contains(store: PageStore, keys: PageKeys) -> PageBits:
    return store.contains(keys)


def _touch(store: PageStore, keys: PageKeys) -> PageBits:
    return store.touch(keys) if isinstance(store, Touchable) else store.contains(keys)


def _ask_together(
    call: str,
    questions: Sequence[tuple[PageStore, PageKeys]],
    ask: Callable[[PageStore, PageKeys], PageBits],
) -> list[PageBits]:
    """The answer to each question, for which each store is asked once.

    Raises:
        ContractError: A store answers for other pages than it was asked about.
    """
    # By place, since stores need not be hashable; no order comes of the ids.
    places_of: dict[int, list[int]] = {}
    for place, (store, _) in enumerate(questions):
        places_of.setdefault(id(store), []).append(place)
    answers = [PageBits.none(0)] * len(questions)
    for places in places_of.values():
        store = questions[places[0]][0]
        keys = PageKeys(b"".join([questions[place][1].data for place in places]))
        if not len(keys):
            continue
        mask = answer_of(store, call, ask(store, keys), len(keys)).mask
        for place in places:
            count = len(questions[place][1])
            answers[place] = PageBits(mask & ((1 << count) - 1), count)
            mask >>= count
    return answers
