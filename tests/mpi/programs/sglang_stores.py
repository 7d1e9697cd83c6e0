"""A store for SGLang's ranks under one mpirun: a window for each shard, which the replicas share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_store_mpi import MpiStoreFactory
from radixlink_store_mpi._mpi import MPI

if TYPE_CHECKING:
    from radixlink_contracts import StoreConfig

TENSOR_PARALLEL: Final = 2
"""Ranks of a replica; rank r of MPI is rank r % TENSOR_PARALLEL of its replica."""


def factory(config: StoreConfig) -> MpiStoreFactory:
    """What `"store": "sglang_stores:factory"` names. Collective over all ranks."""
    world = MPI.COMM_WORLD
    of_shard = world.Split(world.rank % TENSOR_PARALLEL, world.rank)
    return MpiStoreFactory(config, MPI.Intracomm(of_shard))
