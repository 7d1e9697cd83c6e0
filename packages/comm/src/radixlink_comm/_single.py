"""`SingleRank`: the group of one."""

from __future__ import annotations

from typing import Self

from typing_extensions import override

from radixlink_comm._checked import CheckedGroup, MarkKind


class SingleRank(CheckedGroup):
    r"""A group of one rank: whatever it says is agreed.

    Cost: no communication; `all_and` leaves the words as they are.

    Args:
        epoch: How often the group was renewed.

    >>> group = SingleRank()
    >>> words = bytearray(b"\x05" * 8)
    >>> group.all_and(words, timeout_s=1.0)
    >>> words == bytearray(b"\x05" * 8)
    True
    """

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(rank=0, size=1, epoch=epoch)

    @override
    def _and(self, words: bytearray, deadline: float) -> None:
        pass

    @override
    def _subgroup(self, members: tuple[int, ...], deadline: float) -> Self:
        return type(self)()

    @override
    def _renewed(self, deadline: float) -> Self:
        return type(self)(self._epoch + 1)

    @override
    def _marks(self, kind: MarkKind, mark: str, deadline: float) -> dict[int, str]:
        return {0: mark}

    @override
    def _release(self) -> None:
        pass
