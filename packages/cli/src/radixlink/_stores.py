"""Stores by name, as installed packages offer them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, cast

from radixlink.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    from radixlink_contracts import StoreConfig, StoreFactory

GROUP: Final = "radixlink.stores"
"""The entry point group: each entry is a callable that takes a `StoreConfig` and returns a `StoreFactory`."""


def known_stores() -> list[str]:
    """The names of the stores that are installed."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def require_store(name: str) -> EntryPoint:
    """The entry point of an installed store; nothing is imported.

    Raises:
        StoreError: No such store is installed.
    """
    entries = entry_points(group=GROUP, name=name)
    if not entries:
        msg = f"--store {name}: expected one of the installed stores {known_stores()}"
        raise StoreError(msg)
    return next(iter(entries))


def store_factory(name: str, config: StoreConfig) -> StoreFactory:
    """The factory of an installed store.

    Raises:
        StoreError: No such store is installed, or its package does not import.
    """
    entry = require_store(name)
    try:
        make = cast("Callable[[StoreConfig], StoreFactory]", entry.load())
    except ImportError as error:
        msg = f"--store {name}: {entry.value} does not import: {error}"
        raise StoreError(msg) from error
    return make(config)
