"""Insert: a computed or restored sequence enters the tree."""

from __future__ import annotations

import bisect
import enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from radixlink_contracts._ids import NodeId
    from radixlink_contracts._keys import RadixKey
    from radixlink_contracts._pools import ComponentType
    from radixlink_contracts.actions import CacheAction


class InsertOrigin(enum.Enum):
    """Where the pages came from; decides whether they are offered to the store."""

    #: The engine computed them: new nodes are offered for offload.
    COMPUTED = "computed"
    #: A store holds them: new nodes are born stored and are not offered again.
    RESTORED = "restored"


class AdoptedRanges:
    """Which token ranges of an insert's value the tree took, for each component: a true union of intervals.

    Ranges are half-open and absolute in the sequence. They may be recorded in any order and may overlap or touch; what
    comes out is ascending and disjoint.
    """

    def __init__(self) -> None:
        """Start with nothing adopted."""
        self._bounds: dict[ComponentType, list[int]] = {}

    def record(self, component: ComponentType, start: int, end: int) -> None:
        """Add [start, end); an empty range adds nothing.

        Cost: O(log n + merged) for n disjoint ranges, and O(1) for a walk that only moves forward.
        """
        if start >= end:
            return
        # A flat list of bounds: even places open a range, odd places close it.
        bounds = self._bounds.setdefault(component, [])
        low = bisect.bisect_left(bounds, start)
        high = bisect.bisect_right(bounds, end)
        replacement: list[int] = []
        if low % 2 == 0:
            replacement.append(start)
        if high % 2 == 0:
            replacement.append(end)
        bounds[low:high] = replacement

    def ranges(self, component: ComponentType) -> tuple[tuple[int, int], ...]:
        """The ranges of one component, ascending and disjoint."""
        bounds = self._bounds.get(component, [])
        return tuple(zip(bounds[::2], bounds[1::2], strict=True))


@attrs.frozen(kw_only=True, eq=False)
class InsertParams:
    """What to insert.

    Attributes:
        key: The sequence; only its whole pages enter.
        value: The device slot of each token. Shape: (num_tokens,) int64, on the device of the allocator's slots. The
            tree copies what it takes; the actions hold slices of it, so the caller must not change it before they are
            carried out: by a controller, once the batches launched so far are processed.
        prev_prefix_len: Tokens at the front that the tree already owns (what the request matched): never given back
            as duplicates.
        inserted_len: Tokens that an earlier insert of the same request already counted as a hit.
        prompt_len: Tokens of the prompt: what follows gets a node of its own, so that it can be given up alone. 0 for
            no such cut.
        priority: Eviction priority, for the policies that go by one.
        origin: Where the pages came from.
        track_adopted_ranges: Record in the result which ranges of `value` the tree took.
        component_evicted_seqlens: For each auxiliary component, the token below which the request's own state is
            already gone: a multiple of the page size. Of use with SWA.
        late_windows: Ranges of tokens [start, end), ascending, below `prev_prefix_len`, in whole pages, each up to the
            end of a node without a window: window slots have come beside the tree's own full slots there.
        mamba_value: The slot of the state at the end of the key, which then is whole pages. The tree's from now on,
            unless `InsertResult.mamba_exist`.
    """

    key: RadixKey
    value: torch.Tensor
    prev_prefix_len: int = 0
    inserted_len: int = 0
    prompt_len: int = 0
    priority: int = 0
    origin: InsertOrigin = InsertOrigin.COMPUTED
    track_adopted_ranges: bool = False
    component_evicted_seqlens: Mapping[ComponentType, int] = attrs.field(factory=dict)
    late_windows: tuple[tuple[int, int], ...] = ()
    mamba_value: int | None = None


@attrs.frozen(kw_only=True, eq=False)
class InsertResult:
    """What the tree made of it.

    Attributes:
        prefix_len: Tokens that were there before.
        total_len: Tokens of the key that are in the tree now (whole pages).
        last_device_node: The node where the insert ended.
        cache_actions: Of a tree: what its caller has to carry out, in this order. Of a controller: none, since it has
            carried them out, and what it freed may be another request's by now.
        adopted_ranges: Which ranges of the value the tree took; None where nobody asked.
        mamba_exist: The end already had a state, so the caller keeps its own.
        hot_nodes: Nodes of the path, root first, that are stored and used again long after the store was last known
            to have used them: to be touched there. Empty without a linker that touches.
    """

    prefix_len: int
    total_len: int
    last_device_node: NodeId
    cache_actions: tuple[CacheAction, ...] = ()
    adopted_ranges: AdoptedRanges | None = None
    mamba_exist: bool = False
    hot_nodes: tuple[NodeId, ...] = ()

    def carried_out(self) -> InsertResult:
        """The same, with no action left: for who carried them out and hands the result on."""
        return attrs.evolve(self, cache_actions=()) if self.cache_actions else self

    def record_adopted_range(self, component: ComponentType, start: int, end: int) -> None:
        """Add [start, end) to what the tree took of one component; nothing where nobody asked."""
        if self.adopted_ranges is not None:
            self.adopted_ranges.record(component, start, end)
