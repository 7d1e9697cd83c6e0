"""A worker's side: moves the KV of one worker."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Final

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
from radixlink_contracts.errors import TransferTimeoutError
from radixlink_linker import StoreLinker
from radixlink_pools import DevicePoolEntry, byte_rows

from ._ordered_copier import OrderedCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from radixlink_contracts import BatchIndex, Completion, Copier, PageStore
    from radixlink_linker import StoreLinkerSettings

    from ._engine import Metadata, Move
    from ._ordered_copier import Event

_COPY_TIMEOUT_S: Final = 30.0
_POLL_INTERVAL_S: Final = 0.001


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
        self,
        *,
        store: PageStore,
        copier: Copier,
        mode: LoadMode,
        apart: bool = False,
        new_event: Callable[[], Event] | None = None,
        settings: StoreLinkerSettings | None = None,
    ) -> None:
        """Have no blocks yet.

        Args:
            store: Opened with this worker's layout. Owns: this.
            copier: Between the device of the blocks and the host.
            mode: As on the scheduler's side.
            apart: Keys and values of a layer are apart: its tensor is (2, blocks, ...).
            new_event: `record_cuda_event`, or the like of another device; None: forwards have run
                when their call returns, as on a CPU.
            settings: Of the linker.
        """
        self._store: Final = store
        self._page_size: Final = store.layout.identity.page_size
        self._ordered: Final = None if new_event is None else OrderedCopier(copier, new_event)
        self._copier: Final = self._ordered or copier
        self._mode: Final = mode
        self._apart: Final = apart
        self._settings: Final = settings
        self._linker: StoreLinker | None = None
        self._layers: dict[str, int] = {}
        self._ids: Final = count()
        self._metadata: Metadata | None = None
        self._batch: BatchIndex | None = None
        self._loads: dict[OperationId, Ticket] = {}
        self._offloads: dict[OperationId, Ticket] = {}
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._broken_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Move blocks of these tensors from now on.

        Args:
            kv_caches: The tensor of each layer, by its name: the numbers in the names say in which
                order the model runs them. Shape: (blocks, ...), or (2, blocks, ...) where keys and
                values are apart.

        Raises:
            ContractError: A block is not one run of memory in its tensor, or not as the store's
                layout has it.
        """
        names = sorted(kv_caches, key=_in_model_order)
        self._layers = {name: layer for layer, name in enumerate(names)}
        rows: list[torch.Tensor] = []
        layers: list[int] = []
        for name, layer in self._layers.items():
            ranges = kv_caches[name].unbind() if self._apart else (kv_caches[name],)
            rows.extend(map(byte_rows, ranges))
            layers.extend([layer] * len(ranges))
        pool = DevicePoolEntry(PoolName.KV, rows, self._page_size, layers=layers)
        self._linker = StoreLinker(
            pools={PoolName.KV: pool},
            stores={PoolName.KV: self._store},
            copier=self._copier,
            settings=self._settings,
        )

    @property
    def linker(self) -> StoreLinker:
        """What moves the bytes."""
        assert self._linker is not None, "the caches are registered first"
        return self._linker

    def handle_preemptions(self, metadata: Metadata) -> None:
        """Nothing: no copy touches the blocks of a request that runs, when its step is over.

        Only finished requests are stored. A load layer by layer ends within its step, and a request
        with an asynchronous one waits, and is not preempted.
        """

    def shutdown(self) -> None:
        """End all transfers, then close the store.

        Raises:
            TransferTimeoutError: A copy did not end in time; the store is closed all the same.
        """
        try:
            if self._linker is not None:
                self._linker.close()
        finally:
            self._store.close()

    def bind_connector_metadata(self, metadata: Metadata) -> None:
        """What to do in this step."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._metadata = None

    def start_load_kv(self, forward_context: object) -> None:
        """Start all loads of the step; the forward waits for those that are layer by layer.

        Whatever cannot be started is a load that failed: that costs a recompute.
        """
        del forward_context
        assert self._metadata is not None, "metadata is bound first"
        if self._metadata.loads and self._ordered is not None:
            # Forwards before this one may still read what was in these blocks.
            self._ordered.record()
        for move in self._metadata.loads:
            ticket = self._ticket(move, self._loads)
            try:
                accepted = self.linker.load(ticket, [self._transfer(move)], self._mode)
            except Exception:  # noqa: BLE001 - a store hangs, or whatever else it is
                accepted = False
            if not accepted:
                self._end(self._loads, ticket, failed=True)
        try:
            self._batch = self.linker.start_layer_wise_loading()
        except Exception:  # noqa: BLE001 - no thread can be had: what is queued will not begin
            for ticket in list(self._loads.values()):
                if self.linker.cancel_queued_load(ticket.op):
                    self._end(self._loads, ticket, failed=True)
        self.linker.layer_done_counter.set_consumer(self._batch)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer is there, or will never be."""
        self.linker.layer_done_counter.wait_until(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Nothing: pages are stored whole, when their request is finished."""

    def wait_for_save(self) -> None:
        """The forward ended: settle its layer-wise loads, and start the offloads of the step.

        Offloads are not waited for: vLLM keeps the blocks of a finished request until it is told.
        """
        assert self._metadata is not None, "metadata is bound first"
        batch, self._batch = self._batch, None
        if not self.linker.finish_layer_wise_loading(batch):
            self._give_up_loads()
        self.linker.layer_done_counter.set_consumer(None)
        if self._metadata.offloads and self._ordered is not None:
            # The forwards that write these blocks are launched by now, and may not have run.
            self._ordered.record()
        for move in self._metadata.offloads:
            ticket = self._ticket(move, self._offloads)
            try:
                accepted = self.linker.offload(ticket, [self._transfer(move)])
            except Exception:  # noqa: BLE001 - it is not stored, and that is all
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
        for _ in range(self.linker.num_completed_loads()):
            self._note(self._loads, self.linker.pop_completed_load())
        for _ in range(self.linker.num_completed_offloads()):
            self._note(self._offloads, self.linker.pop_completed_offload())

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


def _in_model_order(name: str) -> list[tuple[int, str]]:
    """Sorts `layers.2` before `layers.10`, whatever the order in which an engine names them."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
