from __future__ import annotations

import pytest
import torch

from radixlink_contracts import (
    CacheIdentity,
    ComponentType,
    PageKeys,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    Shard,
)
from radixlink_contracts.errors import ContractError, IdentityError
from radixlink_pools import Assembly, DevicePoolEntry, DevicePoolGroup, LayerBuffers, assemble
from radixlink_testing import InMemoryStoreFactory

NUM_PAGES, PAGE_SIZE = 4, 2


def keys(count: int) -> PageKeys:
    return PageKeys.join(bytes([page]) * 32 for page in range(count))


def transfer(
    *slots: int,
    num_keys: int | None = None,
    name: PoolName = PoolName.KV,
    policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES,
) -> PoolTransfer:
    return PoolTransfer(
        name=name,
        keys=keys(len(slots) // PAGE_SIZE if num_keys is None else num_keys),
        device_indices=torch.tensor(slots, dtype=torch.int64),
        hit_policy=policy,
    )


def entry(name: PoolName = PoolName.KV, *, source: PoolName | None = None) -> DevicePoolEntry:
    rows = [torch.zeros(NUM_PAGES, width, dtype=torch.uint8) for width in (3, 5)]
    return DevicePoolEntry(name, rows, PAGE_SIZE, source=source)


def test_a_group_resolves_each_transfer_to_its_pool_in_order() -> None:
    kv, swa = entry(), entry(name=PoolName.SWA)
    group = DevicePoolGroup([kv, swa])
    assert group.pools == {PoolName.KV, PoolName.SWA}
    window, full = transfer(0, 1, name=PoolName.SWA), transfer(2, 3)
    assert group.resolve([window, full]) == ((swa, window), (kv, full))


def test_a_group_leaves_out_what_has_no_keys() -> None:
    group = DevicePoolGroup([entry()])
    assert group.resolve([PoolTransfer(name=PoolName.KV, keys=keys(0))]) == ()
    assert group.resolve([]) == ()


def test_a_group_refuses_two_pools_of_one_name() -> None:
    with pytest.raises(ContractError, match="two of kv"):
        DevicePoolGroup([entry(), entry()])


def test_a_group_of_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="at least one pool"):
        DevicePoolGroup([])


def test_a_group_refuses_transfers_it_cannot_tell_apart_or_place() -> None:
    group = DevicePoolGroup([entry()])
    with pytest.raises(ContractError, match="one transfer for each pool"):
        group.resolve([transfer(0, 1), transfer(2, 3)])
    with pytest.raises(ContractError, match="got mamba"):
        group.resolve([transfer(0, 1, name=PoolName.MAMBA)])


def test_a_sidecar_borrows_the_indices_of_its_source() -> None:
    """Case F3: KV and an indexer whose slots are those of KV + 100."""
    rows = [torch.zeros(60, 3, dtype=torch.uint8)]
    indexer = DevicePoolEntry(
        PoolName.INDEXER,
        rows,
        PAGE_SIZE,
        source=PoolName.KV,
        index_mapper=lambda indices: indices + 100,
    )
    kv = entry()
    group = DevicePoolGroup([kv, indexer])
    assert group.pools == {PoolName.KV, PoolName.INDEXER}
    assert group.sources == {PoolName.KV}
    full = transfer(0, 1, 4, 5, policy=PoolHitPolicy.TRAILING_PAGES)
    (first, of_kv), (second, of_indexer) = group.resolve([full])
    assert (first, second) == (kv, indexer)
    assert (of_kv.name, of_indexer.name) == (PoolName.KV, PoolName.INDEXER)
    assert of_kv.hit_policy is of_indexer.hit_policy is PoolHitPolicy.ALL_PAGES
    assert of_kv.keys is of_indexer.keys is full.keys
    assert of_kv.device_indices is full.device_indices
    assert kv.page_rows(of_kv).tolist() == [0, 2]
    assert of_indexer.device_indices is not None
    assert of_indexer.device_indices.tolist() == [100, 101, 104, 105]
    assert indexer.page_rows(of_indexer).tolist() == [50, 52]


def test_a_sidecar_does_not_take_its_sources_transfer_unresolved() -> None:
    with pytest.raises(ContractError, match="transfer of its own slots, got a transfer of kv"):
        entry(PoolName.INDEXER, source=PoolName.KV).page_rows(transfer(0, 1))


def test_a_lookup_has_no_indices_to_borrow_and_a_window_keeps_its_policy() -> None:
    trailing = PoolHitPolicy.TRAILING_PAGES
    swa = entry(PoolName.SWA)
    draft = DevicePoolEntry(
        PoolName.DRAFT,
        [torch.zeros(4, 3, dtype=torch.uint8)],
        PAGE_SIZE,
        source=PoolName.SWA,
        index_mapper=lambda indices: indices + 1,
    )
    group = DevicePoolGroup([swa, draft])
    window = PoolTransfer(name=PoolName.SWA, keys=keys(1), hit_policy=trailing)
    (_, same), (_, borrowed) = group.resolve([window])
    assert same is window
    assert (borrowed.name, borrowed.device_indices) == (PoolName.DRAFT, None)
    assert borrowed.hit_policy is trailing


WINDOW, STATE = (
    transfer(0, 1, name=PoolName.SWA),
    transfer(3, num_keys=1, name=PoolName.MAMBA),
)
FULL, NO_FULL = transfer(2, 3), PoolTransfer(name=PoolName.KV, keys=keys(0))


@pytest.mark.parametrize(
    ("transfers", "strict", "partial", "without_kv"),
    [
        ([FULL, WINDOW, STATE], 3, 3, 3),
        ([FULL, WINDOW], 0, 2, 2),
        ([FULL], 0, 1, 1),
        ([WINDOW, STATE], 0, 0, 2),
        ([NO_FULL, WINDOW, STATE], 0, 0, 2),
        ([STATE], 0, 0, 1),
        ([NO_FULL], 0, 0, 0),
        ([], 0, 0, 0),
    ],
)
def test_what_may_be_missing_depends_on_the_phase(
    transfers: list[PoolTransfer], strict: int, partial: int, without_kv: int
) -> None:
    group = DevicePoolGroup([entry(), entry(PoolName.SWA), entry(PoolName.MAMBA)])
    assert len(group.resolve(transfers)) == strict
    assert len(group.resolve(transfers, allow_partial=True)) == partial
    both = group.resolve(transfers, allow_partial=True, allow_missing_kv=True)
    assert len(both) == without_kv


def test_kv_alone_may_be_missing() -> None:
    group = DevicePoolGroup([entry(), entry(PoolName.SWA)])
    assert len(group.resolve([WINDOW], allow_missing_kv=True)) == 1
    assert group.resolve([FULL], allow_missing_kv=True) == ()


def test_a_group_without_kv_of_its_own_takes_kv_for_its_sidecars() -> None:
    """Case F6: only compressed pools, all sourced from KV."""
    group = DevicePoolGroup([entry(PoolName.INDEXER, source=PoolName.KV)])
    ((pool, physical),) = group.resolve([FULL])
    assert (pool.name, physical.name) == (PoolName.INDEXER, PoolName.INDEXER)


def test_a_sidecar_of_a_sidecar_is_refused() -> None:
    with pytest.raises(ContractError, match="draft to borrow from a component's pool, got indexer"):
        DevicePoolGroup(
            [
                entry(),
                entry(PoolName.INDEXER, source=PoolName.KV),
                entry(PoolName.DRAFT, source=PoolName.INDEXER),
            ]
        )


def test_a_group_knows_what_a_layer_waits_for() -> None:
    def rows(*widths: int) -> list[torch.Tensor]:
        return [torch.zeros(NUM_PAGES, width, dtype=torch.uint8) for width in widths]

    kv = DevicePoolEntry(PoolName.KV, rows(3, 5, 3, 5), PAGE_SIZE, layers=[0, 2, 0, 2])
    swa = DevicePoolEntry(PoolName.SWA, rows(7), PAGE_SIZE, layers=[1])
    group = DevicePoolGroup([kv, swa], num_layers=4)
    assert group.num_layers == 4
    found = {
        layer: [(pool.name, piece.layer_range) for pool, piece in group.pieces_of(layer)]
        for layer in range(4)
    }
    assert found == {
        0: [(PoolName.KV, 0), (PoolName.KV, 2)],
        1: [(PoolName.SWA, 0)],
        2: [(PoolName.KV, 1), (PoolName.KV, 3)],
        3: [],
    }
    assert DevicePoolGroup([kv, swa]).num_layers == 3
    with pytest.raises(ContractError, match="expected 2 layers, got a pool of layer 2"):
        DevicePoolGroup([kv, swa], num_layers=2)
    with pytest.raises(ContractError, match=r"a layer in 0\.\.3, got 4"):
        group.pieces_of(4)


IDENTITY = CacheIdentity(
    model="m", revision="r", dtype="int8", page_size=2, num_layers=2, layout="k|v"
)


def test_replicated_pools_are_one_shard_for_all_ranks() -> None:
    def group(*, mamba_replicated: bool) -> DevicePoolGroup:
        rows = [torch.zeros(NUM_PAGES, 3, dtype=torch.uint8)]
        states = DevicePoolEntry(PoolName.MAMBA, rows, 1, replicated=mamba_replicated)
        return DevicePoolGroup([DevicePoolEntry(PoolName.KV, rows, 2, replicated=True), states])

    assert group(mamba_replicated=True).rank_replicated
    mixed = group(mamba_replicated=False)
    assert not mixed.rank_replicated
    shards = [layout.shard for _, layout in mixed.layouts(IDENTITY, rank=1, num_ranks=2)]
    assert shards == [Shard(), Shard(index=1, count=2)]
    with pytest.raises(ContractError, match=r"an index in 0\.\.1, got 2"):
        mixed.layouts(IDENTITY, rank=2, num_ranks=2)


def test_the_layouts_of_a_page_are_told_apart() -> None:
    """Keys and values of equal size: taken for each other they would be a wrong hit."""

    def layouts(*, packed: bool) -> list[tuple[tuple[int, ...], bytes]]:
        layers = [torch.zeros(8, 3, dtype=torch.int8) for _ in range(2)]
        buffers = LayerBuffers(groups=(layers, layers))
        kv = DevicePoolEntry.of_buffers(PoolName.KV, buffers, PAGE_SIZE, packed=packed)
        found = DevicePoolGroup([kv]).layouts(IDENTITY)
        assert all(pool.range_bytes == layout.range_bytes for pool, layout in found)
        return [(layout.range_bytes, layout.fingerprint) for _, layout in found]

    packed, unpacked = layouts(packed=True), layouts(packed=False)
    assert [sizes for sizes, _ in packed] == [(6, 6, 6, 6)]
    assert [sizes for sizes, _ in unpacked] == [(6, 6), (6, 6)]
    assert len({fingerprint for _, fingerprint in packed + unpacked}) == 3


def test_each_object_of_an_unpacked_page_needs_a_place_of_its_own() -> None:
    buffers = LayerBuffers(groups=[[torch.zeros(8, 3, dtype=torch.int8)] for _ in range(2)])
    group = assemble(Assembly.MHA, page_size=2, buffers={ComponentType.FULL: buffers}, packed=False)
    layouts = group.layouts(IDENTITY)
    together = InMemoryStoreFactory()
    together.open(layouts[0][1])
    with pytest.raises(IdentityError):
        together.open(layouts[1][1])
    factories = [InMemoryStoreFactory() for _ in layouts]
    stores = [
        (pool, one.open(layout)) for one, (pool, layout) in zip(factories, layouts, strict=True)
    ]
    assert [pool.range_bytes for pool, _ in stores] == [
        store.layout.range_bytes for _, store in stores
    ]


def test_an_unpacked_pool_resolves_to_each_of_its_objects() -> None:
    buffers = LayerBuffers(groups=[[torch.zeros(8, 3, dtype=torch.int8)] for _ in range(2)])
    kv = DevicePoolEntry.of_buffers(PoolName.KV, buffers, PAGE_SIZE, packed=False)
    resolved = DevicePoolGroup([kv]).resolve([FULL])
    assert [pool for pool, _ in resolved] == list(kv.objects)
    assert len(kv.objects) == 2
    assert all(physical is FULL for _, physical in resolved)
