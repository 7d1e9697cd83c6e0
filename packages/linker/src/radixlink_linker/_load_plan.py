"""What a load has to bring of each component: what its end needs and the device lacks, no more.

A part of a sequence may lie on the device for one component and not for another: full attention
stays where a window or a state was given up. Pages are counted from where the lookup began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import attrs

from radixlink_contracts import ComponentType, PageBits, PageKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from radixlink_contracts import NodeId, PageKeySource, PrefixHoldings


@attrs.frozen(kw_only=True)
class LoadPlan:
    """What one load brings, and whereto. Tokens are those of its sequence.

    Attributes:
        start: Where the device prefix ends.
        full_start: Where the device's part of full attention ends, at most `end`.
        end: Token behind the last page that can be used after the load.
        node_id: The node where `full_start` is.
        missing: The pages of each component that it brings; none is empty.
        late_windows: Where it brings windows for full slots that are the tree's, ascending ranges.
    """

    start: int
    full_start: int
    end: int
    node_id: NodeId
    missing: Mapping[ComponentType, PageBits] = attrs.field(hash=False)
    late_windows: tuple[tuple[int, int], ...] = ()


def held_pages(
    holdings: PrefixHoldings,
    kinds: Sequence[ComponentType],
    *,
    start: int,
    num_pages: int,
    page_size: int,
) -> dict[ComponentType, PageBits]:
    """Which pages behind a token the device holds of each component; a state is at the end of its page.

    Args:
        holdings: Of the sequence.
        kinds: The components.
        start: Token; a multiple of the page size.
        num_pages: How many pages there are behind it.
        page_size: Tokens.
    """

    def pages(first: int, last: int) -> int:
        """A bit for each whole page between two tokens."""
        low = max(0, (first - start) // page_size)
        high = min(num_pages, (last - start) // page_size)
        return (1 << high) - (1 << low) if low < high else 0

    held: dict[ComponentType, PageBits] = {}
    for kind in kinds:
        mask = 0
        match kind:
            case ComponentType.FULL:
                mask = pages(0, holdings.full_len)
            case ComponentType.SWA:
                for first, last in holdings.windows:
                    mask |= pages(first, last)
            case ComponentType.MAMBA:
                for end in holdings.states:
                    mask |= pages(end - page_size, end)
            case _:
                assert_never(kind)
        held[kind] = PageBits(mask, num_pages)
    return held


def missing_pages(
    held: Mapping[ComponentType, PageBits], *, skipped: int, stop: int, window_pages: int
) -> dict[ComponentType, PageBits]:
    """Which pages a load up to page `stop` has to bring of each component; components without are left out.

    Args:
        held: What the device holds of each.
        skipped: Pages of the device prefix, which lack nothing.
        stop: Page behind the last one.
        window_pages: Pages of a window.
    """
    missing: dict[ComponentType, PageBits] = {}
    for kind, there in held.items():
        match kind:
            case ComponentType.FULL:
                first = skipped
            case ComponentType.SWA:
                first = max(skipped, stop - window_pages)
            case ComponentType.MAMBA:
                first = stop - 1
            case _:
                assert_never(kind)
        needed = PageBits((1 << stop) - (1 << first), there.count)
        lacking = needed & ~there
        if lacking.total:
            missing[kind] = lacking
    return missing


def keys_of(keys: PageKeySource, pages: PageBits) -> PageKeySource:
    """The keys of some pages of a run; nothing is hashed."""
    runs = tuple(pages.runs())
    if len(runs) == 1:
        return keys.span(*runs[0])
    return KeyRuns(tuple(keys.span(start, stop) for start, stop in runs))


@attrs.frozen
class KeyRuns:
    """Several runs of pages as one. A `PageKeySource`.

    Attributes:
        runs: Each is not empty.
    """

    runs: tuple[PageKeySource, ...]

    def __len__(self) -> int:
        """Number of pages."""
        return sum(map(len, self.runs))

    def span(self, start: int, stop: int) -> PageKeySource:
        """The pages [start, stop) of all of them."""
        spans: list[PageKeySource] = []
        at = 0
        for run in self.runs:
            first, last = max(start - at, 0), min(stop - at, len(run))
            if first < last:
                spans.append(run.span(first, last))
            at += len(run)
        return KeyRuns(tuple(spans))

    def resolve(self, pause: Callable[[], None] | None = None) -> PageKeys:
        """The digests; see `PageKeySource.resolve`."""
        return PageKeys(b"".join([run.resolve(pause).data for run in self.runs]))
