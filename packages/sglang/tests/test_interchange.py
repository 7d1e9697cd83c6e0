"""SGLang and radixlink's own controller on one store: the same keys, and the same bytes."""

from __future__ import annotations

import time
from array import array
from contextlib import closing
from typing import TYPE_CHECKING, Final, Self

import attrs
import pytest
import torch
from packages.sglang.tests.sglang_engine import (
    DIM,
    HEADS,
    NUM_LAYERS,
    Answer,
    Core,
    SglangEngine,
    attention_rows,
    linker_config,
)
from typing_extensions import override

from radixlink_comm import SingleRank
from radixlink_components import FullComponent
from radixlink_contracts import (
    CacheIdentity,
    ComponentType,
    InsertParams,
    LoadMode,
    MatchPrefixParams,
    Namespace,
    RadixKey,
    RequestId,
    RequestKV,
    StoreConfig,
)
from radixlink_contracts.errors import IdentityError
from radixlink_linker import (
    DeviceSlots,
    MonotonicClock,
    StoreLinker,
    ThreadExecutor,
    UnifiedRadixCache,
)
from radixlink_pools import Assembly, CpuCopier, LayerBuffers, PagedAllocator, assemble
from radixlink_sglang._pools import engine_pools
from radixlink_store import FileStoreFactory
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

PAGE_SIZE: Final = 4
NUM_PAGES: Final = 256
PROMPT: Final = list(range(100, 200))
_STEPS_S: Final = 20.0


@attrs.frozen
class Request(RequestKV):
    """A request whose loads are staged."""

    request_id: RequestId
    key: RadixKey

    @override
    def repoint(self, start: int, indices: torch.Tensor) -> None:
        pytest.fail("expected a staged load to re-point nothing")


class OwnEngine:
    """Radixlink's tree and controller over pools that are laid out like SGLang's."""

    def __init__(self, location: Path, identity: CacheIdentity) -> None:
        shape = (NUM_PAGES * PAGE_SIZE, HEADS, DIM)
        self.keys = [torch.zeros(shape, dtype=torch.float16) for _ in range(NUM_LAYERS)]
        self.values = [torch.zeros(shape, dtype=torch.float16) for _ in range(NUM_LAYERS)]
        pools = assemble(
            Assembly.MHA,
            page_size=PAGE_SIZE,
            buffers={ComponentType.FULL: LayerBuffers(groups=[self.keys, self.values])},
        )
        self._stores = FileStoreFactory(StoreConfig(location=str(location), capacity_bytes=1 << 24))
        self.allocator = PagedAllocator(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        self.tree = UnifiedTreeCore(page_size=PAGE_SIZE)
        slots = DeviceSlots(tree=self.tree, allocator=self.allocator)
        full = FullComponent(allocator=self.allocator, evict=slots.make_room, release=slots.retire)
        self._executor = ThreadExecutor()
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=slots,
            components=[full],
            group=SingleRank(),
            executor=self._executor,
            clock=MonotonicClock(),
        )
        self._linker = StoreLinker(
            pools=pools,
            stores=[(pool, self._stores.open(layout)) for pool, layout in pools.layouts(identity)],
            copier=CpuCopier(),
        )
        self.cache.init_cache_linker(self._linker)

    def store(self, key: RadixKey) -> None:
        """Compute a prompt and have it stored."""
        slots = self.allocator.alloc(len(key))
        assert slots is not None
        for layer in range(NUM_LAYERS):
            for place, tensors in enumerate((self.keys, self.values)):
                tensors[layer][slots] = attention_rows(
                    list(key.token_ids), layer, place, (HEADS, DIM), 0
                )
        self.cache.insert(InsertParams(key=key, value=slots))
        self._step_until_idle()

    def restore(self, key: RadixKey) -> tuple[int, int]:
        """How many tokens of a prompt come from the store, and how many of their rows are wrong."""
        request = Request(RequestId(f"r {key.namespace}"), key)
        ask = MatchPrefixParams(key=key, request_id=request.request_id)
        self.cache.match_prefix(ask)
        self._step_until_idle()
        found = self.cache.match_prefix(ask).host_hit_length
        if found:
            self.cache.init_load_back(request, LoadMode.STAGED)
            self.cache.ready_to_load_host_cache()
            self._step_until_idle()
        match = self.cache.match_prefix(ask)
        slots = self.tree.path_indices(match.last_device_node)
        wrong = 0
        for layer in range(NUM_LAYERS):
            for place, tensors in enumerate((self.keys, self.values)):
                expected = attention_rows(list(key.token_ids), layer, place, (HEADS, DIM), 0)
                got = tensors[layer][slots]
                wrong += int((got != expected[: len(got)]).flatten(1).any(1).sum())
        assert match.device_prefix_len == found
        return found, wrong

    def _step_until_idle(self) -> None:
        deadline = time.monotonic() + _STEPS_S
        while self.cache.num_outstanding:
            assert time.monotonic() < deadline
            self.cache.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cache.release_host_resources()
        self._linker.close()
        self._executor.close()
        self._stores.close()


def identity_of(engine: SglangEngine) -> CacheIdentity:
    pools = engine_pools(engine.params, {ComponentType.FULL})
    return pools.identity(model="model", revision="1", page_size=PAGE_SIZE)


def key_of(tokens: Sequence[int], extra_key: str | None) -> RadixKey:
    return RadixKey(array("q", tokens), Namespace(extra_key=extra_key))


@pytest.mark.parametrize("core", Core)
@pytest.mark.parametrize("extra_key", [None, "adapter"])
def test_what_sglang_stored_our_controller_restores(
    tmp_path: Path, core: Core, extra_key: str | None
) -> None:
    place = tmp_path / "store"
    with SglangEngine(linker_config("file", str(place)), core=core) as theirs:
        theirs.serve(PROMPT, extra_key=extra_key)
        theirs.settle()
        identity = identity_of(theirs)
    with OwnEngine(place, identity) as ours:
        assert ours.restore(key_of([*PROMPT, 7], extra_key)) == (100, 0)
        assert ours.restore(key_of([*PROMPT, 7], "another")) == (0, 0)


@pytest.mark.parametrize("core", Core)
@pytest.mark.parametrize("extra_key", [None, "adapter"])
def test_what_our_controller_stored_sglang_restores(
    tmp_path: Path, core: Core, extra_key: str | None
) -> None:
    place = tmp_path / "store"
    with SglangEngine(linker_config("file", str(place)), core=core) as theirs:
        with OwnEngine(place, identity_of(theirs)) as ours:
            ours.store(key_of(PROMPT, extra_key))
        assert theirs.serve([*PROMPT, 7], extra_key=extra_key) == [
            Answer(on_device=0, restored=100, wrong_rows=0, aborted=False)
        ]
        assert theirs.serve([*PROMPT, 7], extra_key="another")[0].restored == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", "k|v;heads=2;dim=8;order=head,token;rope=applied"),
        ("dtype", "bfloat16"),
        ("model", "another"),
        ("revision", "2"),
        ("num_layers", 5),
    ],
)
def test_pages_of_another_meaning_are_kept_apart(
    tmp_path: Path, field: str, value: str | int
) -> None:
    place = tmp_path / "store"
    with SglangEngine(linker_config("file", str(place))) as theirs:
        theirs.serve(PROMPT)
        theirs.settle()
        fields = attrs.asdict(identity_of(theirs)) | {field: value}
        other = CacheIdentity(**fields)
        pools = engine_pools(theirs.params, {ComponentType.FULL})
        ((_, layout),) = pools.group.layouts(other)
        config = StoreConfig(location=str(place), capacity_bytes=1 << 24)
        with (
            closing(FileStoreFactory(config)) as stores,
            pytest.raises(IdentityError, match=field),
        ):
            stores.open(layout)
