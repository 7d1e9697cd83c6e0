"""Page stores in memory that the ranks of a node share through MPI.

* `MpiStoreFactory` opens stores in one window for each layout and node; `open` is collective.
* `mpi_stores` makes one of a configuration, with files behind its stores if that asks for them.

Importing this package initialises MPI.
"""

from radixlink_store_mpi._factory import MpiStoreFactory
from radixlink_store_mpi._stores import mpi_stores

__all__ = ["MpiStoreFactory", "mpi_stores"]
