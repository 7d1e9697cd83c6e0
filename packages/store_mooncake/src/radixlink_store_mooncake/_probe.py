"""A program that connects as a store would, and ends at once: 0 where that worked.

Mooncake's `setup` holds Python's lock, and a listener that is no master keeps it for minutes. So a
process tries it that can be killed.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_store_mooncake._engine import MooncakeClient


def main(arguments: list[str]) -> None:
    """Connect without giving memory."""
    local_hostname, metadata_server, protocol, device_name, master = arguments
    module = importlib.import_module("mooncake.store")
    client = cast("Callable[[], MooncakeClient]", module.MooncakeDistributedStore)()
    code = client.setup(local_hostname, metadata_server, 0, 0, protocol, device_name, master)
    # Disconnecting takes a second, and the master does not need it.
    os._exit(code != 0)


if __name__ == "__main__":
    main(sys.argv[1:])
