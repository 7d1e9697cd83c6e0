"""One of two tensor-parallel ranks: each stores and restores its own heads, and the frames agree over MPI.

Started as ``python -m mpi4py -m radixlink.demo._rank MODEL_DIR MODEL_DIGEST STORE_DIR REPORT`` under `mpirun`. Rank 0
writes what all ranks told to REPORT, a list of one object for each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from radixlink.demo._report import largest
from radixlink.demo.conversations import load_conversations
from radixlink.errors import LaunchError, ReplicaError
from radixlink.models import PreparedModel, load_tokenizer
from radixlink_contracts import PageBits, RequestId, Shard, StoreConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py.MPI import Intracomm
    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageKeys, PageStore, PoolLayout, StoreFactory
    from radixlink_transformers import CausalModel, Generation, TransformersEngine

_NUM_RANKS: Final = 2
_PAGE_SIZE: Final = 16
_PROMPT_TOKENS: Final = 1_000
_NEW_TOKENS: Final = 8
_STORE_BYTES: Final = 64 << 20
_TIMEOUT_S: Final = 60.0
_LOST_PAGE: Final = 20


class ForgetfulStore:
    """A `PageStore` that finds every page but cannot read the lost ones: what a page that goes after the lookup is."""

    def __init__(self, store: PageStore) -> None:
        """Pass everything on, until something is lost."""
        self._store = store
        self._lost: frozenset[bytes] = frozenset()
        #: The keys of the last `open`, from which one is chosen to be lost.
        self.opened: list[bytes] = []

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._store.layout

    def lose(self, key: bytes) -> None:
        """From now on this page cannot be read."""
        self._lost |= {key}

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there, the lost ones too."""
        return self._store.contains(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages, the lost ones too."""
        self.opened.extend(keys)
        return self._store.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read pages, but for the lost ones."""
        good = self._store.read(handles, layer_range, out)
        lost = PageBits.of(
            (page for page, key in enumerate(handles.keys) if key in self._lost), good.count
        )
        return PageBits(good.mask & ~lost.mask, good.count)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages."""
        return self._store.put(keys, parts)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class ForgetfulFactory:
    """A `StoreFactory` whose one store is a `ForgetfulStore`."""

    def __init__(self, stores: StoreFactory) -> None:
        """Open by another factory."""
        self._stores = stores
        self.opened: ForgetfulStore | None = None

    def open(self, layout: PoolLayout) -> PageStore:
        """Open a store, and remember it."""
        self.opened = ForgetfulStore(self._stores.open(layout))
        return self.opened

    def close(self) -> None:
        """Close the factory."""
        self._stores.close()


@attrs.frozen(kw_only=True, eq=False)
class _Rank:
    """What one rank works with."""

    engine: TransformersEngine
    model: CausalModel
    store: ForgetfulStore
    index: int
    faults: list[str] = attrs.field(factory=list)
    distances: list[float] = attrs.field(factory=list)

    def answer(self, name: str, prompt: tuple[int, ...]) -> Generation:
        """Answer a prompt, wait until its pages are stored, and compare with a run without a cache.

        Raises:
            ReplicaError: The store did not take them in time.
        """
        from radixlink_transformers import generate_without_cache

        generation = self.engine.generate(prompt, RequestId(name), _NEW_TOKENS)
        if not self.engine.settle(_TIMEOUT_S):
            raise ReplicaError(
                f"two ranks: rank {self.index}, {name!r}: the store did not take the pages within "
                f"{_TIMEOUT_S:g} s"
            )
        reference = generate_without_cache(self.model, prompt, _NEW_TOKENS)
        if generation.tokens != reference.tokens:
            self.faults.append(name)
        distance = (generation.first_logits - reference.first_logits).abs().max()
        self.distances.append(float(distance))
        return generation

    def run(self, prompts: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, object]:
        """Compute and store, restore, then lose one page on rank 1 and answer again."""
        first, second = prompts
        self.answer("first", first)
        self.answer("evicts the first", second)
        restored = self.answer("first, restored", first)
        self.answer("evicts it again", second)
        if self.index == 1:
            self.store.lose(self.store.opened[_LOST_PAGE])
        lossy = self.answer("first, with a page lost", first)
        return {
            "restored_tokens": restored.figures.restored_tokens,
            "restored_tokens_after_loss": lossy.figures.restored_tokens,
            "computed_tokens_after_loss": lossy.figures.computed_tokens,
            "identical": not self.faults,
            "max_dlogit": largest(self.distances),
        }


def shard_of(world: Intracomm) -> Shard:
    """The heads of this rank: its place among the two.

    Raises:
        LaunchError: There are not two.
    """
    index, count = world.Get_rank(), world.Get_size()
    if count != _NUM_RANKS:
        raise LaunchError(
            f"two ranks: expected an MPI job of {_NUM_RANKS} ranks, rank {index} got one of {count}; is the "
            "`mpirun` that started it of another MPI than the library of mpi4py?"
        )
    return Shard(index=index, count=count)


def torch_environment(shard: Shard) -> dict[str, str]:
    """What transformers' tensor parallelism starts torch's process group from; all ranks are on one machine."""
    index = str(shard.index)
    return {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": str(shard.count)}


def main(arguments: list[str]) -> int:
    """Run as one rank."""
    model_dir, digest, store_dir, report = arguments
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    shard = shard_of(world)
    os.environ |= torch_environment(shard)
    import torch

    from radixlink._stores import store_factory
    from radixlink_comm.mpi import MpiGroup
    from radixlink_transformers import build_engine, load_model

    torch.set_num_threads(1)
    model = load_model(model_dir, tensor_parallel=True)
    codec = load_tokenizer(PreparedModel(directory=Path(model_dir), digest=digest, name="tiny"))
    one, other = (codec.encode(text.document)[:_PROMPT_TOKENS] for text in load_conversations())
    group = MpiGroup.create(world, _TIMEOUT_S)
    stores = ForgetfulFactory(
        store_factory("file", StoreConfig(location=store_dir, capacity_bytes=_STORE_BYTES))
    )
    engine = build_engine(
        model,
        identity_name="tiny",
        revision=digest,
        page_size=_PAGE_SIZE,
        num_pages=-(-(_PROMPT_TOKENS + _NEW_TOKENS) // _PAGE_SIZE),
        stores=stores,
        group=group,
        shard=shard,
    )
    assert stores.opened is not None
    rank = _Rank(engine=engine, model=model, store=stores.opened, index=shard.index)
    told = group.all_gather(json.dumps(rank.run((tuple(one), tuple(other)))).encode(), _TIMEOUT_S)
    engine.close()
    stores.close()
    group.close()
    if shard.index == 0:
        Path(report).write_text(json.dumps([json.loads(value) for value in told]))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
