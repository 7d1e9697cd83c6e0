"""Real models, the file store, and engines that share nothing else: processes, threads, ranks."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, cast

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixlink_comm import SingleRank, ThreadGroup
from radixlink_contracts import (
    PAGE_KEY_BYTES,
    LoadMode,
    MatchPrefixParams,
    PageBits,
    RadixKey,
    RequestId,
    StoreConfig,
)
from radixlink_contracts.errors import AgreementError, IdentityError
from radixlink_store import FileStoreFactory, file_stores
from radixlink_transformers import (
    EngineSettings,
    Generation,
    ReferenceGeneration,
    TransformersEngine,
    build_engine,
    generate_without_cache,
    load_model,
)
from radixlink_tree import hash_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from radixlink_contracts import (
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


class Saveable(Protocol):
    def save_pretrained(self, directory: Path) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: What each family has beside four layers, two of its heads of keys and values.
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 32,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
}


def save_tiny(family: str, directory: Path) -> Path:
    """A tiny model whose logits reach 3 to 7, so that a wrong page shows."""
    config = AutoConfig.for_model(
        family,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
        **FAMILIES[family],
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(20_260)
        made = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        cast("Saveable", made).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


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


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "falcon_h1", "bamba"])
@pytest.mark.parametrize("load_mode", LoadMode)
def test_files_restore_what_is_kept_beside_full_attention(
    stores: FileStoreFactory,
    location: Path,
    tmp_path: Path,
    prompt: tuple[int, ...],
    family: str,
    load_mode: LoadMode,
) -> None:
    model = load_model(save_tiny(family, tmp_path / "model"))
    _donate(model, stores, prompt)
    assert len(list(location.glob("*.segment"))) == 2
    settings = EngineSettings(load_mode=load_mode, poison_freed_pages=True)
    with _engine(model, stores, settings=settings) as heir:
        generation = heir.generate(prompt, REQUEST, NUM_NEW)
        control = heir.first_token_with_pages_swapped(prompt, page=4, other=7)
    reference = generate_without_cache(model, prompt, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == reference.tokens
    rounding = (generation.first_logits - reference.first_logits).abs().max().item()
    assert rounding < 1e-3
    wrong = (control.logits - reference.first_logits).abs().max().item()
    assert wrong > 100 * max(rounding, 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_a_later_job_restores_what_an_earlier_one_kept_in_files(
    tmp_path: Path, prompt: tuple[int, ...], family: str
) -> None:
    model = load_model(save_tiny(family, tmp_path / "model"))

    def job(name: str) -> StoreFactory:
        """Stores with memory of their own, and files that all jobs have."""
        return file_stores(
            StoreConfig(
                location=str(tmp_path / name),
                capacity_bytes=1 << 24,
                persistent_path=str(tmp_path / "files"),
                persistent_bytes=1 << 28,
            )
        )

    earlier = job("earlier")
    _donate(model, earlier, prompt)
    earlier.close()
    later = job("later")
    with _engine(model, later) as heir:
        generation = heir.generate(prompt, REQUEST, NUM_NEW)
        control = heir.first_token_with_pages_swapped(prompt, page=4, other=7)
    later.close()
    reference = generate_without_cache(model, prompt, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == reference.tokens
    rounding = (generation.first_logits - reference.first_logits).abs().max().item()
    assert rounding < 1e-3
    wrong = (control.logits - reference.first_logits).abs().max().item()
    assert wrong > 100 * max(rounding, 1e-5)


def test_a_layer_that_fails_on_one_rank_is_dropped_on_both(
    model: CausalModel,
    stores: FileStoreFactory,
    prompt: tuple[int, ...],
    reference: ReferenceGeneration,
) -> None:
    _donate(model, stores, prompt)
    settings = EngineSettings(load_mode=LoadMode.LAYER_WISE, poison_freed_pages=True)

    def rank(group: RankGroup) -> list[Generation]:
        factory: StoreFactory = LosingStores(stores) if group.rank else stores
        with _engine(model, factory, group, settings=settings) as engine:
            found = [engine.generate(prompt, RequestId(f"{n}"), NUM_NEW) for n in range(2)]
            assert engine.settle(30)
            return found

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(rank, ThreadGroup.create(2)))
    for first, second in results:
        assert (first.figures.restored_tokens, first.figures.computed_tokens) == (0, 192)
        assert second.figures.device_tokens == 176
        assert first.tokens == second.tokens == reference.tokens


@pytest.mark.parametrize("load_mode", LoadMode)
def test_of_requests_in_flight_on_two_ranks_one_fails_alone_on_both(
    model: CausalModel, stores: FileStoreFactory, prompt: tuple[int, ...], load_mode: LoadMode
) -> None:
    broken, whole = (*prompt[:96], 5), (*prompt[96:], 5)
    for one in (broken, whole):
        _donate(model, stores, one)
    settings = EngineSettings(load_mode=load_mode, poison_freed_pages=True)
    first_pages = hash_pages(None, array("q", prompt[:96]).tobytes(), PAGE_SIZE)
    torn = first_pages[3 * PAGE_KEY_BYTES : 4 * PAGE_KEY_BYTES]

    def rank(group: RankGroup) -> list[Generation]:
        # Layer 2 of page 3 of one prompt cannot be read on rank 1.
        factory: StoreFactory = LosingStores(stores, torn) if group.rank else stores
        with _engine(model, factory, group, settings=settings) as engine:
            pending = [
                engine.submit(one, RequestId(f"{number}"), NUM_NEW)
                for number, one in enumerate((broken, whole, prompt[7:90]))
            ]
            while engine.num_in_flight:
                engine.iterate()
            assert engine.settle(30)
            return [one.result() for one in pending]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(rank, ThreadGroup.create(2)))
    for answers in results:
        assert [one.figures.restored_tokens for one in answers] == [0, 96, 0]
        for one, answer in zip((broken, whole, prompt[7:90]), answers, strict=True):
            assert answer.tokens == generate_without_cache(model, one, NUM_NEW).tokens


@attrs.frozen
class LosingStore:
    """Another store, which finds every page and cannot read layer 2: of all, or of one."""

    store: PageStore
    torn: bytes | None = None

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def contains(self, keys: PageKeys) -> PageBits:
        return self.store.contains(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return self.store.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        good = self.store.read(handles, layer_range, out)
        if layer_range != 2:
            return good
        keys = enumerate(handles.keys)
        return PageBits.of(
            (at for at, key in keys if at in good and self.torn not in {None, key}), good.count
        )

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        return self.store.put(keys, parts)

    def close(self) -> None:
        self.store.close()


class LosingStores:
    """Opens losing stores."""

    def __init__(self, stores: StoreFactory, torn: bytes | None = None) -> None:
        self._stores = stores
        self._torn = torn

    def open(self, layout: PoolLayout) -> PageStore:
        return LosingStore(self._stores.open(layout), self._torn)

    def close(self) -> None: ...


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
