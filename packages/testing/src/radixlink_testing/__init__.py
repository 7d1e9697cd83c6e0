"""Fakes and conformance suites: what a test needs that is not about the part it tests.

* `InMemoryStoreFactory`, `InMemoryPageStore`, `InMemoryPlace`: a page store in a dict.
* `PageStoreTests`: what every page store must do; subclass it and give a `StorePlace`.
* `PageStoreMachine`: the same as a Hypothesis machine.
* `radixlink_testing.pages`: pages whose bytes are a function of their key.
"""

from radixlink_testing._memory_store import (
    InMemoryPageStore,
    InMemoryPlace,
    InMemoryStoreFactory,
)
from radixlink_testing._page_store_machine import PageStoreMachine
from radixlink_testing._page_store_tests import (
    SUITE_CAPACITY_BYTES,
    SUITE_IDENTITY,
    SUITE_LAYOUT,
    PageStoreTests,
    StorePlace,
    read_page_range,
    read_right,
)

__all__ = [
    "SUITE_CAPACITY_BYTES",
    "SUITE_IDENTITY",
    "SUITE_LAYOUT",
    "InMemoryPageStore",
    "InMemoryPlace",
    "InMemoryStoreFactory",
    "PageStoreMachine",
    "PageStoreTests",
    "StorePlace",
    "read_page_range",
    "read_right",
]
