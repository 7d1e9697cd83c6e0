"""MPI, imported in one place, after what Open MPI must find in the environment before that.

Without an InfiniBand device Open MPI's one-sided component for UCX prints a warning on every rank
when the first window is made. The windows here never leave a node, so the component is left out,
unless the environment already says which one to use.

A forked child must not use it: what its parent has of MPI (connections, numbers of messages, memory
shared with other ranks) would be used by two.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMPI_MCA_osc", "^ucx")

from mpi4py import MPI

__all__ = ["MPI", "is_in_child"]

_PROCESS = os.getpid()


def is_in_child() -> bool:
    """Whether this is a forked child of the process whose MPI this is."""
    return os.getpid() != _PROCESS
