"""One of two ranks, without MPI: which it is, and what it takes for a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import pytest

from radixlink.demo._rank import ForgetfulStore, _Rank, shard_of, torch_environment
from radixlink.errors import LaunchError, ReplicaError
from radixlink_contracts import Shard

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from radixlink_contracts import PageStore
    from radixlink_transformers import CausalModel, TransformersEngine


@attrs.frozen
class World:
    """What a rank asks of its communicator."""

    rank: int
    size: int

    def Get_rank(self) -> int:  # noqa: N802 -- as MPI has it
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 -- as MPI has it
        return self.size


def test_a_rank_is_told_its_number_by_mpi_whoever_launched_it() -> None:
    shard = shard_of(cast("Intracomm", World(1, 2)))
    assert shard == Shard(index=1, count=2)
    assert torch_environment(shard) == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


def test_a_rank_whose_launcher_is_of_another_mpi_is_alone_and_says_so() -> None:
    with pytest.raises(LaunchError, match=r"expected an MPI job of 2 ranks, rank 0 got one of 1"):
        shard_of(cast("Intracomm", World(0, 1)))


class StuckEngine:
    """An engine whose store takes nothing."""

    def generate(self, *_: object) -> None:
        """Answer something."""

    def settle(self, timeout_s: float) -> bool:
        return False


def test_a_store_that_does_not_take_the_pages_is_told_as_that() -> None:
    rank = _Rank(
        engine=cast("TransformersEngine", StuckEngine()),
        model=cast("CausalModel", None),
        store=ForgetfulStore(cast("PageStore", None)),
        index=1,
    )
    with pytest.raises(ReplicaError, match=r"rank 1, 'first': the store did not take the pages"):
        rank.answer("first", (1, 2))
