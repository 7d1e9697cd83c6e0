"""Page stores in memory that the ranks of a node share through MPI.

* `MpiStoreFactory` opens stores in one window for each layout and node; `open` is collective.

Importing this package initialises MPI.
"""

from radixlink_store_mpi._factory import MpiStoreFactory

__all__ = ["MpiStoreFactory"]
