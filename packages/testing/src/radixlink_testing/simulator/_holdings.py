"""`Holdings`: what requests have of each rank: locks on paths, slots, states, and how they give it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from radixlink_contracts import ComponentType, IncLockRefParams, InsertParams, RadixKey
from radixlink_testing.simulator._device import pages_of
from radixlink_testing.simulator._room import part_of, plot_of
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import IncLockRefResult, InsertResult, NodeId
    from radixlink_testing.simulator._rank import SimulatedRank
    from radixlink_testing.simulator._replica import Replica
    from radixlink_testing.simulator._requests import Part, Request


class Holdings:
    """What requests take of all ranks and give back.

    Thread: one.
    """

    def __init__(self, replica: Replica) -> None:
        """Take of these ranks."""
        self._replica = replica

    def lock(self, nodes: dict[int, NodeId]) -> list[IncLockRefResult]:
        """Lock a path on every rank."""
        receipts: list[IncLockRefResult] = []

        def lock(rank: SimulatedRank) -> None:
            receipts.append(rank.cache.inc_lock_ref(IncLockRefParams(node_id=nodes[rank.rank])))

        self._replica.alike("inc_lock_ref", lock)
        return receipts

    def unlock(self, receipts: Sequence[IncLockRefResult]) -> None:
        """Release a path on every rank."""
        self._replica.alike(
            "dec_lock_ref",
            lambda rank: rank.cache.dec_lock_ref(receipts[rank.rank].to_dec_params()),
        )

    def take(
        self, request: Request, on_device: int, start: int, receipts: list[IncLockRefResult]
    ) -> bool:
        """Slots for the next forward of a request, behind a locked prefix. False for no room."""
        replica = self._replica
        plot = plot_of(request, on_device, start)
        parts = replica.alike_all(
            "alloc",
            lambda rank: part_of(rank, replica.shape, request, plot, receipts[rank.rank]),
            lambda part: part is None,
        )
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            self.free_states(request)
            return False
        request.parts, request.states = found, []
        request.start, request.end = plot.start, plot.end
        return True

    def free(self, request: Request) -> None:
        """The engine frees slots of its own."""
        parts = request.parts

        def free(rank: SimulatedRank) -> None:
            part = parts[rank.rank]
            if len(part.own):
                rank.allocator.free(part.own)
            if part.state is not None and rank.states is not None:
                rank.states.free(part.state)

        if parts:
            self._replica.alike("free", free)

    def free_states(self, request: Request) -> None:
        """The engine frees the states that a request has between two chunks."""
        states, request.states = request.states, []

        def free(rank: SimulatedRank) -> None:
            assert rank.states is not None
            rank.states.free(states[rank.rank])

        if states:
            self._replica.alike("free", free)

    def insert(self, request: Request, *, last: bool) -> dict[int, NodeId]:
        """Insert what a forward computed on every rank.

        Args:
            request: Whose.
            last: Nothing of it is left to compute.

        Returns:
            The node where it ends, by rank.
        """
        nodes: dict[int, NodeId] = {}

        def insert(rank: SimulatedRank) -> int:
            result = self._insert(rank, request, request.parts[rank.rank], last=last)
            nodes[rank.rank] = result.last_device_node
            return result.prefix_len

        self._replica.alike("insert", insert)
        self._check_offered(nodes)
        return nodes

    def _insert(
        self, rank: SimulatedRank, request: Request, part: Part, *, last: bool
    ) -> InsertResult:
        """Insert what one rank computed; what it has of its own behind whole pages goes back."""
        size = request.page_size
        start, end = request.start * size, request.end * size
        floors: dict[ComponentType, int] = {}
        if rank.pair is not None and request.slide:
            floor = max(0, end - rank.tree.sliding_window)
            if floor > start:
                rank.pair.free_swa(part.own[: floor - start])
            if end - start >= rank.tree.sliding_window:
                part.receipt = rank.cache.dec_swa_lock_only(part.receipt.to_dec_params())
            floors[ComponentType.SWA] = floor
        state = part.state if request.keep or last else None
        result = rank.cache.insert(
            InsertParams(
                key=RadixKey(request.tokens[:end], request.namespace),
                value=torch.cat([part.prefix, part.own[: end - start]]),
                prev_prefix_len=start,
                component_evicted_seqlens=floors,
                mamba_value=state,
            )
        )
        if state is not None:
            part.state = None
            if result.mamba_exist:
                assert rank.states is not None
                rank.states.free(state)
        if len(part.own) > end - start:
            rank.allocator.free(part.own[end - start :])
        return result

    def _check_offered(self, nodes: dict[int, NodeId]) -> None:
        """What was just used is in the store or on its way there, where nothing is due or tried later."""
        if self._replica.offers_at_once:
            for rank in self._replica.ranks:
                node = nodes[rank.rank]
                path = pages_of(rank.tree.path_indices(node), rank.tree.page_size)
                left = rank.device.not_offered(path, rank.tree.node(node).mamba_slot)
                if left and not (rank.cache.holders().due_offloads or rank.tree.held_back(node)):
                    rank.watch.breach(
                        Rule.STORED, f"{left[0]} is in the tree, used, and offered to no store"
                    )
