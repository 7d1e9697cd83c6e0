"""What wipes the rows of slots that come back, so that whoever reads one of them sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_testing.allocators import SlotObserver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from radixlink_contracts import PoolName

#: What is in a slot that nobody has: no page has a row of these.
SENTINEL = 0xEE


class Wiper(SlotObserver):
    """Fills the rows of what is given back with the sentinel."""

    def __init__(
        self, rows: Mapping[PoolName, Sequence[torch.Tensor]], slots_of_page: Mapping[PoolName, int]
    ) -> None:
        self._rows = rows
        self._slots_of_page = slots_of_page

    @override
    def given_back(self, pool: PoolName, slots: list[int]) -> None:
        size = self._slots_of_page[pool]
        pages = [slot // size for slot in slots[::size]]
        for rows in self._rows[pool]:
            rows[pages] = SENTINEL
