"""The store factory that a configuration names."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, cast

from radixlink_contracts import StoreConfig
from radixlink_sglang.errors import LinkerConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import StoreFactory
    from radixlink_sglang._config import LinkerConfig

GROUP: Final = "radixlink.stores"
"""The entry point group: each entry is a callable that takes a `StoreConfig` and returns a factory."""


def store_factory(config: LinkerConfig) -> StoreFactory:
    """The factory that a configuration names; it has opened nothing yet.

    Raises:
        LinkerConfigError: There is no such store here.
        ImportError: The store is there and its module does not import.
    """
    return _callable_of(config.store)(
        StoreConfig(
            location=config.location,
            capacity_bytes=config.capacity_bytes,
            timeout_s=config.open_timeout_s,
        )
    )


def _callable_of(name: str) -> Callable[[StoreConfig], StoreFactory]:
    """What makes a factory of a configuration.

    Raises:
        LinkerConfigError: There is none.
    """
    module, separator, attribute = name.partition(":")
    if separator:
        found: object = getattr(importlib.import_module(module), attribute, None)
        if not callable(found):
            raise LinkerConfigError(
                f"linker_extra_config: expected store {name!r} to name a callable in {module}, "
                f"got {found!r}"
            )
        return cast("Callable[[StoreConfig], StoreFactory]", found)
    entries = entry_points(group=GROUP, name=name)
    if not entries:
        known = sorted({entry.name for entry in entry_points(group=GROUP)})
        raise LinkerConfigError(
            f"linker_extra_config: expected store to be one of the installed {known} or "
            f"module:attribute, got {name!r}"
        )
    return cast("Callable[[StoreConfig], StoreFactory]", next(iter(entries)).load())
