"""An engine that calls a connector as vLLM does, on arithmetic in the place of a model.

One process plays the scheduler and two workers. The KV of a token in a layer follows from that of
the token before, so that what comes of a wrong block is a wrong answer.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs
import torch
from tests.integration.connector.skeleton import SchedulerSide, WorkerSide

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName, Shard
from radixlink_linker import StoreLinker, StoreLinkerSettings, ThreadExecutor
from radixlink_pools import CpuCopier, DevicePoolEntry, byte_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.connector.skeleton import Metadata

    from radixlink_contracts import LoadMode, PageStore, StoreFactory

NUM_WORKERS: Final = 2
NUM_LAYERS: Final = 3
PAGE_SIZE: Final = 4
_PRIME: Final = 1_000_003
_LAYERS: Final = [f"model.layers.{index}.self_attn" for index in range(NUM_LAYERS)]


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


def _next_state(before: int, token: int, layer: int, worker: int) -> int:
    return (before * 31 + (token + 1) * (layer + 7) + worker) % _PRIME


def answer_of(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What any engine has to answer, computed without blocks."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        states = [0] * (NUM_LAYERS * NUM_WORKERS)
        for token in tokens:
            states = [
                _next_state(state, token, index % NUM_LAYERS, index // NUM_LAYERS)
                for index, state in enumerate(states)
            ]
        tokens.append(sum(states) % 251)
    return tokens[len(prompt) :]


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
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    block_ids: list[int] = attrs.field(factory=list)
    num_external_tokens: int = 0
    #: Tokens in front of the first block that an asynchronous load did not bring.
    num_good: int = 1 << 30
    #: Tokens that forwards ran for it, those whose results were dropped included.
    num_run: int = 0

    @property
    def answer(self) -> list[int]:
        """What was generated."""
        return self.all_token_ids[self.num_prompt_tokens :]


@attrs.frozen
class _Blocks:
    block_ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.block_ids,)


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
        settings: StoreLinkerSettings,
    ) -> None:
        self._index: Final = index
        self._kv: Final = [
            torch.full((num_blocks, PAGE_SIZE), -1, dtype=torch.int64) for _ in range(NUM_LAYERS)
        ]
        pool = DevicePoolEntry(PoolName.KV, [byte_rows(layer) for layer in self._kv], PAGE_SIZE)
        self.linker: Final = StoreLinker(
            pools={PoolName.KV: pool},
            stores={PoolName.KV: store},
            copier=CpuCopier(),
            settings=settings,
        )
        self._connector: Final = WorkerSide(self.linker, _LAYERS, PAGE_SIZE, mode)

    def execute(self, requests: Sequence[FakeRequest], metadata: Metadata) -> WorkerOutput:
        """One step: a forward over all that is scheduled, in vLLM's order of calls."""
        connector = self._connector
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        partial = {request.request_id: 0 for request in requests}
        for layer, name in enumerate(_LAYERS):
            if requests:
                connector.wait_for_layer_load(name)
            for request in requests:
                partial[request.request_id] += self._run(request, layer)
            connector.save_kv_layer(name, self._kv[layer], None)
        connector.wait_for_save()
        sent, received = connector.get_finished(set())
        broken = connector.get_block_ids_with_load_errors()
        connector.clear_connector_metadata()
        return WorkerOutput(
            partial=partial, sent=sent or set(), received=received or set(), broken=broken
        )

    def _run(self, request: FakeRequest, layer: int) -> int:
        kv, blocks = self._kv[layer], request.block_ids
        at = request.num_computed_tokens
        state = int(kv[blocks[(at - 1) // PAGE_SIZE], (at - 1) % PAGE_SIZE]) if at else 0
        for position in range(at, len(request.all_token_ids)):
            state = _next_state(state, request.all_token_ids[position], layer, self._index)
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
        settings: StoreLinkerSettings | None = None,
    ) -> None:
        """Open the store of each worker, once for itself and once for the scheduler's lookups."""
        opened = [factory.open(layout(worker)) for worker, factory in enumerate(stores)]
        shards = [factory.open(layout(worker)) for worker, factory in enumerate(stores)]
        self._stores: Final = [*opened, *shards]
        self._executor: Final = ThreadExecutor()
        self._connector: Final = SchedulerSide(
            shards=shards, page_size=PAGE_SIZE, executor=self._executor, mode=mode
        )
        self._workers: Final = [
            Worker(index, num_blocks, store, mode, settings or StoreLinkerSettings())
            for index, store in enumerate(opened)
        ]
        self.free_blocks: Final = list(range(num_blocks))
        self._requests: Final[list[FakeRequest]] = []
        #: Blocks of finished requests that are being stored.
        self._kept: Final[dict[str, list[int]]] = {}
        self._sent_by: Final[dict[str, int]] = {}
        self._received_by: Final[dict[str, int]] = {}

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> FakeRequest:
        """Take a request in."""
        request = FakeRequest(
            request_id=request_id,
            all_token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
        )
        self._requests.append(request)
        return request

    @property
    def is_idle(self) -> bool:
        """Nothing is asked and nothing is being stored."""
        return not self._kept and all(one.status is Status.FINISHED for one in self._requests)

    @property
    def hangs(self) -> bool:
        """Some worker's store does not return from a call."""
        return any(worker.linker._hanging() is not None for worker in self._workers)

    def step(self) -> None:
        """Schedule, run, and look at the results."""
        for request in self._requests:
            if request.status is Status.WAITING:
                self._schedule(request)
        running = [one for one in self._requests if one.status is Status.RUNNING]
        metadata = self._connector.build_connector_meta(None)
        outputs = [worker.execute(running, metadata) for worker in self._workers]
        # One worker without a block is enough; to be done takes all of them.
        broken = set[int]().union(*(output.broken for output in outputs))
        sent = _of_all(self._sent_by, [output.sent for output in outputs])
        received = _of_all(self._received_by, [output.received for output in outputs])
        for request in self._requests:
            good = next((at for at, block in enumerate(request.block_ids) if block in broken), None)
            if good is not None and request.status is not Status.RUNNING:
                # It counts when the last worker has told of the load, which may be later.
                request.num_good = min(request.num_good, good * PAGE_SIZE)
            if request.request_id in received:
                request.num_computed_tokens = min(request.num_external_tokens, request.num_good)
                self._connector.update_state_after_alloc(request, _Blocks(request.block_ids), 0)
                request.status = Status.RUNNING
            elif request in running:
                self._process(request, good, outputs)
        for request_id in sent:
            self.free_blocks.extend(self._kept.pop(request_id))

    def close(self) -> None:
        """Release everything."""
        for worker in self._workers:
            worker.linker.close()
        self._executor.close()
        for store in self._stores:
            store.close()

    def _schedule(self, request: FakeRequest) -> None:
        found, load_async = self._connector.get_num_new_matched_tokens(request, 0)
        num_blocks = -(-(request.num_prompt_tokens + request.max_tokens) // PAGE_SIZE)
        if found is None or num_blocks > len(self.free_blocks):
            return
        request.block_ids = [self.free_blocks.pop(0) for _ in range(num_blocks)]
        self._connector.update_state_after_alloc(request, _Blocks(request.block_ids), found)
        request.num_external_tokens = found
        if load_async:
            request.status = Status.WAITING_FOR_REMOTE_KV
        else:
            request.num_computed_tokens = found
            request.status = Status.RUNNING

    def _process(
        self, request: FakeRequest, good: int | None, outputs: Sequence[WorkerOutput]
    ) -> None:
        request.num_run += len(request.all_token_ids) - request.num_computed_tokens
        if good is not None:
            # Its results count for nothing: it is run again from the first block that is broken.
            request.num_computed_tokens = good * PAGE_SIZE
            return
        request.num_computed_tokens = len(request.all_token_ids)
        token = sum(output.partial[request.request_id] for output in outputs) % 251
        request.all_token_ids.append(token)
        if len(request.answer) == request.max_tokens:
            request.status = Status.FINISHED
            keep, _ = self._connector.request_finished(request, request.block_ids)
            if keep:
                self._kept[request.request_id] = request.block_ids
            else:
                self.free_blocks.extend(request.block_ids)


def _of_all(counts: dict[str, int], told: Sequence[set[str]]) -> list[str]:
    """Which requests all workers have told of by now."""
    for names in told:
        for name in sorted(names):
            counts[name] = counts.get(name, 0) + 1
    over = [name for name, count in counts.items() if count == NUM_WORKERS]
    for name in over:
        del counts[name]
    return over
