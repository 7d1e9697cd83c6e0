"""Page stores in memory that the ranks of a node share through MPI, and pages between nodes.

* `MpiStoreFactory` opens stores in one window for each layout and node; `open` is collective.
* `NodesPageStore` is what it opens where there are several nodes; `NodeSettings` says how they ask
  each other.
* `radixlink_store_mpi.counters`: what they asked and answered.
* `mpi_stores` makes one of a configuration, with files behind its stores if that asks for them.

Importing this package initialises MPI.
"""

from radixlink_store_mpi._factory import MpiStoreFactory
from radixlink_store_mpi._nodes_store import NodesPageStore
from radixlink_store_mpi._settings import NodeSettings
from radixlink_store_mpi._stores import mpi_stores

__all__ = ["MpiStoreFactory", "NodeSettings", "NodesPageStore", "mpi_stores"]
