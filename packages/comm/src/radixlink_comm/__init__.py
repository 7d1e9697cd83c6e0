"""Rank groups: agreement between the ranks of an engine, over whatever they communicate by.

`SingleRank` and `ThreadGroup` need nothing. The other two are extras and are imported by name, so
that importing this package loads neither torch nor MPI: `radixlink_comm.torch.TorchGroup` and
`radixlink_comm.mpi.MpiGroup`.
"""

from radixlink_comm._health import ROLL_CALL_S
from radixlink_comm._single import SingleRank
from radixlink_comm._threads import ThreadGroup

__all__ = ["ROLL_CALL_S", "SingleRank", "ThreadGroup"]
