"""An engine that calls a connector as vLLM does, on arithmetic in the place of a model.

One process plays the scheduler and two workers. The KV of a token in a layer follows from that of
the token before, and from adapter and images, so that what comes of a wrong block is a wrong answer.
As in vLLM a request's tokens count as computed when their load or forward is started, its connector
is asked whatever state it ends in, and who is named received or sent has to be known.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs
import torch
from tests.integration.connector.skeleton import SchedulerSide, WorkerSide

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName, Shard
from radixlink_linker import ThreadExecutor
from radixlink_pools import CpuCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.integration.connector.skeleton import Event, Metadata

    from radixlink_contracts import Clock, LoadMode, PageStore, StoreFactory
    from radixlink_linker import StoreLinkerSettings

NUM_WORKERS: Final = 2
NUM_LAYERS: Final = 3
PAGE_SIZE: Final = 4
_PRIME: Final = 1_000_003
LAYERS: Final = [f"model.layers.{index}.self_attn" for index in range(NUM_LAYERS)]


def layout(worker: int) -> PoolLayout:
    """What a worker's pages are."""
    identity = CacheIdentity(
        model="arithmetic", revision="1", dtype="int64", page_size=PAGE_SIZE,
        num_layers=NUM_LAYERS, layout="chain",
    )  # fmt: skip
    return PoolLayout(
        identity=identity,
        pool=PoolName.KV,
        range_bytes=(PAGE_SIZE * 8,) * NUM_LAYERS,
        shard=Shard(index=worker, count=NUM_WORKERS),
    )


def _next_state(before: int, token: int, layer: int, worker: int, bias: int) -> int:
    return (before * 31 + (token + 1) * (layer + 7) + worker + bias) % _PRIME


def kv_of(tokens: Sequence[int], layer: int, worker: int, bias: int = 0) -> list[int]:
    """What any worker has to have of these tokens in a layer, computed without blocks."""
    states = [0]
    for token in tokens:
        states.append(_next_state(states[-1], token, layer, worker, bias))
    return states[1:]


def answer_of(prompt: Sequence[int], num_tokens: int, bias: int = 0) -> list[int]:
    """What any engine has to answer, computed without blocks."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        last = [
            kv_of(tokens, layer, worker, bias)[-1]
            for worker in range(NUM_WORKERS)
            for layer in range(NUM_LAYERS)
        ]
        tokens.append(sum(last) % 251)
    return tokens[len(prompt) :]


@attrs.frozen(kw_only=True)
class FakeAdapter:
    """What a LoRA does: it adds to the KV of each token."""

    lora_name: str
    bias: int


@attrs.frozen(kw_only=True)
class FakeImage:
    """An image, whose tokens are placeholders: it adds to the KV of each token."""

    bias: int


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting for remote kv"
    RUNNING = "running"
    FINISHED = "finished"


@attrs.define(kw_only=True, eq=False)
class FakeRequest:
    """A request, with what vLLM's has under these names."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    lora_request: FakeAdapter | None = None
    cache_salt: str | None = None
    mm_features: list[FakeImage] = attrs.field(factory=list)
    prompt_embeds: torch.Tensor | None = None
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    block_ids: list[int] = attrs.field(factory=list)
    #: Tokens that forwards ran for it, those whose results were dropped included.
    num_run: int = 0

    @property
    def answer(self) -> list[int]:
        """What was generated."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def bias(self) -> int:
        """What adapter and images add."""
        adapter = 0 if self.lora_request is None else self.lora_request.bias
        return adapter + sum(image.bias for image in self.mm_features)


@attrs.frozen
class _Blocks:
    block_ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.block_ids,)


@attrs.frozen(kw_only=True)
class Scheduled:
    """A request in a forward: its tokens from `start` on are run."""

    request: FakeRequest
    start: int


@attrs.frozen(kw_only=True)
class ConnectorOutput:
    """What all workers said of a step, taken together."""

    finished_recving: set[str]


@attrs.frozen(kw_only=True)
class WorkerOutput:
    """What a worker says of a step."""

    partial: dict[str, int]
    sent: set[str]
    received: set[str]
    broken: set[int]


class Worker:
    """A share of the model, with its blocks."""

    def __init__(
        self,
        index: int,
        num_blocks: int,
        store: PageStore,
        mode: LoadMode,
        settings: StoreLinkerSettings | None,
        new_event: Callable[[], Event] | None,
    ) -> None:
        self._index: Final = index
        self.kv: Final = [
            torch.full((num_blocks, PAGE_SIZE), -1, dtype=torch.int64) for _ in range(NUM_LAYERS)
        ]
        self.connector: Final = WorkerSide(
            store=store, copier=CpuCopier(), mode=mode, new_event=new_event, settings=settings
        )
        # In another order than the model's, as an engine may name them.
        self.connector.register_kv_caches(dict(reversed([*zip(LAYERS, self.kv, strict=True)])))

    def execute(self, scheduled: Sequence[Scheduled], metadata: Metadata) -> WorkerOutput:
        """One step: a forward over all that is scheduled, in vLLM's order of calls."""
        connector = self.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        partial = {one.request.request_id: 0 for one in scheduled}
        for layer, name in enumerate(LAYERS):
            if scheduled:
                connector.wait_for_layer_load(name)
            for one in scheduled:
                partial[one.request.request_id] += self._run(one, layer)
            connector.save_kv_layer(name, self.kv[layer], None)
        connector.wait_for_save()
        sent, received = connector.get_finished(set())
        broken = connector.get_block_ids_with_load_errors()
        connector.clear_connector_metadata()
        return WorkerOutput(
            partial=partial, sent=sent or set(), received=received or set(), broken=broken
        )

    def _run(self, one: Scheduled, layer: int) -> int:
        request, kv, blocks = one.request, self.kv[layer], one.request.block_ids
        at = one.start
        state = int(kv[blocks[(at - 1) // PAGE_SIZE], (at - 1) % PAGE_SIZE]) if at else 0
        for position in range(at, len(request.all_token_ids)):
            token = request.all_token_ids[position]
            state = _next_state(state, token, layer, self._index, request.bias)
            kv[blocks[position // PAGE_SIZE], position % PAGE_SIZE] = state
        return state


class FakeEngine:
    """The scheduler's loop, as far as a connector sees it; without prefix cache and preemption."""

    def __init__(
        self,
        stores: Sequence[StoreFactory],
        mode: LoadMode,
        *,
        num_blocks: int = 32,
        lookup_timeout_s: float = 5.0,
        clock: Clock | None = None,
        settings: StoreLinkerSettings | None = None,
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        """Open the store of each worker, once for itself and once for the scheduler's lookups."""
        self._connector: Final = SchedulerSide(
            shards=[factory.open(layout(worker)) for worker, factory in enumerate(stores)],
            executor=ThreadExecutor(),
            mode=mode,
            lookup_timeout_s=lookup_timeout_s,
            clock=clock,
        )
        self.workers: Final = [
            Worker(index, num_blocks, factory.open(layout(index)), mode, settings, new_event)
            for index, factory in enumerate(stores)
        ]
        self.free_blocks: Final = list(range(num_blocks))
        #: Those that are asked, and those whose blocks are kept.
        self._requests: Final[dict[str, FakeRequest]] = {}
        self._aborts_in_flight: Final[list[FakeRequest]] = []
        self._sent_by: Final[dict[str, int]] = {}
        self._received_by: Final[dict[str, int]] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        lora_request: FakeAdapter | None = None,
        cache_salt: str | None = None,
        mm_features: Sequence[FakeImage] = (),
        prompt_embeds: torch.Tensor | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> FakeRequest:
        """Take a request in."""
        request = FakeRequest(
            request_id=request_id,
            all_token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            lora_request=lora_request,
            cache_salt=cache_salt,
            mm_features=list(mm_features),
            prompt_embeds=prompt_embeds,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )
        self._requests[request_id] = request
        return request

    def abort(self, request: FakeRequest) -> None:
        """End a request between two steps; one that has ended is left alone."""
        if request.status is Status.FINISHED:
            return
        # What is being loaded into may not be used again before the load has ended.
        self._finish(request, keep=request.status is Status.WAITING_FOR_REMOTE_KV)

    def abort_in_flight(self, request: FakeRequest) -> None:
        """End a request in the next step, when its forward has run and its results are not seen."""
        self._aborts_in_flight.append(request)

    @property
    def is_idle(self) -> bool:
        """Nothing is asked and nothing is being moved."""
        moving = self._connector._offloads or any(
            worker.connector._loads or worker.connector._offloads for worker in self.workers
        )
        return not (self._requests or moving)

    @property
    def hangs(self) -> bool:
        """Some worker's store does not return from a call."""
        return any(worker.connector.linker._hanging() is not None for worker in self.workers)

    def step(self) -> None:
        """Schedule, run, and look at the results."""
        for request in list(self._requests.values()):
            if request.status is Status.WAITING:
                self._schedule(request)
        scheduled = [
            Scheduled(request=request, start=request.num_computed_tokens)
            for request in self._requests.values()
            if request.status is Status.RUNNING
        ]
        for one in scheduled:
            one.request.num_computed_tokens = len(one.request.all_token_ids)
        metadata = self._connector.build_connector_meta(None)
        outputs = [worker.execute(scheduled, metadata) for worker in self.workers]
        while self._aborts_in_flight:
            self.abort(self._aborts_in_flight.pop())
        # One worker without a block is enough; to be done takes all of them.
        broken = set[int]().union(*(output.broken for output in outputs))
        for request in self._requests.values():
            if request.status is Status.WAITING_FOR_REMOTE_KV:
                # It counts when the last worker has told of the load, which may be later.
                self._cut(request, broken)
        for one in scheduled:
            if one.request.status is Status.RUNNING:
                self._process(one, broken, outputs)
        self._take_told(
            _of_all(self._sent_by, [output.sent for output in outputs]),
            _of_all(self._received_by, [output.received for output in outputs]),
        )

    def close(self) -> None:
        """Release everything."""
        for worker in self.workers:
            worker.connector.shutdown()
        self._connector.shutdown()

    def _schedule(self, request: FakeRequest) -> None:
        found, load_async = self._connector.get_num_new_matched_tokens(request, 0)
        num_blocks = -(-(request.num_prompt_tokens + request.max_tokens) // PAGE_SIZE)
        if found is None or num_blocks > len(self.free_blocks):
            return
        request.block_ids = [self.free_blocks.pop(0) for _ in range(num_blocks)]
        self._connector.update_state_after_alloc(request, _Blocks(request.block_ids), found)
        request.num_computed_tokens = found
        request.status = Status.WAITING_FOR_REMOTE_KV if load_async else Status.RUNNING

    def _process(self, one: Scheduled, broken: set[int], outputs: Sequence[WorkerOutput]) -> None:
        request = one.request
        request.num_run += len(request.all_token_ids) - one.start
        if self._cut(request, broken):
            # Its results count for nothing: it is run again from the first block that is broken.
            return
        token = sum(output.partial[request.request_id] for output in outputs) % 251
        request.all_token_ids.append(token)
        if len(request.answer) == request.max_tokens:
            self._finish(request, keep=False)

    def _cut(self, request: FakeRequest, broken: set[int]) -> bool:
        """Only what is before the first broken block is computed. True where there is one."""
        for at, block in enumerate(request.block_ids):
            if block in broken:
                request.num_computed_tokens = min(request.num_computed_tokens, at * PAGE_SIZE)
                return True
        return False

    def _take_told(self, sent: list[str], received: list[str]) -> None:
        """Every worker has told of these; whoever is named has to be there."""
        self._connector.update_connector_output(ConnectorOutput(finished_recving=set(received)))
        for request_id in received:
            request = self._requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KV:
                self._connector.update_state_after_alloc(request, _Blocks(request.block_ids), 0)
                request.status = Status.RUNNING
            else:
                assert request.status is Status.FINISHED
                self._free(request)
        for request_id in sent:
            assert self._requests[request_id].status is Status.FINISHED
            self._free(self._requests[request_id])

    def _finish(self, request: FakeRequest, *, keep: bool) -> None:
        request.status = Status.FINISHED
        keep_for_connector, _ = self._connector.request_finished(request, request.block_ids)
        if not (keep or keep_for_connector):
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        self.free_blocks.extend(request.block_ids)
        del self._requests[request.request_id]


def _of_all(counts: dict[str, int], told: Sequence[set[str]]) -> list[str]:
    """Which requests all workers have told of by now."""
    for names in told:
        for name in sorted(names):
            counts[name] = counts.get(name, 0) + 1
    over = [name for name, count in counts.items() if count == NUM_WORKERS]
    for name in over:
        del counts[name]
    return over
