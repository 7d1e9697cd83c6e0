"""Ranks that cannot all build their engine hear of it at once, each with the reason."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from packages.transformers.tests.conftest import tiny
from typing_extensions import override

from radixlink_comm import ThreadGroup
from radixlink_contracts import Shard
from radixlink_contracts.errors import AgreementError, BackendUnavailableError
from radixlink_testing import InMemoryPageStore, InMemoryStoreFactory
from radixlink_transformers import TransformersEngine, build_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PoolLayout, RankGroup, StoreFactory


class ClosedPlace(InMemoryStoreFactory):
    """Opens nothing, by another error than a factory should."""

    @override
    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        raise PermissionError


def _both(build: Callable[[RankGroup], TransformersEngine]) -> list[BaseException | None]:
    """What building failed with, by rank."""
    groups = ThreadGroup.create(2)
    with ThreadPoolExecutor(2) as threads:
        built: list[Future[TransformersEngine]] = [threads.submit(build, group) for group in groups]
        errors = [one.exception(timeout=30) for one in built]
    for group in groups:
        group.close()
    return errors


def _build(group: RankGroup, shard: Shard, stores: StoreFactory) -> TransformersEngine:
    return build_engine(
        tiny("llama"),
        identity_name="tiny",
        revision="1",
        page_size=16,
        num_pages=8,
        stores=stores,
        group=group,
        shard=shard,
    )


def test_two_ranks_of_one_shard_are_refused() -> None:
    stores = InMemoryStoreFactory()
    errors = _both(lambda group: _build(group, Shard(index=0, count=2), stores))
    for error in errors:
        assert isinstance(error, AgreementError)
        assert error.by_rank == {0: "shard 0", 1: "shard 0"}


def test_whatever_a_store_cannot_be_opened_for_the_others_are_told() -> None:
    def build(group: RankGroup) -> TransformersEngine:
        stores = ClosedPlace() if group.rank == 1 else InMemoryStoreFactory()
        return _build(group, Shard(), stores)

    waited, failed = _both(build)
    assert isinstance(failed, PermissionError)
    with pytest.raises(BackendUnavailableError, match="rank 1 could not open its store: Perm"):
        raise waited or AssertionError("rank 0 has an engine")
