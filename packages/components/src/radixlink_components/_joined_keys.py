"""`JoinedPageKeys`: several runs of page keys as one, without hashing any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import PageKeys, PageKeySource

if TYPE_CHECKING:
    from collections.abc import Iterable


class JoinedPageKeys(PageKeySource):
    """The pages of several runs, one run after the other.

    The scheduler thread can cut holes into a run with it, which takes no digest to say.
    """

    def __init__(self, runs: Iterable[PageKeySource]) -> None:
        """Join runs in this order; none of them is resolved before this is."""
        self._runs: Final = tuple(run for run in runs if len(run))
        self._num_pages: Final = sum(map(len, self._runs))
        self._resolved: PageKeys | None = None

    @override
    def __len__(self) -> int:
        """Number of pages."""
        return self._num_pages

    @override
    def span(self, start: int, stop: int) -> PageKeySource:
        """The pages [start, stop), not hashed by asking.

        Cost: O(runs).
        """
        parts: list[PageKeySource] = []
        for run in self._runs:
            low, high = max(start, 0), min(stop, len(run))
            if low < high:
                parts.append(run.span(low, high))
            start, stop = start - len(run), stop - len(run)
        return parts[0] if len(parts) == 1 else JoinedPageKeys(parts)

    @override
    def resolve(self) -> PageKeys:
        """The digests, computed once and kept.

        Raises:
            ContractError: A token cannot be hashed.

        Thread: any but the scheduler's; two that come at once do the work twice and agree.
        Cost: that of each run, and one copy.
        """
        resolved = self._resolved
        if resolved is None:
            resolved = PageKeys(b"".join(run.resolve().data for run in self._runs))
            self._resolved = resolved
        return resolved
