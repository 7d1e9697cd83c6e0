"""The tree core of radixlink: match, insert, lock and evict over pages of tokens, and page hashes.

It decides and returns actions; it does no I/O, reads no clock and starts no thread.
"""

from radixlink_tree._core import UnifiedTreeCore
from radixlink_tree._hashing import hash_pages, namespace_seed
from radixlink_tree._invariants import check_invariants
from radixlink_tree._mamba import StateRules
from radixlink_tree._policies import EvictionPolicy

__all__ = [
    "EvictionPolicy",
    "StateRules",
    "UnifiedTreeCore",
    "check_invariants",
    "hash_pages",
    "namespace_seed",
]
