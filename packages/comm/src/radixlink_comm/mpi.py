"""The extra `[mpi]`: agreement over mpi4py."""

from radixlink_comm._mpi import MpiGroup

__all__ = ["MpiGroup"]
