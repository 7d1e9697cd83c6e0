"""What a frame speaks of, where there is more than it has bits for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from radixlink_comm import SingleRank
from radixlink_contracts import IncLockRefResult, NodeId, OperationId, ReceiptId
from radixlink_linker import LinkerSettings
from radixlink_linker._operation import OffloadOperation
from radixlink_linker._operation_table import OperationTable
from radixlink_linker._ranks import FrameExchange
from radixlink_testing.linkers import ManualClock

if TYPE_CHECKING:
    from radixlink_linker._operation import AnyOperation

RECEIPT = IncLockRefResult(receipt_id=ReceiptId(1), node_id=NodeId(0))


def table_of(most: int) -> OperationTable:
    settings = LinkerSettings(max_operations=most)
    clock = ManualClock()
    return OperationTable(FrameExchange(SingleRank(), settings), clock, settings, 1)


def add(table: OperationTable) -> AnyOperation:
    op, deadline = table.mint()
    operation = OffloadOperation(op, RECEIPT, deadline, ())
    table.add(operation)
    return operation


@given(
    most=st.integers(1, 5),
    count=st.integers(1, 20),
    arrivals=st.lists(st.integers(0, 3), max_size=40),
)
def test_each_operation_has_its_turn_whatever_never_ends(
    most: int, count: int, arrivals: list[int]
) -> None:
    """None is without a frame for longer than the frames that hold all there are, and one."""
    table = table_of(most)
    for _ in range(count):
        add(table)
    without: Counter[OperationId] = Counter()
    for number in [*arrivals, *[0] * 20]:
        for _ in range(number):
            add(table)
        table.step += 1
        spoken = [operation.op for operation in table.of_next_frame()]
        assert spoken == sorted(spoken)
        assert len(spoken) == min(most, len(table))
        for operation in table:
            without[operation.op] += 1
        for op in spoken:
            del without[op]
        assert max(without.values(), default=0) < -(-len(table) // most)


def test_what_fits_is_spoken_of_in_each_frame() -> None:
    table = table_of(3)
    operations = [add(table) for _ in range(3)]
    for _ in range(4):
        table.step += 1
        assert table.of_next_frame() == operations
