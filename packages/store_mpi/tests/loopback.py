"""Nodes in one process: the messages are those of the real ones, and take no way at all."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from radixlink_contracts import StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_store_mpi._asking import Asking
from radixlink_store_mpi._desk import Desk
from radixlink_store_mpi._nodes_store import NodesPageStore
from radixlink_store_mpi.counters import NodeTally
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from typing_extensions import Buffer

    from radixlink_contracts import PoolLayout

MAX_ANSWER_BYTES = 4 * SUITE_LAYOUT.page_bytes


class Node:
    """A node: a segment of its own, a store on it that asks the others, and a desk that answers."""

    def __init__(self, rank: int, directory: Path, layout: PoolLayout, capacity_bytes: int) -> None:
        self.rank = rank
        self.tally = NodeTally()
        self.desk = Desk(MAX_ANSWER_BYTES, self.tally)
        config = StoreConfig(location=str(directory), capacity_bytes=capacity_bytes)
        self._factory = FileStoreFactory(config)
        self.local = self._factory.open(layout)
        self.desk.serve(self._factory.open(layout))
        #: What is done to an answer on its way; None swallows it.
        self.disturb: Callable[[memoryview], memoryview | None] = lambda answer: answer

    def store(self, nodes: list[Node]) -> NodesPageStore:
        """The store of this node among others."""
        carrier = Loopback(self.rank, {node.rank: node for node in nodes if node is not self})
        asking = Asking(carrier, self.local.layout, MAX_ANSWER_BYTES, self.tally)
        return NodesPageStore(self.local, asking, self.tally)

    def close(self) -> None:
        self.desk.close()
        self._factory.close()


class Loopback:
    """Hands each message to its node's desk. A `Carrier`."""

    def __init__(self, rank: int, nodes: dict[int, Node]) -> None:
        self.rank = rank
        self.nodes = tuple(nodes)
        self._by_rank = nodes
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    def ask(self, messages: Mapping[int, tuple[int, Buffer]]) -> dict[int, memoryview]:
        answers = {}
        for rank, (number, message) in messages.items():
            node = self._by_rank[rank]
            answer = node.disturb(node.desk.answer(message, number))
            if answer is not None:
                answers[rank] = answer
        return answers


def make_nodes(
    directory: Path,
    count: int,
    layout: PoolLayout = SUITE_LAYOUT,
    capacity_bytes: int = SUITE_CAPACITY_BYTES,
) -> list[Node]:
    """Nodes without pages."""
    directory.mkdir(exist_ok=True)
    return [Node(rank, directory / str(rank), layout, capacity_bytes) for rank in range(count)]
