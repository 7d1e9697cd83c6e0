"""One rank of SGLang: its own cache, pools, admission and batches; only the model is ours.

The model writes rows that follow from all tokens before them, and counts every row of a restored
prefix that it finds to be another. Its forward asks SGLang's pools for each layer, as a real one
does, and so waits for the linker.
"""

from __future__ import annotations

import enum
import time
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, Self, assert_never

import attrs
import torch
from packages.sglang.tests.sglang_import import Foreign, part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType, TracebackType

    from torch.distributed import ProcessGroup

    from radixlink_linker import StoreLinkerCounters

NUM_SLOTS: Final = 1024
NUM_STATES: Final = 48
WINDOW: Final = 8
NUM_LAYERS: Final = 4
HEADS, DIM = 2, 8
LATENT, ROPE = 8, 4

#: SGLang keeps states in the tree at multiples of it, where a page has several tokens.
STATE_GRID: Final = 64

_SETTLE_S: Final = 30.0


class Kind(enum.Enum):
    """What the model's layers keep."""

    FULL = "full"
    LATENT = "latent"
    WINDOWS = "full+swa"
    STATES = "full+mamba"
    ALL = "full+swa+mamba"

    @property
    def has_windows(self) -> bool:
        """Some layers see only a window."""
        return self in {Kind.WINDOWS, Kind.ALL}

    @property
    def has_states(self) -> bool:
        """Some layers keep a recurrent state."""
        return self in {Kind.STATES, Kind.ALL}

    @property
    def layers(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The layers of full attention, of windows and of states."""
        match self:
            case Kind.FULL | Kind.LATENT:
                return (0, 1, 2, 3), (), ()
            case Kind.WINDOWS:
                return (0, 2), (1, 3), ()
            case Kind.STATES:
                return (0, 2), (), (1, 3)
            case Kind.ALL:
                return (0,), (2,), (1, 3)
            case _:
                assert_never(self)


class Core(enum.Enum):
    """Which of SGLang's trees; the values are the names of their classes."""

    PYTHON = "UnifiedTreeCore"
    RUST = "RustUnifiedTreeCore"


@attrs.frozen(kw_only=True)
class Answer:
    """What became of one request.

    Attributes:
        on_device: Tokens of its prefix that the tree had.
        restored: Tokens that came from the store.
        wrong_rows: Rows of its prefix, over layers, that were not what the model had written.
        aborted: SGLang ended it with an error.
    """

    on_device: int
    restored: int
    wrong_rows: int
    aborted: bool


@attrs.frozen(kw_only=True)
class Room:
    """Free slots of each pool; of all, when nothing is cached or running."""

    full: int
    windows: int = 0
    states: int = 0


def linker_config(store: str, location: str, /, **more: object) -> dict[str, object]:
    """What `--unified-cache-external-linker-config` says, as SGLang parses it."""
    extra: dict[str, object] = {
        "store": store,
        "location": location,
        "capacity_bytes": 1 << 24,
        "model": "model",
        "revision": "1",
        # A machine with more to do must not turn a restore into a miss.
        "lookup_timeout_s": 30.0,
        "load_timeout_s": 30.0,
    }
    return {
        "linker": "RadixlinkLinker",
        "linker_module_path": "radixlink_sglang.linker",
        "linker_extra_config": extra | more,
    }


class SglangEngine:
    """SGLang's cache with a linker, and a scheduler loop of ours around it.

    Ranks: every call on all ranks of `group`, in the same order.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        kind: Kind = Kind.FULL,
        core: Core = Core.PYTHON,
        page_size: int = 4,
        group: ProcessGroup | None = None,
        revision: str | None = None,
    ) -> None:
        self.kind = kind
        self._full_layers, self._window_layers, self._state_layers = kind.layers
        self.page_size = page_size
        self._rank = 0 if group is None else torch.distributed.get_rank(group)
        self._group = group
        self._core = core
        self._make_pools()
        self._make_cache(config, revision)
        self.room = self.free()

    # -- what it is made of ------------------------------------------------------------------------

    def _make_pools(self) -> None:
        """The pools of SGLang for this kind of model, and what deals their slots out."""
        pools = part("sglang.srt.mem_cache.memory_pool")
        size, page, where = NUM_SLOTS, self.page_size, {"device": "cpu"}
        common = {"size": size, "page_size": page, "dtype": torch.float16, **where}
        unsaved = {"enable_memory_saver": False}
        heads = {"head_num": HEADS, "head_dim": DIM}
        if self.kind.has_states:
            states = part("sglang.srt.configs.mamba_utils")
            shape = states.Mamba2StateShape.create(
                tp_world_size=1,
                intermediate_size=16,
                n_groups=1,
                num_heads=4,
                head_dim=4,
                state_size=4,
                conv_kernel=4,
            )
            self.requests = pools.HybridReqToTokenPool(
                size=16,
                mamba_size=NUM_STATES,
                mamba_spec_state_size=NUM_STATES,
                max_context_len=NUM_SLOTS,
                cache_params=states.Mamba2CacheParams(shape=shape, layers=list(self._state_layers)),
                mamba_layer_ids=list(self._state_layers),
                enable_mamba_extra_buffer=page > 1,
                enable_overlap_schedule=False,
                **where,
                **unsaved,
            )
        else:
            self.requests = pools.ReqToTokenPool(
                size=16, max_context_len=NUM_SLOTS, **where, **unsaved
            )
        if self.kind is Kind.FULL:
            self.kv = pools.MHATokenToKVPool(layer_num=NUM_LAYERS, **common, **heads, **unsaved)
        elif self.kind is Kind.LATENT:
            self.kv = pools.MLATokenToKVPool(
                kv_lora_rank=LATENT,
                qk_rope_head_dim=ROPE,
                layer_num=NUM_LAYERS,
                **common,
                **unsaved,
            )
        elif self.kind is Kind.STATES:
            self.kv = pools.HybridLinearKVPool(
                full_attention_layer_ids=list(self._full_layers),
                mamba_pool=self.requests.mamba_pool,
                **common,
                **heads,
            )
        else:
            windows = part("sglang.srt.mem_cache.swa_memory_pool")
            self.kv = windows.SWAKVPool(
                size_swa=size,
                full_attention_layer_ids=list(self._full_layers),
                swa_attention_layer_ids=list(self._window_layers),
                **common,
                **heads,
            )
        self.slots = self._slot_allocator(common)

    def _slot_allocator(self, common: dict[str, object]) -> Foreign:
        rest = {key: value for key, value in common.items() if key not in {"size", "page_size"}}
        rest |= {"kvcache": self.kv, "need_sort": False}
        if self.kind.has_windows:
            swa = part("sglang.srt.mem_cache.allocator.swa")
            made: Foreign = swa.SWATokenToKVPoolAllocator(
                size=NUM_SLOTS, size_swa=NUM_SLOTS, page_size=self.page_size, **rest
            )
        elif self.page_size == 1:
            token = part("sglang.srt.mem_cache.allocator.token")
            made = token.TokenToKVPoolAllocator(size=NUM_SLOTS, **rest)
        else:
            paged = part("sglang.srt.mem_cache.allocator.paged")
            made = paged.PagedTokenToKVPoolAllocator(
                size=NUM_SLOTS, page_size=self.page_size, **rest
            )
        return made

    def _make_cache(self, config: Mapping[str, object], revision: str | None) -> None:
        """SGLang's cache and the linker, as its registry makes them."""
        arguments = part("sglang.srt.server_args")
        context = part("sglang.srt.runtime_context")
        kinds = part("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
        self.settings = settings = arguments.ServerArgs(
            model_path="dummy",
            revision=revision,
            device="cpu",
            page_size=self.page_size,
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=dict(config),
        )
        # SGLang would read a model's configuration for it.
        settings._mamba_cache_chunk_size = max(STATE_GRID, self.page_size)
        context.publish(settings, role="scheduler")
        components = [kinds.FULL]
        components += [kinds.SWA] if self.kind.has_windows else []
        components += [kinds.MAMBA] if self.kind.has_states else []
        self.params = part("sglang.srt.mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.slots,
            page_size=self.page_size,
            tree_components=tuple(components),
            tree_core_backend="rust" if self._core is Core.RUST else "python",
            sliding_window_size=WINDOW if self.kind.has_windows else None,
            enable_mamba_extra_buffer=self.kind.has_states and self.page_size > 1,
            tp_cache_group=self._group,
            attn_tp_cache_group=self._group,
        )
        unified = part("sglang.srt.mem_cache.unified_radix_cache")
        self.cache = unified.UnifiedRadixCache(self.params)
        # SGLang falls back to the other one in silence.
        assert type(self.cache.tree_core).__name__ == self._core.value
        self.linker = self.make_linker()
        self.cache.init_cache_linker(self.linker)
        self.counter = self.cache.linker.layer_done_counter
        self.kv.register_layer_transfer_counter(self.counter)

    def make_linker(self) -> Foreign:
        """A linker, made by SGLang's factory of what SGLang was started with."""
        context = part("sglang.srt.runtime_context")
        factory = part("sglang.srt.mem_cache.unified_cache.linker_factory")
        return factory.create_unified_cache_linker(
            self.settings,
            self.params,
            backend=context.get_memory().unified_cache_external_linker_backend,
            config=factory.get_startup_linker_config(),
            components=set(self.cache.components),
            forward_stream=torch.cpu.Stream(),
        )

    # -- what is done with it ----------------------------------------------------------------------

    def serve(
        self, *prompts: Sequence[int], chunk: int | None = None, extra_key: str | None = None
    ) -> list[Answer]:
        """Answer prompts in one batch, or, where they are cut into chunks, in several."""
        batches = part("sglang.srt.managers.schedule_batch")
        self.cache.check_hicache_events()
        requests = [self.new_request(prompt, extra_key) for prompt in prompts]
        adder = self._adder(chunk)
        found = {}
        for request in requests:
            request.init_next_round_input(self.cache)
            found[request.rid] = request.prefix_len
            adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
        assert adder.can_run_list == requests
        restored = {request.rid: request.host_loaded_length for request in requests}
        wrong = dict.fromkeys(restored, 0)
        while True:
            batch = self._run(batches, adder.can_run_list, wrong)
            chunked = adder.new_chunked_req
            for request in batch:
                if request is not chunked:
                    self._finish(request)
            if chunked is None:
                break
            self._next_chunk_of(chunked)
            adder = self._adder(chunk)
            adder.new_chunked_req = adder.add_chunked_req(chunked)
        return [
            Answer(
                on_device=found[request.rid],
                restored=restored[request.rid],
                wrong_rows=wrong[request.rid],
                aborted=request.skip_radix_cache_insert,
            )
            for request in requests
        ]

    def new_request(self, prompt: Sequence[int], extra_key: str | None = None) -> Foreign:
        """A request of SGLang, of a name of its own."""
        batches = part("sglang.srt.managers.schedule_batch")
        sampling = part("sglang.srt.sampling.sampling_params")
        self._next_rid = getattr(self, "_next_rid", 0) + 1
        return batches.Req(
            f"r{self._next_rid}",
            "",
            array("q", prompt),
            sampling.SamplingParams(max_new_tokens=1),
            extra_key=extra_key,
        )

    def settle(self) -> None:
        """Every offload has been answered."""
        deadline = time.monotonic() + _SETTLE_S
        while self.cache.linker.pending_offloads:
            assert time.monotonic() < deadline, "an offload is not answered"
            self.cache.check_hicache_events()
            time.sleep(1e-3)

    def forget(self) -> None:
        """Nothing is on the device any more, and what was there is overwritten."""
        self.settle()
        params = part("sglang.srt.mem_cache.base_prefix_cache")
        self.cache.evict(
            params.EvictParams(num_tokens=10**6, swa_num_tokens=10**6, mamba_num=10**6)
        )
        assert self.free() == self.room
        for tensor in self.tensors():
            tensor.fill_(-7)

    def free(self) -> Room:
        """Free slots."""
        states = self.requests.mamba_allocator.available_size() if self.kind.has_states else 0
        if not self.kind.has_windows:
            return Room(full=self.slots.available_size(), states=states)
        return Room(
            full=self.slots.full_attn_allocator.available_size(),
            windows=self.slots.swa_attn_allocator.available_size(),
            states=states,
        )

    def tensors(self) -> list[torch.Tensor]:
        """All memory of the pools."""
        if self.kind is Kind.LATENT:
            return list(self.kv.kv_buffer)
        if self.kind.has_windows:
            pools = [self.kv.full_kv_pool, self.kv.swa_kv_pool]
        elif self.kind is Kind.STATES:
            pools = [self.kv.full_kv_pool]
        else:
            pools = [self.kv]
        found = [tensor for pool in pools for tensor in (*pool.k_buffer, *pool.v_buffer)]
        if self.kind.has_states:
            states = self.requests.mamba_pool.mamba_cache
            found += [states.temporal, *states.conv]
        return found

    @property
    def counters(self) -> StoreLinkerCounters:
        """What was moved."""
        found: StoreLinkerCounters = self.linker.counters
        return found

    def close(self) -> None:
        """Give everything back, as SGLang does when it ends."""
        self.cache.reset()
        self.cache.release_host_resources()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one batch ---------------------------------------------------------------------------------

    def _adder(self, chunk: int | None) -> Foreign:
        policy = part("sglang.srt.managers.schedule_policy")
        return policy.PrefillAdder(self.page_size, self.cache, self.slots, None, 0.5, 10**6, chunk)

    def _run(
        self, batches: ModuleType, requests: list[Foreign], wrong: dict[str, int]
    ) -> list[Foreign]:
        """Launch one batch, and have the ranks agree on its loads."""
        speculative = part("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
        model = SimpleNamespace(
            vocab_size=1 << 16, is_encoder_decoder=False, sliding_window_size=WINDOW
        )
        batch = batches.ScheduleBatch.init_new(
            requests,
            self.requests,
            self.slots,
            self.cache,
            model,
            enable_overlap=False,
            spec_algorithm=speculative.NONE,
        )
        batch.hicache_consumer_index = self.cache.ready_to_load_host_cache()
        batch.prepare_for_extend()
        self.counter.set_consumer(batch.hicache_consumer_index)
        for rid, rows in self._forward(batch).items():
            wrong[rid] += rows
        self.cache.finish_external_linker_loads(batch.reqs)
        for request in batch.reqs:
            request.kv.kv_committed_len = request.extend_end
        return list(batch.reqs)

    def _finish(self, request: Foreign) -> None:
        """A request has its token."""
        batches = part("sglang.srt.managers.schedule_batch")
        common = part("sglang.srt.mem_cache.common")
        request.finished_reason, request.finished_len = batches.FINISH_LENGTH(0), 0
        common.release_kv_cache(request, self.cache, checkpoint=True)

    def _next_chunk_of(self, request: Foreign) -> None:
        """A request goes on with its next chunk."""
        common = part("sglang.srt.mem_cache.common")
        common.checkpoint_kv_cache(request, self.cache)
        self.cache.check_hicache_events()
        request.init_next_round_input()

    # -- the model ---------------------------------------------------------------------------------

    def _forward(self, batch: Foreign) -> dict[str, int]:
        """Check what each request has of its prefix, layer by layer, and compute the rest."""
        wrong = dict.fromkeys((request.rid for request in batch.reqs), 0)
        if self.kind.has_states:
            copied = batch.mamba_cow_src_indices
            if copied is not None:
                self.requests.copy_mamba_state(copied, batch.mamba_cow_dst_indices)
            if batch.mamba_clear_indices is not None:
                self.requests.mamba_pool.clear_slots(batch.mamba_clear_indices)
        for layer in range(NUM_LAYERS):
            for request in batch.reqs:
                if layer in self._state_layers:
                    wrong[request.rid] += self._state_layer(request, layer)
                else:
                    wrong[request.rid] += self._attention_layer(request, layer)
        return wrong

    def _attention_layer(self, request: Foreign, layer: int) -> int:
        start, end = request.prefix_len, request.extend_end
        tokens = list(request.full_untruncated_fill_ids)[:end]
        rows = self.requests.req_to_token[request.kv.req_pool_idx, :end].to(torch.int64)
        seen = slice(0, start)
        if layer in self._window_layers:
            rows = self.kv.translate_loc_from_full_to_swa(rows)
            seen = slice(max(0, start - WINDOW + 1), start)
        latent = self.kind is Kind.LATENT
        buffers = (self.kv.get_key_buffer(layer),) if latent else self.kv.get_kv_buffer(layer)
        wrong = 0
        for place, buffer in enumerate(buffers):
            shape = buffer.shape[1:]
            rank = 0 if latent else self._rank
            expected = attention_rows(tokens, layer, place, shape, rank)
            wrong += int((buffer[rows[seen]] != expected[seen]).flatten(1).any(1).sum())
            buffer[rows[start:]] = expected[start:]
        return wrong

    def _state_layer(self, request: Foreign, layer: int) -> int:
        start, end = request.prefix_len, request.extend_end
        tokens = list(request.full_untruncated_fill_ids)[:end]
        cache = self.requests.mamba2_layer_cache(layer)
        tensors = (cache.temporal, *cache.conv)
        slot = int(request.kv.mamba_pool_idx)
        wrong = 0
        for place, tensor in enumerate(tensors):
            if start:
                expected = state_value(tokens[:start], layer, place, self._rank)
                wrong += int((tensor[slot] != expected).any())
            tensor[slot] = state_value(tokens, layer, place, self._rank)
        tracked = start + (end - start) // STATE_GRID * STATE_GRID
        if self.page_size > 1 and tracked > start:
            # A real model writes it on the way; so is its length told.
            kept = self.requests.get_mamba_ping_pong_keep_idx(request)
            tracked_slot = int(request.kv.mamba_ping_pong_track_buffer[kept])
            request.kv.mamba_last_track_seqlen = tracked
            for place, tensor in enumerate(tensors):
                tensor[tracked_slot] = state_value(tokens[:tracked], layer, place, self._rank)
        return wrong


def attention_rows(
    tokens: Sequence[int], layer: int, place: int, shape: Sequence[int], rank: int
) -> torch.Tensor:
    """What the model computes for each token of a prompt: small whole numbers, exact in float16."""
    prefix = 0
    digests = []
    for token in tokens:
        prefix = (prefix * 31 + token + 1) % 65521
        digests.append(prefix)
    each = torch.arange(torch.Size(shape).numel())
    factor, offset = 2 * layer + place + 1, 13 * rank
    rows = (torch.tensor(digests).unsqueeze(1) * factor + each * 7 + offset) % 2039
    return rows.to(torch.float16).view(-1, *shape)


def state_value(tokens: Sequence[int], layer: int, place: int, rank: int) -> float:
    """What the model makes of a prompt: a whole number, exact in bfloat16."""
    prefix = 0
    for token in tokens:
        prefix = (prefix * 31 + token + 1) % 251
    return float((prefix * (place + 1) + layer + 13 * rank) % 251)
