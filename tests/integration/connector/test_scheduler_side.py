"""The scheduler's side alone: what it owns ends with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.connector.skeleton import SchedulerSide
from typing_extensions import override

from radixlink_contracts import (
    CacheIdentity,
    LoadMode,
    PageKeys,
    PoolLayout,
    PoolName,
)
from radixlink_contracts.errors import (
    BackendUnavailableError,
    InvalidTransitionError,
    StaleHandleError,
)
from radixlink_linker import ThreadExecutor
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.faults import FaultyStore

if TYPE_CHECKING:
    from radixlink_contracts import PageStore

KEYS = PageKeys(bytes(32))


class Unclosable(FaultyStore):
    """A store whose close fails once it is closed."""

    @override
    def close(self) -> None:
        super().close()
        raise BackendUnavailableError("lost", transient=False)


def _store() -> PageStore:
    identity = CacheIdentity(
        model="m", revision="1", dtype="uint8", page_size=4, num_layers=1, layout="bytes"
    )
    return InMemoryStoreFactory().open(
        PoolLayout(identity=identity, pool=PoolName.KV, range_bytes=(4,))
    )


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_store_that_cannot_be_closed_leaves_no_other_open(failing: int) -> None:
    stores = [_store() for _ in range(3)]
    shards = [
        Unclosable(store) if number == failing else store for number, store in enumerate(stores)
    ]
    executor = ThreadExecutor()
    scheduler = SchedulerSide(shards=shards, executor=executor, mode=LoadMode.STAGED)
    with pytest.raises(BackendUnavailableError, match="lost"):
        scheduler.shutdown()
    for store in stores:
        with pytest.raises(StaleHandleError):
            store.contains(KEYS)
    with pytest.raises(InvalidTransitionError):
        executor.submit(lambda: None)
