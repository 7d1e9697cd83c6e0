"""Real models, the file store, and engines that share nothing else: processes, threads, ranks."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, cast

import attrs
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixlink_comm import SingleRank, ThreadGroup
from radixlink_contracts import MatchPrefixParams, RadixKey, RequestId, StoreConfig
from radixlink_contracts.errors import AgreementError, IdentityError
from radixlink_store import FileStoreFactory
from radixlink_transformers import (
    EngineSettings,
    Generation,
    ReferenceGeneration,
    TransformersEngine,
    build_engine,
    generate_without_cache,
    load_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from radixlink_contracts import (
        PageBits,
        PageHandles,
        PageKeys,
        PageStore,
        PoolLayout,
        RankGroup,
        StoreFactory,
    )
    from radixlink_transformers import CausalModel

PAGE_SIZE = 16
NUM_NEW = 8
REQUEST = RequestId("r")

DONOR = """
import sys
import torch
from radixlink_comm import SingleRank
from radixlink_contracts import RequestId, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_transformers import build_engine, load_model

torch.set_num_threads(1)
directory, location, *prompt = sys.argv[1:]
stores = FileStoreFactory(StoreConfig(location=location, capacity_bytes=1 << 24))
with build_engine(
    load_model(directory), identity_name="tiny", revision="1", page_size=16, num_pages=64,
    stores=stores, group=SingleRank(),
) as engine:
    engine.generate(list(map(int, prompt)), RequestId("donor"), 1)
    assert engine.settle(30)
stores.close()
"""

RANK = """
import json, os, sys
import torch
from torch.distributed import TCPStore
from radixlink_comm.torch import TorchGroup
from radixlink_contracts import RequestId, Shard, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_transformers import build_engine, generate_without_cache, load_model

torch.set_num_threads(1)
directory, location, *prompt = sys.argv[1:]
prompt = list(map(int, prompt))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = load_model(directory, tensor_parallel=True)
meeting = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
group = TorchGroup.create(meeting, rank=rank, size=size, timeout_s=60)
stores = FileStoreFactory(StoreConfig(location=location, capacity_bytes=1 << 24))

def run(request_id):
    with build_engine(
        model, identity_name="tiny", revision="1", page_size=16, num_pages=64, stores=stores,
        group=group, shard=Shard(index=rank, count=size),
    ) as engine:
        generation = engine.generate(prompt, RequestId(request_id), 8)
        assert engine.settle(30)
        return generation

run("donor")
heir = run("heir")
reference = generate_without_cache(model, prompt, 8)
answer = {
    "restored": heir.figures.restored_tokens,
    "tokens": heir.tokens,
    "reference": reference.tokens,
    "difference": (heir.first_logits - reference.first_logits).abs().max().item(),
}
stores.close()
group.close()
torch.distributed.destroy_process_group()
print("ANSWER" + json.dumps(answer))
"""


class Saveable(Protocol):
    def save_pretrained(self, directory: Path) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose logits reach 3 to 7, so that a wrong page shows."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
    )
    directory = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(20_260)
        cast("Saveable", LlamaForCausalLM(config)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(saved: Path) -> CausalModel:
    return load_model(saved)


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(0, 256, (192,), generator=generator).tolist())


@pytest.fixture(scope="module")
def reference(model: CausalModel, prompt: tuple[int, ...]) -> ReferenceGeneration:
    return generate_without_cache(model, prompt, NUM_NEW)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def stores(location: Path) -> Iterator[FileStoreFactory]:
    factory = FileStoreFactory(StoreConfig(location=str(location), capacity_bytes=1 << 24))
    yield factory
    factory.close()


def _engine(
    model: CausalModel,
    stores: StoreFactory,
    group: RankGroup | None = None,
    *,
    revision: str = "1",
    settings: EngineSettings | None = None,
) -> TransformersEngine:
    return build_engine(
        model,
        identity_name="tiny",
        revision=revision,
        page_size=PAGE_SIZE,
        num_pages=64,
        stores=stores,
        group=group or SingleRank(),
        settings=settings or EngineSettings(poison_freed_pages=True),
    )


def _donate(model: CausalModel, stores: StoreFactory, prompt: tuple[int, ...]) -> None:
    with _engine(model, stores) as donor:
        donor.generate(prompt, RequestId("donor"), 1)
        assert donor.settle(30)


def test_an_engine_restores_what_another_process_computed(
    saved: Path,
    model: CausalModel,
    stores: FileStoreFactory,
    location: Path,
    prompt: tuple[int, ...],
    reference: ReferenceGeneration,
) -> None:
    command = [sys.executable, "-c", DONOR, str(saved), str(location), *map(str, prompt)]
    with subprocess.Popen(command) as donor:
        assert donor.wait(120) == 0
    with _engine(model, stores) as heir:
        generation = heir.generate(prompt, REQUEST, NUM_NEW)
        assert generation.figures.restored_tokens == 176
        assert generation.figures.computed_tokens == 16
        assert heir.pages_by_writer == {donor.pid: 11}
        assert generation.tokens == reference.tokens
        assert (generation.first_logits - reference.first_logits).abs().max() < 1e-4
        # The control: logits that agree to 1e-4 would not if one of these pages were stale.
        control = heir.first_token_with_pages_swapped(prompt, page=4, other=7)
        assert (control.logits - reference.first_logits).abs().max() > 1e-2


def test_a_flipped_bit_is_a_miss_and_is_computed(
    model: CausalModel,
    stores: FileStoreFactory,
    location: Path,
    prompt: tuple[int, ...],
    reference: ReferenceGeneration,
) -> None:
    with _engine(model, stores) as donor:
        donor.generate(prompt, RequestId("donor"), 1)
        assert donor.settle(30)
        # Page 5 as layer 2 has it, keys and values.
        found = donor._cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt))))
        slots = donor._tree.path_indices(found.last_device_node)
        page = donor._device.kv._layers[2][int(slots[5 * PAGE_SIZE]) // PAGE_SIZE]
        page_bytes = page.flatten().view(torch.uint8).numpy().tobytes()
    (segment,) = location.glob("*.segment")
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        at = mapped.find(page_bytes)
        assert at > 0
        mapped[at + 100] ^= 0b100
    with _engine(model, stores) as heir:
        generation = heir.generate(prompt, REQUEST, NUM_NEW)
        assert generation.figures.restored_tokens <= 5 * PAGE_SIZE
        assert generation.tokens == reference.tokens
        assert (generation.first_logits - reference.first_logits).abs().max() < 1e-4
        assert heir.settle(30)
    # What was computed is stored again, in the place of the page that was wrong.
    with _engine(model, stores) as heir:
        generation = heir.generate(prompt, REQUEST, NUM_NEW)
        assert generation.figures.restored_tokens == 176
        assert generation.tokens == reference.tokens


def test_pages_of_another_revision_are_refused_by_name(
    model: CausalModel, stores: FileStoreFactory, prompt: tuple[int, ...]
) -> None:
    _donate(model, stores, prompt)
    with pytest.raises(IdentityError, match="revision"):
        _engine(model, stores, revision="2")


def test_ranks_give_up_on_a_slow_store_in_the_same_step(
    model: CausalModel,
    stores: FileStoreFactory,
    prompt: tuple[int, ...],
    reference: ReferenceGeneration,
) -> None:
    _donate(model, stores, prompt)
    slow = SlowStores(stores)
    settings = EngineSettings(wait_timeout_s=0.05, poison_freed_pages=True)

    def rank(group: RankGroup) -> tuple[Generation, Generation]:
        # Rank 1 alone has a store that does not answer. Only what both have counts.
        factory: StoreFactory = slow if group.rank else stores
        with _engine(model, factory, group, settings=settings) as engine:
            without = engine.generate(prompt, RequestId("slow"), NUM_NEW)
            slow.answering.set()
            assert engine.settle(30)
            return without, engine.generate(prompt, RequestId("quick"), NUM_NEW)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(rank, ThreadGroup.create(2)))
    for without, quick in results:
        assert without.figures.restored_tokens == 0
        assert without.tokens == reference.tokens
        assert quick.figures.device_tokens == 176
        assert quick.tokens == reference.tokens


def test_ranks_with_different_settings_are_refused_alike(
    model: CausalModel, stores: FileStoreFactory
) -> None:
    def rank(group: RankGroup) -> str:
        settings = EngineSettings(wait_timeout_s=1.0 + group.rank)
        expected = r"wait_timeout_s=1\.0.*wait_timeout_s=2\.0"
        with pytest.raises(AgreementError, match=expected) as caught:
            _engine(model, stores, group, settings=settings)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, ThreadGroup.create(2))
    assert first == second


def test_each_rank_of_a_spread_model_restores_its_own_heads(
    saved: Path, location: Path, prompt: tuple[int, ...], reference: ReferenceGeneration
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", RANK, str(saved), str(location), *map(str, prompt)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0]
    for output in outputs:
        answer = json.loads(output.partition("ANSWER")[2])
        assert answer["restored"] == 176
        assert tuple(answer["tokens"]) == tuple(answer["reference"]) == reference.tokens
        assert answer["difference"] < 1e-4
    assert len(list(location.glob("*.segment"))) == 2


@attrs.frozen
class SlowStore:
    """Another store, which does not say what it contains before it may."""

    store: PageStore
    answering: threading.Event

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def contains(self, keys: PageKeys) -> PageBits:
        assert self.answering.wait(20)
        return self.store.contains(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return self.store.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        return self.store.read(handles, layer_range, out)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        return self.store.put(keys, parts)

    def close(self) -> None:
        self.store.close()


class SlowStores:
    """Opens slow stores."""

    def __init__(self, stores: StoreFactory) -> None:
        self.answering = threading.Event()
        self._stores = stores

    def open(self, layout: PoolLayout) -> PageStore:
        return SlowStore(self._stores.open(layout), self.answering)

    def close(self) -> None: ...
