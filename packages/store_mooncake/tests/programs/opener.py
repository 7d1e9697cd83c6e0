"""Another process that opens a store of a Mooncake: `opener.py MASTER`.

It puts two pages and says who it is. After a line on stdin it looks for them, says how many there
are, closes and ends.
"""

from __future__ import annotations

import os
import sys

from radixlink_store_mooncake import MooncakeSettings, MooncakeStoreFactory
from radixlink_testing import SUITE_LAYOUT
from radixlink_testing.pages import page_keys, page_parts


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main(address: str) -> None:
    settings = MooncakeSettings(master_server_address=address, call_timeout_s=1.0)
    factory = MooncakeStoreFactory(settings=settings)
    store = factory.open(SUITE_LAYOUT)
    keys = page_keys(range(2))
    assert store.put(keys, page_parts(keys, SUITE_LAYOUT)).complete
    _say(os.getpid())
    sys.stdin.readline()
    _say(store.contains(keys).total)
    factory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
