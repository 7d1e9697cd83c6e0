"""Replicas for tests, checked at the end of each with nothing outstanding.

* `models`: which components, and how much room.
* `watched`, `device`: who has which slot, and what is in it.
* `rank`: the real parts of one rank, and an engine.
* `ownership`: what must hold of a rank at any time.
* `replica`: all ranks, in lockstep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest
from tests.integration.linker.models import FULL
from tests.integration.linker.replica import SETTINGS, Replica

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.linker.models import Model

    from radixlink_linker import LinkerSettings

# What a case compares is shown when it fails, as in a test.
pytest.register_assert_rewrite("tests.integration.linker.cases")


class MakeReplica(Protocol):
    """The type of the fixture `make_replica`."""

    def __call__(
        self,
        num_ranks: int = 1,
        *,
        model: Model = FULL,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 32,
        by_hand: bool = False,
        attach: bool = True,
        one_shard: bool = False,
    ) -> Replica: ...


@pytest.fixture
def make_replica() -> Iterator[MakeReplica]:
    """Makes replicas, and checks at the end of the test that nothing of it is left in them."""
    made: list[Replica] = []

    def make(
        num_ranks: int = 1,
        *,
        model: Model = FULL,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 32,
        by_hand: bool = False,
        attach: bool = True,
        one_shard: bool = False,
    ) -> Replica:
        replica = Replica(
            num_ranks,
            model=model,
            settings=settings,
            num_pages=num_pages,
            by_hand=by_hand,
            attach=attach,
            one_shard=one_shard,
        )
        made.append(replica)
        return replica

    yield make
    try:
        for replica in made:
            replica.finish()
    finally:
        for replica in made:
            replica.close()
