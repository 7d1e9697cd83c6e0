"""A connector in the shape of vLLM's `KVConnectorBase_V1`, over radixlink's linker and stores.

packages/linker/CONNECTOR.md explains it. The Protocols are as narrow as this skeleton is: what
vLLM hands in has more.
"""

from __future__ import annotations

import time
from array import array
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

import attrs
import torch

from radixlink_contracts import (
    LoadMode,
    OperationId,
    Outcome,
    PageKeys,
    PoolName,
    PoolTransfer,
)
from radixlink_contracts.errors import LinkError, TransferTimeoutError
from radixlink_tree import hash_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import BatchIndex, Completion, Executor, PageStore, UnifiedCacheLinker

_COPY_TIMEOUT_S: Final = 30.0
_POLL_INTERVAL_S: Final = 0.001


# -- what vLLM hands in -------------------------------------------------------------------------


class Request(Protocol):
    """A request of vLLM's scheduler."""

    @property
    def request_id(self) -> str:
        """Its id."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and answer."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """The first so many are the prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks."""
        ...


class KVCacheBlocks(Protocol):
    """The blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """For each group of layers of the cache, its blocks, first tokens first."""
        ...


# -- what goes from the scheduler to each worker ------------------------------------------------


@attrs.frozen(kw_only=True)
class Move:
    """Blocks to be loaded or stored. It is sent to each worker, so it holds plain values only.

    Attributes:
        request_id: Whose.
        keys: Of the pages, 32 bytes each.
        block_ids: The block of each page.
    """

    request_id: str
    keys: bytes
    block_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Metadata:
    """What workers do in one step; vLLM's `KVConnectorMetadata`.

    Attributes:
        loads: Before, or while, its forward runs.
        offloads: Blocks of requests that are finished.
    """

    loads: tuple[Move, ...] = ()
    offloads: tuple[Move, ...] = ()


# -- the scheduler's side -----------------------------------------------------------------------


@attrs.define(eq=False)
class Lookup:
    """What the stores have of a prompt.

    Attributes:
        num_pages: The answer; None until there is one. Written once, by a thread of the executor.
        keys: Of all whole pages of the prompt; written before `num_pages`.
    """

    num_pages: int | None = None
    keys: PageKeys = attrs.field(factory=PageKeys)


class SchedulerSide:
    """Decides what is loaded and stored. It sees no KV.

    Process: the scheduler's.
    """

    def __init__(
        self, *, shards: Sequence[PageStore], page_size: int, executor: Executor, mode: LoadMode
    ) -> None:
        """Remember nothing yet.

        Args:
            shards: The store of each worker, opened with that worker's layout.
            page_size: Tokens of a block.
            executor: Runs lookups.
            mode: STAGED: vLLM's asynchronous loads. LAYER_WISE: its synchronous ones.
        """
        self._shards: Final = tuple(shards)
        self._page_size: Final = page_size
        self._executor: Final = executor
        self._mode: Final = mode
        self._lookups: dict[str, Lookup] = {}
        self._loads: list[Move] = []
        self._offloads: list[Move] = []

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how much of a prompt can be loaded behind what the device has; None: ask again."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            lookup = self._lookups[request.request_id] = Lookup()
            # The last token of a prompt is always computed.
            tokens = tuple(request.all_token_ids[: request.num_prompt_tokens - 1])
            self._executor.submit(lambda: self._look_up(lookup, tokens))
        if lookup.num_pages is None:
            return None, False
        num_tokens = max(0, lookup.num_pages * self._page_size - num_computed_tokens)
        return num_tokens, num_tokens > 0 and self._mode is LoadMode.STAGED

    def _look_up(self, lookup: Lookup, tokens: tuple[int, ...]) -> None:
        """Thread: any. Whatever goes wrong is a miss."""
        try:
            lookup.keys = page_keys(tokens, self._page_size)
            lookup.num_pages = min(shard.contains(lookup.keys).leading for shard in self._shards)
        except Exception:  # noqa: BLE001 - a store that fails costs a recompute
            lookup.num_pages = 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Queue the load into the blocks that the request was given; 0 tokens are no load.

        After a load it is called once more, with 0; then whoever asks again must not be told of it.
        """
        lookup = self._lookups[request.request_id]
        if not num_external_tokens:
            lookup.num_pages = 0
            return
        assert lookup.num_pages is not None, "tokens are loaded that a lookup has found"
        stop = lookup.num_pages
        start = stop - num_external_tokens // self._page_size
        (block_ids,) = blocks.get_block_ids()
        self._loads.append(
            Move(
                request_id=request.request_id,
                keys=lookup.keys.span(start, stop).data,
                block_ids=tuple(block_ids[start:stop]),
            )
        )
        # Tried once: after a failure vLLM asks again, and the rest is computed.
        lookup.num_pages = 0

    def build_connector_meta(self, scheduler_output: object) -> Metadata:
        """Hand over what was queued in this step, and forget it."""
        del scheduler_output
        metadata = Metadata(loads=tuple(self._loads), offloads=tuple(self._offloads))
        self._loads.clear()
        self._offloads.clear()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Have its whole pages stored; True: its blocks stay until `get_finished` names it."""
        self._lookups.pop(request.request_id, None)
        tokens = tuple(request.all_token_ids[: request.num_computed_tokens])
        keys = page_keys(tokens, self._page_size)
        if not keys.data:
            return False, None
        self._offloads.append(
            Move(
                request_id=request.request_id,
                keys=keys.data,
                block_ids=tuple(block_ids[: len(keys)]),
            )
        )
        return True, None


def page_keys(tokens: Sequence[int], page_size: int) -> PageKeys:
    """The keys of all whole pages of a sequence. Cost: one hash a page."""
    whole = array("q", tokens[: len(tokens) // page_size * page_size])
    return PageKeys(hash_pages(None, whole.tobytes(), page_size))


# -- a worker's side ----------------------------------------------------------------------------


@attrs.define(eq=False)
class Ticket:
    """A load or an offload, as the linker sees it.

    Attributes:
        op: Its id; each worker counts its own.
        move: What it moves.
        decided: Touch its slots no more. Only of a layer-wise load that came too late: for all
            others vLLM keeps the blocks until it is told.
        failed: Some completion said so.
    """

    op: OperationId
    move: Move
    decided: bool = False
    failed: bool = False


class WorkerSide:
    """Moves the KV of one worker.

    Process: the worker's. Thread: the one that runs the model.
    """

    def __init__(
        self, linker: UnifiedCacheLinker, layer_names: Sequence[str], page_size: int, mode: LoadMode
    ) -> None:
        """Have nothing to move.

        Args:
            linker: A `StoreLinker` over this worker's blocks and stores; its pools' layers are
                numbered as `layer_names` are.
            layer_names: vLLM's names of the layers, in the order of the model.
            page_size: Tokens of a block.
            mode: As on the scheduler's side.
        """
        self._linker: Final = linker
        counter = linker.layer_done_counter
        assert counter is not None, "this linker can be waited for layer by layer"
        self._counter: Final = counter
        self._layers: Final = {name: index for index, name in enumerate(layer_names)}
        self._page_size: Final = page_size
        self._mode: Final = mode
        self._ids: Final = count()
        self._metadata: Metadata | None = None
        self._batch: BatchIndex | None = None
        self._loads: dict[OperationId, Ticket] = {}
        self._offloads: dict[OperationId, Ticket] = {}
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._broken_blocks: set[int] = set()

    def bind_connector_metadata(self, metadata: Metadata) -> None:
        """What to do in this step."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._metadata = None

    def start_load_kv(self, forward_context: object) -> None:
        """Start all loads of the step; the forward waits for those that are layer by layer."""
        del forward_context
        assert self._metadata is not None, "metadata is bound first"
        for move in self._metadata.loads:
            ticket = self._ticket(move, self._loads)
            try:
                accepted = self._linker.load(ticket, [self._transfer(move)], self._mode)
            except LinkError:
                # A store hangs: that costs a recompute.
                accepted = False
            if not accepted:
                self._end(self._loads, ticket, failed=True)
        self._batch = self._linker.start_layer_wise_loading()
        self._counter.set_consumer(self._batch)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer is there, or will never be."""
        self._counter.wait_until(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Nothing: pages are stored whole, when their request is finished."""

    def wait_for_save(self) -> None:
        """The forward ended: settle its layer-wise loads, and start the offloads of the step.

        Offloads are not waited for: vLLM keeps the blocks of a finished request until it is told.
        """
        assert self._metadata is not None, "metadata is bound first"
        batch, self._batch = self._batch, None
        if not self._linker.finish_layer_wise_loading(batch):
            self._give_up_loads()
        self._counter.set_consumer(None)
        for move in self._metadata.offloads:
            ticket = self._ticket(move, self._offloads)
            try:
                accepted = self._linker.offload(ticket, [self._transfer(move)])
            except LinkError:
                accepted = False
            if not accepted:
                self._end(self._offloads, ticket, failed=True)
        self._take_completions()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Whose offload, and whose asynchronous load, has ended since: (sent, received)."""
        del finished_req_ids
        self._take_completions()
        sent, received = self._sent, self._received
        self._sent, self._received = set(), set()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks without the bytes that they were to get. Called in each step, after the above."""
        broken, self._broken_blocks = self._broken_blocks, set()
        return broken

    def _give_up_loads(self) -> None:
        """The forward went on without a layer: its loads have failed, and no copy runs any more.

        vLLM may write to their blocks right after this step, so that the end of the copy that runs
        has to be waited for.

        Raises:
            TransferTimeoutError: It did not end.
        """
        for ticket in self._loads.values():
            ticket.failed = ticket.decided = True
        deadline = time.monotonic() + _COPY_TIMEOUT_S
        while self._loads:
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"expected the copy of a load to end within {_COPY_TIMEOUT_S} s",
                    direction="load",
                    pages=sum(len(one.move.block_ids) for one in self._loads.values()),
                )
            time.sleep(_POLL_INTERVAL_S)
            self._take_completions()

    def _ticket(self, move: Move, among: dict[OperationId, Ticket]) -> Ticket:
        ticket = Ticket(op=OperationId(next(self._ids)), move=move)
        among[ticket.op] = ticket
        return ticket

    def _transfer(self, move: Move) -> PoolTransfer:
        first = torch.tensor(move.block_ids, dtype=torch.int64).unsqueeze(1) * self._page_size
        slots = (first + torch.arange(self._page_size)).flatten()
        return PoolTransfer(name=PoolName.KV, keys=PageKeys(move.keys), device_indices=slots)

    def _take_completions(self) -> None:
        for _ in range(self._linker.num_completed_loads()):
            self._note(self._loads, self._linker.pop_completed_load())
        for _ in range(self._linker.num_completed_offloads()):
            self._note(self._offloads, self._linker.pop_completed_offload())

    def _note(self, among: dict[OperationId, Ticket], completion: Completion) -> None:
        ticket = among.get(completion.op)
        if ticket is not None:
            ticket.failed = ticket.failed or completion.outcome is Outcome.FAILED
            # What is not quiesced still touches the blocks; a second completion follows.
            if completion.quiesced:
                self._end(among, ticket, failed=ticket.failed)

    def _end(self, among: dict[OperationId, Ticket], ticket: Ticket, *, failed: bool) -> None:
        del among[ticket.op]
        if among is self._offloads:
            # Stored or not: vLLM only wants its blocks back.
            self._sent.add(ticket.move.request_id)
            return
        if failed:
            self._broken_blocks.update(ticket.move.block_ids)
        if self._mode is LoadMode.STAGED:
            self._received.add(ticket.move.request_id)
