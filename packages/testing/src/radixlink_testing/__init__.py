"""Fakes and conformance suites: what a test needs that is not about the part it tests.

* `InMemoryStoreFactory`, `InMemoryPageStore`, `InMemoryPlace`: a page store in a dict.
* `PageStoreTests`: what every page store must do; subclass it and give a `StorePlace`.
* `PageStoreMachine`: the same as a Hypothesis machine.
* `radixlink_testing.store_peers`: the same of several threads, processes or ranks.
* `radixlink_testing.faults`: a page store with faults by plan, and what its user must survive.
* `radixlink_testing.lending`: a page store that lends its memory, and one that borrows.
* `radixlink_testing.allocators`: allocators that tell an observer whose slots come and go.
* `radixlink_testing.pages`: pages whose bytes are a function of their key.
"""

from radixlink_testing._assertions import SUITES as _SUITES
from radixlink_testing._memory_store import (
    InMemoryPageStore,
    InMemoryPlace,
    InMemoryStoreFactory,
)
from radixlink_testing._page_store_machine import PageStoreMachine
from radixlink_testing._page_store_tests import PageStoreTests
from radixlink_testing._places import (
    SUITE_CAPACITY_BYTES,
    SUITE_IDENTITY,
    SUITE_LAYOUT,
    ProcessOpener,
    StorePlace,
    put_pages,
    read_page_range,
    read_right,
    read_variants,
)

del _SUITES

__all__ = [
    "SUITE_CAPACITY_BYTES",
    "SUITE_IDENTITY",
    "SUITE_LAYOUT",
    "InMemoryPageStore",
    "InMemoryPlace",
    "InMemoryStoreFactory",
    "PageStoreMachine",
    "PageStoreTests",
    "ProcessOpener",
    "StorePlace",
    "put_pages",
    "read_page_range",
    "read_right",
    "read_variants",
]
