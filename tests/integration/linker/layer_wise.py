"""What an engine does around a layer-wise load: admit, launch, finish; and what its request is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from tests.integration.linker.sequences import key_of

from radixlink_contracts import ExternalMatch, LoadAdmitted, LoadMode, PoolName, RequestId

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from tests.integration.linker.rank import Rank
    from tests.integration.linker.replica import Replica

    from radixlink_contracts import BatchIndex, LoadBack, RadixKey, StepReport


@attrs.define(kw_only=True, eq=False)
class RunningRequest:
    """A request on one rank, which notes what it is told. A `RequestKV`.

    Attributes:
        told: (start, slots) of each call of `repoint`.
    """

    request_id: RequestId
    key: RadixKey
    told: list[tuple[int, torch.Tensor]] = attrs.field(factory=list)

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        self.told.append((start, indices.clone()))

    @property
    def slots(self) -> torch.Tensor:
        """Where its restored KV lies by now, from where it was first told on."""
        start, slots = self.told[0]
        slots = slots.clone()
        for later, others in self.told[1:]:
            slots[later - start :] = others
        return slots

    def check_bytes(self, rank: Rank) -> None:
        """What a forward would read of it: full attention, and the last window."""
        start, _ = self.told[0]
        slots, page_size = self.slots, rank.model.page_size
        first = start // page_size
        keys = list(rank.page_keys(self.key.token_ids))[first : first + len(slots) // page_size]
        rank.device.check(PoolName.KV, slots, keys)
        pair, window = rank.device.pair, rank.model.window_pages
        if pair is not None:
            partners = pair.swa_indices(slots[-window * page_size :])
            rank.device.check(PoolName.SWA, partners, keys[-window:])


@attrs.frozen(eq=False)
class Running:
    """A request on all ranks."""

    replica: Replica
    of_rank: tuple[RunningRequest, ...]

    @property
    def times_told(self) -> int:
        (times,) = {len(request.told) for request in self.of_rank}
        return times

    def slots(self, rank: Rank) -> torch.Tensor:
        """Where its restored KV lies by now, from where it was first told on."""
        return self.of_rank[rank.rank].slots

    def check_bytes(self) -> None:
        """What a forward would read of it: full attention, and the last window."""
        for rank in self.replica.ranks:
            self.of_rank[rank.rank].check_bytes(rank)


def ask_for(
    replica: Replica, name: str, tokens: Sequence[int], mode: LoadMode = LoadMode.LAYER_WISE
) -> tuple[LoadBack, Running]:
    """Ask to be admitted, after a match that said HIT or not."""
    requests = tuple(
        RunningRequest(request_id=RequestId(name), key=key_of(tokens)) for _ in replica.ranks
    )
    answer = replica.alike(lambda rank: rank.cache.init_load_back(requests[rank.rank], mode))
    replica.check()
    return answer, Running(replica, requests)


def admit(replica: Replica, name: str, tokens: Sequence[int]) -> Running:
    """Match, and have the request admitted."""
    hit = replica.ask(name, tokens)
    assert hit.external is ExternalMatch.HIT, hit
    answer, running = ask_for(replica, name, tokens)
    assert isinstance(answer, LoadAdmitted), answer
    assert answer.num_tokens == hit.host_hit_length
    return running


def launch(replica: Replica) -> list[BatchIndex | None]:
    """Start what is queued, and launch a batch; what each rank's forward waits for."""
    return [rank.cache.ready_to_load_host_cache() for rank in replica.ranks]


def finish(replica: Replica, batches: Sequence[BatchIndex | None]) -> StepReport:
    """The frame after a launch; everything is checked behind it."""
    first, *others = replica.together(lambda rank: rank.cache.finish_loads(batches[rank.rank]))
    assert all(other == first for other in others), [first, *others]
    replica.check()
    return first
