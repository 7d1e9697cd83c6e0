"""MPI, imported in one place, after what Open MPI must find in the environment before that.

Without an InfiniBand device Open MPI's one-sided component for UCX prints a warning on every rank
when the first window is made. The windows here never leave a node, so the component is left out,
unless the environment already says which one to use.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMPI_MCA_osc", "^ucx")

from mpi4py import MPI

__all__ = ["MPI"]
