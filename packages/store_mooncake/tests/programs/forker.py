"""A process that forks while it is connected: `forker.py MASTER`.

Its child tries all that an engine may try there, and ends. The process says what the child was told
of each, and then whether its own pages are right.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from radixlink_contracts.errors import BackendUnavailableError, StaleHandleError
from radixlink_store_mooncake import MooncakeSettings, MooncakeStoreFactory
from radixlink_testing import SUITE_LAYOUT, read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable


def _told(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except (BackendUnavailableError, StaleHandleError) as error:
        return type(error).__name__
    return "nothing"


def main(address: str) -> None:
    settings = MooncakeSettings(master_server_address=address, call_timeout_s=10.0)
    factory = MooncakeStoreFactory(settings=settings)
    store = factory.open(SUITE_LAYOUT)
    keys = page_keys(range(2), "forker")
    parts = page_parts(keys, SUITE_LAYOUT)
    assert store.put(keys, parts).complete
    lent = store.lend(2)
    assert lent is not None
    child = os.fork()
    if not child:
        told = [
            _told(lambda: store.contains(keys)),
            _told(lambda: store.open(keys, 0.0)),
            _told(lambda: store.put(keys, parts)),
            _told(lambda: store.lend(2)),
            _told(lambda: store.put_lent(keys, lent)),
            _told(lambda: factory.open(SUITE_LAYOUT)),
            _told(lambda: MooncakeStoreFactory(settings=settings).open(SUITE_LAYOUT)),
            _told(store.close),
            _told(factory.close),
        ]
        sys.stdout.write(f"{' '.join(told)}\n")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    lent.release()
    right = read_right(store, store.open(keys, 0.0)).total
    sys.stdout.write(f"{status} {right}\n")
    factory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
