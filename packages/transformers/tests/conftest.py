"""Tiny models, a store in memory with faults, and engines on both.

The models have random weights, big enough that a wrong page shows: logits reach 3 to 7.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from typing import TYPE_CHECKING, Protocol, cast

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixlink_contracts import ComponentType, PageBits, PageHandles, PoolName
from radixlink_transformers import EngineSettings, TransformersEngine, build_engine
from radixlink_transformers._forward import decode_greedily, prefill, run_tokens
from radixlink_transformers._hugging_face import new_cache
from radixlink_tree import UnifiedTreeCore, check_invariants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import (
        PageKeys,
        PageStore,
        PoolLayout,
        SlotAllocator,
        StateAllocator,
    )
    from radixlink_linker import LinkerSettings, StoreLinkerSettings
    from radixlink_transformers import CausalModel

PAGE_SIZE = 16
#: A model of each kind, by its fixture.
KINDS = ("model", "mistral", "gemma", "gpt_oss", "qwen3_next", "falcon_h1", "bamba")
#: Those whose loads can be layer by layer.
LAYERED = KINDS[:4]
#: The same forwards everywhere, each of one page, so that sums are split alike; a state behind each.
BY_PAGE = EngineSettings(
    chunk_tokens=PAGE_SIZE, state_interval_tokens=PAGE_SIZE, poison_freed_pages=True
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    # Tests run beside each other, and bits must not depend on how a sum is split.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TINY: Mapping[str, object] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
}


def tiny(family: str, **settings: object) -> CausalModel:
    """A model of four layers with random weights, the same each time.

    Args:
        family: By transformers' name.
        **settings: Beside `TINY`; `...` leaves one of these out.
    """
    chosen = {name: value for name, value in {**TINY, **settings}.items() if value is not ...}
    config = AutoConfig.for_model(family, **chosen)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(20_260)
        made = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return cast("CausalModel", made.train(mode=False))


#: At the end of a prompt: see `failing_forwards`.
FAILS = (255, 255)


@contextlib.contextmanager
def failing_forwards(model: CausalModel) -> Iterator[None]:
    """A forward that ends with `FAILS` raises an IndexError."""

    def refuse(_: torch.nn.Module, args: object, kwargs: Mapping[str, torch.Tensor]) -> None:
        del args
        if tuple(kwargs["input_ids"][0, -len(FAILS) :].tolist()) == FAILS:
            raise IndexError("no forward for these")

    module = cast("torch.nn.Module", model)
    hook = module.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="session")
def model() -> CausalModel:
    """Full attention in every layer."""
    return tiny("llama")


@pytest.fixture(scope="session")
def mistral() -> CausalModel:
    """A window of two pages in every layer."""
    return tiny("mistral", sliding_window=32)


@pytest.fixture(scope="session")
def gemma() -> CausalModel:
    """Three layers with a window of two pages, and one of full attention."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return tiny("gemma3_text", sliding_window=32, layer_types=kinds)


@pytest.fixture(scope="session")
def gpt_oss() -> CausalModel:
    """Windows and full attention in turn, with sinks and experts."""
    return tiny("gpt_oss", sliding_window=32, num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture(scope="session")
def qwen3_next() -> CausalModel:
    """Three layers of linear attention and one of full attention, with experts."""
    return tiny(
        "qwen3_next",
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


@pytest.fixture(scope="session")
def falcon_h1() -> CausalModel:
    """Both in every layer."""
    return tiny(
        "falcon_h1",
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )


@pytest.fixture(scope="session")
def bamba() -> CausalModel:
    """Mamba 2 and full attention in turn."""
    return tiny(
        "bamba",
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )


@pytest.fixture(scope="session")
def prompt() -> tuple[int, ...]:
    """192 tokens: 12 pages of 16."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(0, 256, (192,), generator=generator).tolist())


class MemoryStores:
    """A store that engines of one test share. It can lose pages, lie about them, and be slow."""

    def __init__(self) -> None:
        self.pages: dict[bytes, dict[bytes, list[bytes]]] = {}
        self.fingerprints: dict[PoolName, set[bytes]] = {}
        #: While clear, reads wait.
        self.readable = threading.Event()
        self.readable.set()
        #: While clear, lookups wait.
        self.answering = threading.Event()
        self.answering.set()
        #: While clear, puts wait.
        self.writable = threading.Event()
        self.writable.set()
        #: Is asked before each read of a layer range; what it refuses cannot be read.
        self.may_read: Callable[[PoolName, int], bool] = lambda pool, layer_range: True
        #: Single pages that cannot be read in some layer range, though they are there.
        self.torn: set[tuple[PoolName, int, bytes]] = set()
        self.num_open = 0

    def open(self, layout: PoolLayout) -> PageStore:
        self.num_open += 1
        self.fingerprints.setdefault(layout.pool, set()).add(layout.fingerprint)
        return MemoryStore(self, layout, self.pages.setdefault(layout.fingerprint, {}))

    def close(self) -> None: ...

    def pool(self, name: PoolName = PoolName.KV) -> dict[bytes, list[bytes]]:
        """The pages of a pool that one model was stored for, oldest first."""
        (fingerprint,) = self.fingerprints[name]
        return self.pages[fingerprint]


@attrs.define(eq=False)
class MemoryStore:
    stores: MemoryStores
    layout: PoolLayout
    pages: dict[bytes, list[bytes]]

    def contains(self, keys: PageKeys) -> PageBits:
        assert self.stores.answering.wait(20)
        return PageBits.of((i for i, key in enumerate(keys) if key in self.pages), len(keys))

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return PageHandles.without_places(keys, self.contains(keys))

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        assert self.stores.readable.wait(20)
        if not self.stores.may_read(self.layout.pool, layer_range):
            return PageBits.none(len(handles.keys))
        size = self.layout.range_bytes[layer_range]
        rows = memoryview(out)
        good: list[int] = []
        for index, key in enumerate(handles.keys):
            page = self.pages.get(key)
            torn = (self.layout.pool, layer_range, key) in self.stores.torn
            if page is not None and not torn:
                rows[index * size : (index + 1) * size] = page[layer_range]
                good.append(index)
        return PageBits.of(good, len(handles.keys))

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        assert self.stores.writable.wait(20)
        for index, key in enumerate(keys):
            ranges = zip(parts, self.layout.range_bytes, strict=True)
            page = [bytes(memoryview(p)[index * n : (index + 1) * n]) for p, n in ranges]
            self.pages.setdefault(key, page)
        return PageBits.all(len(keys))

    def close(self) -> None:
        self.stores.num_open -= 1


class SoloGroup:
    """One rank, which agrees with itself."""

    rank = 0
    size = 1

    def all_and(self, words: bytearray, timeout_s: float) -> None: ...

    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        return value

    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        return (value,)

    def split(self, color: int, timeout_s: float) -> SoloGroup:
        return self

    def renew(self, timeout_s: float) -> SoloGroup:
        return self

    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        return {0: mark}

    def close(self) -> None: ...


class EngineMaker(Protocol):
    def __call__(
        self,
        stores: MemoryStores | None = None,
        *,
        of: CausalModel | None = None,
        num_pages: int = 64,
        num_window_pages: int | None = None,
        num_states: int | None = None,
        settings: EngineSettings | None = None,
        linker_settings: LinkerSettings | None = None,
        store_settings: StoreLinkerSettings | None = None,
    ) -> TransformersEngine: ...


@pytest.fixture
def stores() -> MemoryStores:
    return MemoryStores()


@pytest.fixture
def make(model: CausalModel) -> Iterator[EngineMaker]:
    """Makes engines that poison what they free, and closes them."""
    engines: list[TransformersEngine] = []

    def build(
        stores: MemoryStores | None = None,
        *,
        of: CausalModel | None = None,
        num_pages: int = 64,
        num_window_pages: int | None = None,
        num_states: int | None = None,
        settings: EngineSettings | None = None,
        linker_settings: LinkerSettings | None = None,
        store_settings: StoreLinkerSettings | None = None,
    ) -> TransformersEngine:
        engine = build_engine(
            of or model,
            identity_name="tiny",
            revision="1",
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            num_window_pages=num_window_pages,
            num_states=num_states,
            stores=stores,
            group=SoloGroup(),
            settings=settings or EngineSettings(poison_freed_pages=True),
            linker_settings=linker_settings,
            store_settings=store_settings,
        )
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def at_rest(engine: TransformersEngine) -> bool:
    """Nothing is outstanding or locked: everything can be evicted, and every slot is free then."""
    assert engine.settle(10)
    tree, device = engine._tree, engine._device
    assert isinstance(tree, UnifiedTreeCore)
    check_invariants(tree)
    sizes: dict[ComponentType, SlotAllocator | StateAllocator] = {ComponentType.FULL: device.full}
    if device.windows is not None:
        sizes[ComponentType.SWA] = device.windows.pair.swa
    if device.states is not None:
        sizes[ComponentType.MAMBA] = device.states.slots
    return all(
        tree.protected(kind) == 0
        and tree.evictable(kind) + allocator.available_size == allocator.size
        for kind, allocator in sizes.items()
    )


@attrs.frozen(kw_only=True, eq=False)
class Alone:
    """What a request is answered that has the model to itself, and no cache beside.

    Attributes:
        tokens: The answer.
        first_logits: Behind the prompt. Shape: (vocabulary,).
    """

    tokens: tuple[int, ...]
    first_logits: torch.Tensor


def alone(model: CausalModel, prompt: tuple[int, ...], num_new: int) -> Alone:
    """Compute a prompt page by page in transformers' own cache, then decode; once for each."""
    # The models are fixtures of the session, so that no two have one id.
    known = (id(model), prompt, num_new)
    if known not in _ALONE:
        _ALONE[known] = _compute_alone(model, prompt, num_new)
    return _ALONE[known]


_ALONE: dict[tuple[int, tuple[int, ...], int], Alone] = {}


def _compute_alone(model: CausalModel, prompt: tuple[int, ...], num_new: int) -> Alone:
    cache, positions = new_cache(model.config), itertools.count(len(prompt))
    logits = prefill(model, cache, prompt, 0, PAGE_SIZE)
    tokens = decode_greedily(
        lambda run: run_tokens(model, cache, run, next(positions)), logits, num_new, ()
    )
    return Alone(tokens=tuple(tokens), first_logits=logits)


def other_prompt(seed: int, num_tokens: int = 192) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (num_tokens,), generator=generator).tolist())


@attrs.frozen(kw_only=True, eq=False)
class Recomputed:
    """The yardstick for one boundary: transformers' own cache, never restored.

    Attributes:
        prompt: Shares so many tokens with another, and no more.
        num_shared: Whole pages.
        logits: Behind it, computed page by page. Shape: (vocabulary,).
    """

    prompt: tuple[int, ...]
    num_shared: int
    logits: torch.Tensor


def recompute_at_every_page(model: CausalModel, prompt: tuple[int, ...]) -> Iterator[Recomputed]:
    """For each page of a prompt but its last, the logits of a prompt that parts behind it."""
    cache = new_cache(model.config)
    for num_shared in range(PAGE_SIZE, len(prompt), PAGE_SIZE):
        prefill(model, cache, prompt[num_shared - PAGE_SIZE : num_shared], num_shared - PAGE_SIZE)
        # Not whole pages, so that the last chunk is another than of the donor.
        rest = other_prompt(num_shared, PAGE_SIZE + 4)
        logits = prefill(model, copy.deepcopy(cache), rest, num_shared, PAGE_SIZE)
        yield Recomputed(prompt=(*prompt[:num_shared], *rest), num_shared=num_shared, logits=logits)
