"""`StoreLinker` over a store that fails, hangs, lies, is late or does a thing twice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from packages.linker.tests.test_store_linker import HostCopier, Ticket
from typing_extensions import override

from radixlink_contracts import (
    ByteRegion,
    DevicePool,
    LoadMode,
    OperationId,
    Outcome,
    PoolName,
    PoolTransfer,
    RequestId,
)
from radixlink_contracts.errors import StorageError
from radixlink_linker import StoreLinker
from radixlink_testing import SUITE_LAYOUT
from radixlink_testing.store_consumers import CONSUMER_PAGES, StoreConsumer, StoreConsumerTests

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import Completion, PageKeys
    from radixlink_testing.faults import FaultyStore
    from radixlink_testing.store_consumers import MakeConsumer

PAGE_SIZE = SUITE_LAYOUT.identity.page_size
SIZES = SUITE_LAYOUT.range_bytes


class SuitePool(DevicePool):
    """Memory for the pages of a consumer."""

    def __init__(self) -> None:
        self.rows = [torch.zeros((CONSUMER_PAGES, size), dtype=torch.uint8) for size in SIZES]

    @property
    @override
    def name(self) -> PoolName:
        return PoolName.KV

    @property
    @override
    def page_size(self) -> int:
        return PAGE_SIZE

    @property
    @override
    def range_bytes(self) -> tuple[int, ...]:
        return SIZES

    @override
    def page_rows(self, transfer: PoolTransfer) -> torch.Tensor:
        assert transfer.device_indices is not None
        return transfer.device_indices[::PAGE_SIZE] // PAGE_SIZE

    @override
    def region(self, layer_range: int, page_rows: torch.Tensor) -> ByteRegion:
        return ByteRegion(rows=self.rows[layer_range], index=page_rows)


class LinkerConsumer(StoreConsumer):
    """A linker and its pool; once the store waits, the ranks give an operation up."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.pool = SuitePool()
        self.linker = StoreLinker(
            pools={PoolName.KV: self.pool}, stores={PoolName.KV: store}, copier=HostCopier()
        )
        self.num_operations = 0
        self.lookups: list[threading.Thread] = []

    @override
    def lookup(self, keys: PageKeys) -> int | None:
        """As the wrapper does it: on another thread, with an error as an answer."""
        answers: list[int] = []
        ended = threading.Event()

        def work() -> None:
            try:
                result = self.linker.lookup(RequestId("request"), [self.transfer(keys, 0)])
                answers.append(result.restorable_prefix_pages.total)
            except StorageError:
                pass
            finally:
                ended.set()

        thread = threading.Thread(target=work, daemon=True)
        self.lookups.append(thread)
        thread.start()
        while not ended.wait(0.005) and not self.store.waiting.is_set():
            pass
        return answers[0] if answers else None

    @override
    def load(self, keys: PageKeys, at: int) -> bool:
        ticket = self.ticket()
        assert self.linker.load(ticket, [self.transfer(keys, at)], LoadMode.STAGED)
        self.linker.start_layer_wise_loading()
        linker = self.linker
        return self.landed(ticket, linker.num_completed_loads, linker.pop_completed_load)

    @override
    def offload(self, keys: PageKeys, at: int) -> bool:
        ticket = self.ticket()
        assert self.linker.offload(ticket, [self.transfer(keys, at)])
        linker = self.linker
        return self.landed(ticket, linker.num_completed_offloads, linker.pop_completed_offload)

    @override
    def write(self, at: int, pages: list[bytes]) -> None:
        for number, page in enumerate(pages, start=at):
            start = 0
            for rows, size in zip(self.pool.rows, SIZES, strict=True):
                rows[number] = torch.tensor(list(page[start : start + size]))
                start += size

    @override
    def read(self, at: int, count: int) -> list[bytes]:
        return [
            b"".join(bytes(rows[number].tolist()) for rows in self.pool.rows)
            for number in range(at, at + count)
        ]

    @override
    def settle(self) -> None:
        for thread in self.lookups:
            thread.join()
        linker = self.linker
        with linker._board._changed:
            assert linker._board._changed.wait_for(
                lambda: (
                    not linker._board._running
                    and not linker._board._loads
                    and not linker._board._offloads
                ),
                30,
            )
        self.store.waiting.clear()

    @override
    def close(self) -> None:
        self.linker.close()

    def ticket(self) -> Ticket:
        self.num_operations += 1
        return Ticket(OperationId(self.num_operations))

    def transfer(self, keys: PageKeys, at: int) -> PoolTransfer:
        slots = torch.arange(at * PAGE_SIZE, (at + len(keys)) * PAGE_SIZE)
        return PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)

    def landed(
        self, ticket: Ticket, count: Callable[[], int], pop: Callable[[], Completion]
    ) -> bool:
        """Wait for an operation as the ranks do: its slots are free once it is quiesced."""
        changed = self.linker._board._changed
        while not count():
            ticket.decided = self.store.waiting.is_set()
            with changed:
                changed.wait(0.005)
        completion = pop()
        assert completion.op == ticket.op
        assert completion.quiesced
        return completion.outcome is Outcome.LANDED


class TestStoreLinkerFaults(StoreConsumerTests):
    @pytest.fixture
    @override
    def make_consumer(self) -> MakeConsumer:
        return LinkerConsumer
