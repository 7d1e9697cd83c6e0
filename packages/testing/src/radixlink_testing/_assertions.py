"""Has pytest rewrite the assertions of the suites, so that a failure shows both sides.

pytest does that by itself only for test files; it must be told before a module is imported first.
"""

from __future__ import annotations

from typing import Final

import pytest

SUITES: Final = (
    "radixlink_testing._lifetime_cases",
    "radixlink_testing._opener_cases",
    "radixlink_testing._page_cases",
    "radixlink_testing._page_store_machine",
    "radixlink_testing._places",
    "radixlink_testing.store_consumers",
    "radixlink_testing.store_peers",
)

pytest.register_assert_rewrite(*SUITES)
