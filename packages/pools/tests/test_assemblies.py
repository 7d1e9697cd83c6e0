"""Each assembly in each layout: what is stored is what the tensors say, and comes back just so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import ComponentType, PageKeys, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError
from radixlink_pools import (
    Assembly,
    CpuCopier,
    DevicePoolEntry,
    DevicePoolGroup,
    LayerBuffers,
    assemble,
    assembly_of,
    components_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
POOLS = {FULL: PoolName.KV, SWA: PoolName.SWA, MAMBA: PoolName.MAMBA}
NUM_PAGES = 6
PAGES, OTHER_PAGES = [4, 0, 2], [1, 5, 3]


def anything(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaN patterns included: what comes back is compared as bytes."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).squeeze(-1)


@attrs.frozen(kw_only=True)
class Spec:
    """What one component's tensors are: for each group the shape of a row, and a dtype."""

    groups: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    layers: tuple[int, ...]


KEYS_AND_VALUES = (((2, 8), torch.bfloat16), ((2, 5), torch.bfloat16))
LATENTS = (((13,), torch.float8_e4m3fn),)
STATES = (((6, 4), torch.bfloat16), ((2, 3, 3), torch.float32))

SPECS: dict[Assembly, dict[ComponentType, Spec]] = {
    Assembly.MHA: {FULL: Spec(groups=KEYS_AND_VALUES, layers=(0, 1, 2))},
    Assembly.MLA: {FULL: Spec(groups=LATENTS, layers=(0, 1, 2))},
    Assembly.FULL_SWA: {
        FULL: Spec(groups=KEYS_AND_VALUES, layers=(2,)),
        SWA: Spec(groups=KEYS_AND_VALUES, layers=(0, 1)),
    },
    Assembly.FULL_MAMBA: {
        FULL: Spec(groups=KEYS_AND_VALUES, layers=(1,)),
        MAMBA: Spec(groups=STATES, layers=(0, 2)),
    },
    # A layer of a parallel hybrid has both a window and a state.
    Assembly.FULL_SWA_MAMBA: {
        FULL: Spec(groups=KEYS_AND_VALUES, layers=(1,)),
        SWA: Spec(groups=KEYS_AND_VALUES, layers=(0, 2)),
        MAMBA: Spec(groups=STATES, layers=(0, 1, 2)),
    },
}


def buffers_of(spec: Spec, rows: int, *, rows_are_pages: bool, page_size: int) -> LayerBuffers:
    """Tensors of random bits: rows of tokens, or of pages that hold `page_size` tokens."""
    inner = (page_size,) if rows_are_pages else ()
    groups = [
        [
            anything((rows, *inner, *shape), dtype, seed=100 * number + layer)
            for layer in range(len(spec.layers))
        ]
        for number, (shape, dtype) in enumerate(spec.groups)
    ]
    return LayerBuffers(groups=groups, layers=spec.layers, rows_are_pages=rows_are_pages)


def page_of(tensor: torch.Tensor, page: int) -> bytes:
    """A page's bytes of a tensor, by slicing it: what the parts under test must find by themselves."""
    rows_per_page = len(tensor) // NUM_PAGES
    rows = tensor[page * rows_per_page : (page + 1) * rows_per_page]
    return bytes(rows.contiguous().view(-1).view(torch.uint8).tolist())


def stored_pages(buffers: LayerBuffers, pages: list[int], *, packed: bool) -> list[list[bytes]]:
    """The objects of each page: one of all groups, or one for each."""
    parts = [
        [b"".join(page_of(tensor, page) for tensor in group) for group in buffers.groups]
        for page in pages
    ]
    return [[b"".join(groups)] for groups in parts] if packed else parts


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.tensor([page * page_size + place for page in pages for place in range(page_size)])


def transfers_of(group: DevicePoolGroup, pages: list[int]) -> list[PoolTransfer]:
    return [
        PoolTransfer(
            name=name,
            keys=PageKeys.join(bytes([page]) * 32 for page in range(len(pages))),
            device_indices=slots_of(pages, group.pool(name).page_size),
        )
        for name in sorted(group.sources)
    ]


def offload(group: DevicePoolGroup, pages: list[int]) -> dict[PoolName, list[list[bytes]]]:
    """Gather every range of every object; the objects of each page, by pool."""
    copier, stored = CpuCopier(), dict[PoolName, list[list[bytes]]]()
    for pool, transfer in group.resolve(transfers_of(group, pages)):
        rows = pool.page_rows(transfer)
        objects = [bytearray(pool.layout.page_bytes) for _ in pages]
        for piece in pool.layout.pieces:
            staging = copier.staging(len(pages) * piece.num_bytes)
            copier.gather(pool.region(piece.layer_range, rows), staging.tensor)
            for place, page in enumerate(objects):
                end = piece.offset + piece.num_bytes
                size = piece.num_bytes
                page[piece.offset : end] = staging.buffer[place * size : (place + 1) * size]
        for place, page in enumerate(objects):
            stored.setdefault(pool.name, [[] for _ in pages])[place].append(bytes(page))
    return stored


def load(
    group: DevicePoolGroup, pages: list[int], stored: dict[PoolName, list[list[bytes]]]
) -> None:
    """Scatter layer by layer, as a layer-wise load does."""
    copier = CpuCopier()
    resolved = group.resolve(transfers_of(group, pages))
    for layer in range(group.num_layers):
        for pool, transfer in resolved:
            number = group.pool(pool.name).objects.index(pool)
            for piece in pool.pieces_of(layer):
                staging = copier.staging(len(pages) * piece.num_bytes)
                end = piece.offset + piece.num_bytes
                staging.buffer[:] = b"".join(
                    objects[number][piece.offset : end] for objects in stored[pool.name]
                )
                region = pool.region(piece.layer_range, pool.page_rows(transfer))
                copier.scatter(region, staging.tensor)


def check_round_trip(
    group: DevicePoolGroup, buffers: dict[PoolName, LayerBuffers], *, packed: bool
) -> None:
    """What is stored is what the tensors say; elsewhere it is the same; nothing else changes."""
    stored = offload(group, PAGES)
    assert stored == {
        name: stored_pages(each, PAGES, packed=packed) for name, each in buffers.items()
    }
    before = {
        name: stored_pages(each, list(range(NUM_PAGES)), packed=packed)
        for name, each in buffers.items()
    }
    load(group, OTHER_PAGES, stored)
    for name, each in buffers.items():
        assert stored_pages(each, OTHER_PAGES, packed=packed) == stored[name]
        assert stored_pages(each, PAGES, packed=packed) == [before[name][page] for page in PAGES]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("rows_are_pages", [True, False], ids=["page-rows", "token-rows"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("assembly", Assembly)
def test_bytes_of_every_assembly_come_back(
    assembly: Assembly, page_size: int, *, rows_are_pages: bool, packed: bool
) -> None:
    buffers = {}
    for component, spec in SPECS[assembly].items():
        size = 1 if component is MAMBA else page_size
        buffers[component] = buffers_of(
            spec,
            NUM_PAGES if rows_are_pages else NUM_PAGES * size,
            rows_are_pages=rows_are_pages,
            page_size=size,
        )
    group = assemble(assembly, page_size=page_size, buffers=buffers, packed=packed)
    assert group.pools == {POOLS[component] for component in components_of(assembly)}
    assert group.num_layers == 3
    assert group.rank_replicated == (assembly is Assembly.MLA)
    by_pool = {POOLS[component]: each for component, each in buffers.items()}
    check_round_trip(group, by_pool, packed=packed)


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_of_an_indexer_beside_latents_come_back(*, packed: bool) -> None:
    """MLA with an indexer (DSA) whose pool starts two pages later, and a draft layer packed in."""
    page_size, shift = 2, 2
    spec = Spec(groups=(*LATENTS, ((3,), torch.bfloat16)), layers=(0, 1))
    latents = buffers_of(spec, NUM_PAGES * page_size, rows_are_pages=False, page_size=page_size)
    keys = buffers_of(
        Spec(groups=(((7,), torch.uint8),), layers=(0, 1)),
        NUM_PAGES + shift,
        rows_are_pages=True,
        page_size=page_size,
    )
    indexer = DevicePoolEntry.of_buffers(
        PoolName.INDEXER,
        keys,
        page_size,
        source=PoolName.KV,
        index_mapper=lambda indices: indices + shift * page_size,
        replicated=True,
    )
    group = assemble(
        Assembly.MLA,
        page_size=page_size,
        buffers={FULL: latents},
        sidecars=[indexer],
        packed=packed,
    )
    assert group.rank_replicated
    shifted = LayerBuffers(
        groups=[[tensor[shift:] for tensor in group] for group in keys.groups],
        rows_are_pages=True,
    )
    check_round_trip(group, {PoolName.KV: latents, PoolName.INDEXER: shifted}, packed=packed)


def test_bytes_of_pages_that_hold_all_layers_come_back() -> None:
    """Rows with gaps: an engine that keeps a page's layers together."""
    whole = anything((NUM_PAGES, 3, 2, 5), torch.bfloat16, seed=1)
    buffers = LayerBuffers(groups=[[whole[:, layer] for layer in range(3)]], rows_are_pages=True)
    group = assemble(Assembly.MHA, page_size=2, buffers={FULL: buffers})
    check_round_trip(group, {PoolName.KV: buffers}, packed=True)


@given(
    widths=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=3),
    page_size=st.integers(1, 3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32]),
    packed=st.booleans(),
    rows_are_pages=st.booleans(),
)
def test_bytes_of_any_geometry_come_back(
    widths: list[list[int]],
    page_size: int,
    dtype: torch.dtype,
    *,
    packed: bool,
    rows_are_pages: bool,
) -> None:
    rows = NUM_PAGES * (1 if rows_are_pages else page_size)
    groups = [[anything((rows, width), dtype, seed=width) for width in group] for group in widths]
    buffers = LayerBuffers(groups=groups, layers=(1, 0), rows_are_pages=rows_are_pages)
    group = assemble(Assembly.MHA, page_size=page_size, buffers={FULL: buffers}, packed=packed)
    check_round_trip(group, {PoolName.KV: buffers}, packed=packed)


def test_each_set_of_components_has_its_assembly() -> None:
    for assembly in Assembly:
        latent = assembly is Assembly.MLA
        assert assembly_of(components_of(assembly), latent=latent) is assembly
    assert assembly_of([FULL, MAMBA], latent=True) is Assembly.FULL_MAMBA


@pytest.mark.parametrize(
    ("components", "named"),
    [([], "no component"), ([SWA], "SWA"), ([MAMBA, SWA], r"SWA\+MAMBA")],
)
def test_a_model_that_has_no_assembly_is_named(components: list[ComponentType], named: str) -> None:
    """Case F8: an unsupported strategy."""
    with pytest.raises(ContractError, match=f"expected one of .*'mha'.*, got {named}$"):
        assembly_of(components)


def one_layer() -> LayerBuffers:
    return LayerBuffers(groups=[[torch.zeros(8, 3)]])


@pytest.mark.parametrize(
    ("assembly", "given_for", "message"),
    [
        (Assembly.MHA, [], r"mha: expected buffers of FULL, got nothing"),
        (Assembly.MHA, [FULL, SWA], r"mha: expected buffers of FULL, got FULL\+SWA"),
        (Assembly.FULL_SWA, [FULL], r"full\+swa: expected buffers of FULL\+SWA, got FULL"),
        (Assembly.FULL_MAMBA, [FULL, SWA], r"of FULL\+MAMBA, got FULL\+SWA"),
    ],
)
def test_buffers_that_are_not_the_assemblys_are_refused(
    assembly: Assembly, given_for: list[ComponentType], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        assemble(assembly, page_size=2, buffers={each: one_layer() for each in given_for})


def test_a_hidden_pool_is_refused() -> None:
    """Case F8: HiSparse and its like."""
    hidden = LayerBuffers(groups=[[torch.zeros(8, 3).to_sparse()]])
    with pytest.raises(ContractError, match="shows its memory, got a hidden one"):
        assemble(Assembly.MHA, page_size=2, buffers={FULL: hidden})


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (PoolName.INDEXER, PoolName.SWA),
        (PoolName.INDEXER, PoolName.INDEXER),
        (PoolName.KV, PoolName.KV),
    ],
)
def test_a_sidecar_of_what_is_not_here_is_refused(name: PoolName, source: PoolName) -> None:
    sidecar = DevicePoolEntry.of_buffers(name, one_layer(), 2, source=source)
    with pytest.raises(ContractError, match=f"sidecars of .*, got {name}, .* from {source}"):
        assemble(Assembly.MHA, page_size=2, buffers={FULL: one_layer()}, sidecars=[sidecar])


def test_a_pool_of_a_layer_that_the_model_has_not_is_refused() -> None:
    buffers = LayerBuffers(groups=[[torch.zeros(8, 3)]], layers=(4,))
    with pytest.raises(ContractError, match="expected 4 layers, got a pool of layer 4"):
        assemble(Assembly.MHA, page_size=2, buffers={FULL: buffers}, num_layers=4)


def test_states_that_tensor_parallel_ranks_share_are_replicated_alone() -> None:
    group = assemble(
        Assembly.FULL_MAMBA,
        page_size=2,
        buffers={FULL: one_layer(), MAMBA: one_layer()},
        replicated=[MAMBA],
    )
    assert (group.pool(PoolName.KV).replicated, group.pool(PoolName.MAMBA).replicated) == (
        False,
        True,
    )
