"""`Ranks`: who shares pages, which of them share memory, and who speaks for a node."""

from __future__ import annotations

from typing import Self

import attrs

from radixlink_store_mpi._mpi import MPI


@attrs.frozen(kw_only=True, eq=False)
class Ranks:
    """The ranks of one communicator, by node.

    Attributes:
        comm: All of them.
        node: Those that share memory with this one.
        leaders: Of each node the rank in `comm` that speaks for it, ascending.
        leader: That of this node.
    """

    comm: MPI.Intracomm
    node: MPI.Intracomm
    leaders: tuple[int, ...]
    leader: int

    @classmethod
    def of(cls, comm: MPI.Intracomm, fake_nodes: int) -> Self:
        """Group the ranks of a communicator, of which all errors become exceptions.

        Args:
            comm: Kept, not duplicated.
            fake_nodes: Into how many nodes those of one machine are split, as evenly as may be.

        Ranks: all of `comm` (collective).
        """
        machine = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        node = machine.Split(part_of(machine.rank, machine.size, fake_nodes), machine.rank)
        machine.Free()
        assert isinstance(node, MPI.Intracomm)
        for each in (comm, node):
            each.Set_errhandler(MPI.ERRORS_RETURN)
        leader: int = node.bcast(comm.rank, 0)
        leaders: list[int] = comm.allgather(leader)
        return cls(comm=comm, node=node, leaders=tuple(sorted(set(leaders))), leader=leader)

    @property
    def leads(self) -> bool:
        """True on the rank that speaks for its node."""
        return self.comm.rank == self.leader

    @property
    def others(self) -> tuple[int, ...]:
        """The leaders of other nodes."""
        return tuple(rank for rank in self.leaders if rank != self.leader)


def part_of(rank: int, size: int, parts: int) -> int:
    """Which part a rank is in when ranks are split into parts of neighbours, as evenly as may be.

    Returns:
        0..parts-1; with more parts than ranks each rank is alone in one.
    """
    return rank * parts // size
