"""Pools in groups, as an engine has them: sidecars, objects that are not packed, windows, states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from typing_extensions import override

from radixlink_contracts import (
    CacheIdentity,
    ComponentType,
    LoadMode,
    OperationId,
    OperationTicket,
    Outcome,
    PageBits,
    PageKeys,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    RequestId,
)
from radixlink_contracts.errors import ContractError
from radixlink_linker import StoreLinker, StoreLinkerSettings
from radixlink_linker._pool_stores import OnePoolEach, PoolStores
from radixlink_pools import (
    Assembly,
    CpuCopier,
    DevicePoolEntry,
    DevicePoolGroup,
    LayerBuffers,
    assemble,
)
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import FaultyPageStore
from radixlink_testing.pages import page_keys, range_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import DevicePool, PageStore

PAGE_SIZE = 4
NUM_PAGES = 12
IDENTITY = CacheIdentity(
    model="test", revision="1", dtype="uint8", page_size=PAGE_SIZE, num_layers=4, layout="bytes"
)
#: An indexer that has its pages in the reverse order.
LAST_SLOT = NUM_PAGES * PAGE_SIZE - 1


def tensors(rows: int, width: int, layers: tuple[int, ...], num_groups: int = 2) -> LayerBuffers:
    """Groups of byte tensors, a row a slot."""
    return LayerBuffers(
        groups=[
            [
                torch.zeros(rows, width + 2 * place, dtype=torch.uint8)
                for place in range(len(layers))
            ]
            for _ in range(num_groups)
        ],
        layers=layers,
    )


def hybrid(*, packed: bool) -> DevicePoolGroup:
    """Full attention with an indexer beside, windows and states."""
    tokens = NUM_PAGES * PAGE_SIZE
    indexer = DevicePoolEntry.of_buffers(
        PoolName.INDEXER,
        tensors(tokens, 3, (0, 2), num_groups=1),
        PAGE_SIZE,
        source=PoolName.KV,
        index_mapper=lambda slots: LAST_SLOT - slots.view(-1, PAGE_SIZE).flip(1).reshape(-1),
    )
    return assemble(
        Assembly.FULL_SWA_MAMBA,
        page_size=PAGE_SIZE,
        buffers={
            ComponentType.FULL: tensors(tokens, 2, (0, 2)),
            ComponentType.SWA: tensors(tokens, 5, (1,)),
            # A slot is a state, so as many slots as there are pages.
            ComponentType.MAMBA: tensors(NUM_PAGES, 40, (3,)),
        },
        sidecars=[indexer],
        packed=packed,
    )


@attrs.define(eq=False)
class Ticket(OperationTicket):
    """An operation that nobody gives up."""

    op: OperationId
    decided: bool = False


class World:
    """A linker over a group, with a store for each object."""

    def __init__(self, *, packed: bool = True, **settings: float) -> None:
        self.group = hybrid(packed=packed)
        self.stores = [
            (pool, FaultyPageStore(InMemoryStoreFactory().open(layout)))
            for pool, layout in self.group.layouts(IDENTITY)
        ]
        self.linker = StoreLinker(
            pools=self.group,
            stores=self.stores,
            copier=CpuCopier(),
            settings=StoreLinkerSettings(**settings),  # type: ignore[arg-type]
        )
        self.num_operations = 0

    def of(self, name: PoolName) -> list[tuple[DevicePoolEntry, FaultyPageStore]]:
        """The objects of one pool, each with its store."""
        return [(pool, store) for pool, store in self.stores if pool.name is name]

    def transfers(self, at: int, first: int, last: int) -> dict[PoolName, PoolTransfer]:
        """Pages first..last-1 at pages `at` and following; two of them windows, the last a state.

        Windows and states have slots that are not those of their pages.
        """
        keys = page_keys(range(first, last))
        window = max(first, last - 2) - first
        return {
            PoolName.KV: self._transfer(PoolName.KV, keys, range(at, at + len(keys))),
            PoolName.SWA: self._transfer(
                PoolName.SWA,
                keys.span(window, len(keys)),
                range(at + 1, at + 1 + len(keys) - window),
            ),
            PoolName.MAMBA: PoolTransfer(
                name=PoolName.MAMBA,
                keys=keys.span(len(keys) - 1, len(keys)),
                device_indices=torch.tensor([at + 2]),
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        }

    def _transfer(self, name: PoolName, keys: PageKeys, pages: range) -> PoolTransfer:
        slots = [page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)]
        kv = name is PoolName.KV
        return PoolTransfer(
            name=name,
            keys=keys,
            device_indices=torch.tensor(slots),
            hit_policy=PoolHitPolicy.ALL_PAGES if kv else PoolHitPolicy.TRAILING_PAGES,
        )

    def fill(self, *transfers: PoolTransfer) -> None:
        """The device has what these name, the bytes a function of pool, object and key."""
        for place, pool, physical in self._physical(transfers):
            for layer_range, size in enumerate(pool.range_bytes):
                region = pool.region(layer_range, pool.page_rows(physical))
                for row, key in zip(region.index.tolist(), physical.keys.resolve(), strict=True):
                    region.rows[row] = torch.tensor(list(_bytes(place, key, layer_range, size)))

    def check(self, *transfers: PoolTransfer) -> None:
        """It has."""
        for place, pool, physical in self._physical(transfers):
            for layer_range, size in enumerate(pool.range_bytes):
                region = pool.region(layer_range, pool.page_rows(physical))
                for row, key in zip(region.index.tolist(), physical.keys.resolve(), strict=True):
                    expected = list(_bytes(place, key, layer_range, size))
                    assert region.rows[row].tolist() == expected, (pool.name, layer_range)

    def wipe(self) -> None:
        for pool, _ in self.stores:
            for layer_range in range(len(pool.range_bytes)):
                pool.region(layer_range, torch.tensor([0])).rows.zero_()

    def _physical(
        self, transfers: tuple[PoolTransfer, ...]
    ) -> Iterator[tuple[str, DevicePool, PoolTransfer]]:
        """Each physical transfer, with a name for the object that takes it."""
        objects = [pool for pool, _ in self.stores]
        for pool, physical in self.group.resolve(
            transfers, allow_partial=True, allow_missing_kv=True
        ):
            yield f"{pool.name} {objects.index(pool)}", pool, physical

    def offload(self, *transfers: PoolTransfer) -> Outcome:
        assert self.linker.offload(self._ticket(), transfers)
        self.idle()
        return self.linker.pop_completed_offload().outcome

    def load(self, *transfers: PoolTransfer) -> Outcome:
        assert self.linker.load(self._ticket(), transfers, LoadMode.STAGED)
        self.linker.start_layer_wise_loading()
        self.idle()
        return self.linker.pop_completed_load().outcome

    def _ticket(self) -> Ticket:
        self.num_operations += 1
        return Ticket(OperationId(self.num_operations))

    def idle(self) -> None:
        linker = self.linker
        with linker._board._changed:
            assert linker._board._changed.wait_for(
                lambda: (
                    not linker._board._running
                    and not linker._board._loads
                    and not linker._board._offloads
                ),
                10,
            )

    def lookup(self, num_pages: int, *, window: int = 2) -> list[int]:
        """Which lengths of the only series the stores can restore."""
        transfers = self.asked(num_pages, window=window)
        found = self.linker.lookup(RequestId("a"), transfers).restorable_prefix_pages
        assert found.count == num_pages
        return [bit + 1 for bit in found]

    def asked(self, num_pages: int, *, window: int = 2) -> tuple[PoolTransfer, ...]:
        """What a lookup of so many pages of the only series asks for."""
        keys = page_keys(range(num_pages))
        window = min(window, num_pages)
        return (
            PoolTransfer(name=PoolName.KV, keys=keys),
            PoolTransfer(
                name=PoolName.SWA,
                keys=keys.span(num_pages - window, num_pages),
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
            PoolTransfer(
                name=PoolName.MAMBA,
                keys=keys.span(num_pages - 1, num_pages),
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        )


def _bytes(place: str, key: bytes, layer_range: int, size: int) -> bytes:
    return range_bytes(key, layer_range, size, variant=place)


@pytest.fixture(params=[True, False], ids=["packed", "unpacked"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(packed=request.param)
    yield made
    made.linker.close()


# -- what moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("packed", [True, False])
def test_every_object_goes_out_and_comes_back(staging_bytes: int, *, packed: bool) -> None:
    """Also where a page, or a state, is more than the staging memory."""
    world = World(packed=packed, staging_bytes=staging_bytes)
    try:
        assert len(world.stores) == (4 if packed else 7)
        stored = tuple(world.transfers(0, 0, 5).values())
        world.fill(*stored)
        assert world.offload(*stored) is Outcome.LANDED
        world.wipe()
        loaded = tuple(world.transfers(6, 0, 5).values())
        assert world.load(*loaded) is Outcome.LANDED
        world.check(*loaded)
    finally:
        world.linker.close()


def test_a_window_or_a_state_is_stored_and_loaded_alone(world: World) -> None:
    stored = world.transfers(0, 0, 5)
    world.fill(*stored.values())
    for name in (PoolName.MAMBA, PoolName.SWA, PoolName.KV):
        assert world.lookup(5) == []
        assert world.offload(stored[name]) is Outcome.LANDED
    assert world.lookup(5) == [5]
    world.wipe()
    loaded = world.transfers(6, 0, 5)
    for name in (PoolName.SWA, PoolName.MAMBA):
        assert world.load(loaded[name]) is Outcome.LANDED
        world.check(loaded[name])
    kv = loaded[PoolName.KV]
    with pytest.raises(AssertionError):
        world.check(kv)
    assert world.load(kv) is Outcome.LANDED
    world.check(kv)


def test_a_sidecar_follows_its_source(world: World) -> None:
    (indexer, store), *_ = world.of(PoolName.INDEXER)
    stored = world.transfers(0, 0, 3)
    world.fill(*stored.values())
    assert world.offload(stored[PoolName.SWA]) is Outcome.LANDED
    assert store.calls == []
    assert world.offload(stored[PoolName.KV]) is Outcome.LANDED
    assert store.contains(page_keys(range(3))).complete
    # Its slots are its own: the first page is its last.
    assert [
        indexer.page_rows(physical).tolist()
        for pool, physical in world.group.resolve(stored.values())
        if pool is indexer
    ] == [[11, 10, 9]]


def test_full_pages_are_put_last(world: World) -> None:
    order: list[PoolName] = []
    for pool, store in world.stores:
        store.calls = _Noted(pool.name, order)
    stored = world.transfers(0, 0, 3)
    assert world.offload(*stored.values()) is Outcome.LANDED
    states, windows = PoolName.MAMBA, PoolName.SWA
    expected = [states, windows, PoolName.INDEXER, PoolName.KV]
    assert list(dict.fromkeys(order)) == expected
    assert len(order) == len(world.stores)


def test_several_lookups_are_one_question_to_each_object(world: World) -> None:
    stored = world.transfers(0, 0, 5)
    world.fill(*stored.values())
    assert world.offload(*stored.values()) is Outcome.LANDED
    _, store = world.of(PoolName.KV)[-1]
    store.lost.add(page_keys([3])[0])
    lengths = (5, 2, 1, 4)
    alone = [world.linker.lookup(RequestId("a"), world.asked(length)) for length in lengths]
    for _, store in world.stores:
        store.calls.clear()
    together = world.linker.lookup_batch(
        [(RequestId(f"r{length}"), world.asked(length)) for length in lengths]
    )
    assert list(together) == alone
    assert [result.found for result in together] == [result.found for result in alone]
    assert all(store.calls == ["contains"] for _, store in world.stores)
    assert world.linker.lookup_batch([]) == []


def test_a_touch_of_several_nodes_is_one_question_to_each_object(world: World) -> None:
    stored = world.transfers(0, 0, 5)
    world.fill(*stored.values())
    assert world.offload(*stored.values()) is Outcome.LANDED
    stores = PoolStores(world.group, world.stores)
    kv = PoolTransfer(name=PoolName.KV, keys=page_keys(range(2)))
    tail = PoolTransfer(name=PoolName.KV, keys=page_keys(range(2, 5)))
    window = PoolTransfer(name=PoolName.SWA, keys=page_keys([3, 4]))
    state = PoolTransfer(name=PoolName.MAMBA, keys=page_keys([4]))
    for _, store in world.stores:
        store.calls.clear()
    assert stores.touch([(kv,), (tail, window, state)]) == [True, True]
    assert all(store.calls == ["contains"] for _, store in world.stores)
    # One object of one page is enough.
    for name, expected in (
        (PoolName.KV, [True, False]),
        (PoolName.SWA, [True, False]),
        (PoolName.MAMBA, [True, False]),
    ):
        _, store = world.of(name)[-1]
        store.lost.add(page_keys([4])[0])
        assert stores.touch([(kv,), (tail, window, state)]) == expected
        store.lost.clear()
    assert stores.touch([]) == []


class _Noted(list[str]):
    """Calls of one store, noted as its pool in a list of all."""

    def __init__(self, name: PoolName, order: list[PoolName]) -> None:
        super().__init__()
        self._name = name
        self._order = order

    @override
    def append(self, call: str) -> None:
        self._order.append(self._name)


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PoolName.KV, PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER])
def test_what_one_object_lacks_fails_the_whole_load(world: World, name: PoolName) -> None:
    stored = tuple(world.transfers(0, 0, 5).values())
    world.fill(*stored)
    assert world.offload(*stored) is Outcome.LANDED
    world.of(name)[-1][1].lost.update(page_keys([4]))
    assert world.load(*world.transfers(6, 0, 5).values()) is Outcome.FAILED
    assert "1 of" in world.linker.counters.last_error


@pytest.mark.parametrize("name", [PoolName.KV, PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER])
def test_what_finds_no_room_fails_the_whole_offload(world: World, name: PoolName) -> None:
    stored = tuple(world.transfers(0, 0, 5).values())
    world.fill(*stored)
    world.of(name)[0][1].unwelcome.update(page_keys([4]))
    assert world.offload(*stored) is Outcome.FAILED
    assert world.lookup(5) == []


# -- lookup ----------------------------------------------------------------------------------------


def test_a_lookup_is_what_all_objects_let_be_restored(world: World) -> None:
    """Five pages, states behind the third and fifth, windows of all."""
    keys = page_keys(range(5))
    for pool, store in world.stores:
        there = keys if pool.name is not PoolName.MAMBA else page_keys([2, 4])
        _have(store, there)
    assert world.lookup(5) == [3, 5]
    assert world.lookup(4) == [3]
    assert world.lookup(2) == []
    # The page of a window at which it would have to look back.
    windows = world.of(PoolName.SWA)[-1][1]
    windows.lost.update(page_keys([3]))
    assert world.lookup(5) == [3]
    assert world.lookup(5, window=1) == [3, 5]
    # A sidecar gates as its source does.
    world.of(PoolName.INDEXER)[0][1].lost.update(page_keys([1]))
    assert world.lookup(5) == []


def test_a_store_is_asked_for_what_the_device_lacks_and_each_answer_is_of_its_page(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has pages 0, 1 and 3 of six; of the others the store lacks page 4."""
    keys, held = page_keys(range(6)), PageBits.of([0, 1, 3], 6)
    asked: list[PageKeys] = []
    for pool, store in world.stores:
        if pool.name is PoolName.KV:
            _have(store, page_keys([2, 5]))
            contains = store.contains

            def noted(
                some: PageKeys, contains: Callable[[PageKeys], PageBits] = contains
            ) -> PageBits:
                asked.append(some)
                return contains(some)

            monkeypatch.setattr(store, "contains", noted)
        else:
            _have(store, keys)
    _, *others = world.asked(6)
    kv = PoolTransfer(name=PoolName.KV, keys=keys, held=held)
    result = world.linker.lookup(RequestId("a"), (kv, *others))
    assert asked
    assert all(some.data == page_keys([2, 4, 5]).data for some in asked)
    assert result.found[PoolName.KV] == PageBits.of([2, 5], 6)
    # Of four pages each is here or there; the fifth is nowhere.
    assert result.restorable_prefix_pages == PageBits.of(range(4), 6)


def test_a_lookup_without_a_pool_of_the_group_restores_nothing(world: World) -> None:
    for _, store in world.stores:
        _have(store, page_keys(range(3)))
    kv = PoolTransfer(name=PoolName.KV, keys=page_keys(range(3)))
    found = world.linker.lookup(RequestId("a"), (kv,)).restorable_prefix_pages
    assert found == PageBits.none(3)


def _have(store: FaultyPageStore, keys: PageKeys) -> None:
    """The store has these pages, whatever is in them."""
    store.put(keys, [bytes(len(keys) * size) for size in store.layout.range_bytes])


# -- what fits together ----------------------------------------------------------------------------


def test_every_pool_has_a_store_of_its_own_layout() -> None:
    group = hybrid(packed=True)
    stores: list[tuple[DevicePool, PageStore]] = [
        (pool, InMemoryStoreFactory().open(layout)) for pool, layout in group.layouts(IDENTITY)
    ]
    assert PoolStores(group, stores).sources == {PoolName.KV, PoolName.SWA, PoolName.MAMBA}
    with pytest.raises(ContractError, match="none for one of indexer"):
        PoolStores(group, stores[:-1])
    (kv, kv_store), *_ = stores
    states = stores[2][0]
    with pytest.raises(ContractError, match="expected a store of"):
        PoolStores(group, [(states, kv_store)])
    with pytest.raises(ContractError, match="expected a store of"):
        PoolStores(group, [(kv, stores[1][1])])


def test_a_state_is_one_slot_whatever_the_page_size() -> None:
    pools = dict(hybrid(packed=True).layouts(IDENTITY))
    sizes = {
        pool.name: (pool.page_size, layout.identity.page_size) for pool, layout in pools.items()
    }
    assert sizes == {
        PoolName.KV: (4, 4),
        PoolName.SWA: (4, 4),
        PoolName.MAMBA: (1, 4),
        PoolName.INDEXER: (4, 4),
    }


def test_a_linker_without_a_pool_is_refused() -> None:
    with pytest.raises(ContractError, match="at least one pool and its store, got none"):
        StoreLinker(pools={}, stores={}, copier=CpuCopier())


def test_a_linker_of_a_group_has_a_store_for_each_pool() -> None:
    group = hybrid(packed=False)
    stores = [
        (pool, InMemoryStoreFactory().open(layout)) for pool, layout in group.layouts(IDENTITY)
    ]
    StoreLinker(pools=group, stores=stores, copier=CpuCopier()).close()
    for absent, (pool, _) in enumerate(stores):
        some = stores[:absent] + stores[absent + 1 :]
        with pytest.raises(ContractError, match=f"none for one of {pool.name}"):
            StoreLinker(pools=group, stores=some, copier=CpuCopier())


def test_groups_and_names_do_not_mix() -> None:
    group = hybrid(packed=True)
    with pytest.raises(ContractError, match="got a mix"):
        StoreLinker(pools=group, stores={}, copier=CpuCopier())


def test_one_pool_each_resolves_as_a_group_does() -> None:
    """For pools without sidecars and with one object a page, both say the same."""
    entries = [
        DevicePoolEntry(name, [torch.zeros(8, 3, dtype=torch.uint8)], size)
        for name, size in ((PoolName.KV, 4), (PoolName.SWA, 4), (PoolName.MAMBA, 1))
    ]
    each, group = OnePoolEach({entry.name: entry for entry in entries}), DevicePoolGroup(entries)
    assert each.sources == group.sources
    every = list(World().transfers(0, 0, 2).values())
    for transfers in ([], every[:1], every[1:], every[:2], every[2:], every):
        for flags in (
            {},
            {"allow_partial": True},
            {"allow_partial": True, "allow_missing_kv": True},
        ):
            assert list(each.resolve(transfers, **flags)) == list(group.resolve(transfers, **flags))
    twice = [every[0], attrs.evolve(every[0])]
    for wrong in (twice, [attrs.evolve(every[0], name=PoolName.DRAFT)]):
        for pools in (each, group):
            with pytest.raises(ContractError):
                pools.resolve(wrong, allow_partial=True, allow_missing_kv=True)
