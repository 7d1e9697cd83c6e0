"""`LinkerConfig`: what `linker_extra_config` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, cast

import attrs

from radixlink_contracts import MAX_TIMEOUT_S
from radixlink_sglang.errors import LinkerConfigError

_KINDS: Final[Mapping[type, str]] = {str: "a string", int: "an int", float: "a number"}
"""What a field's type is called."""


@attrs.frozen(kw_only=True)
class LinkerConfig:
    """How pages are stored, and how long is waited for a store. All ranks are given the same.

    Attributes:
        store: The name of an installed store (entry point group `radixlink.stores`), or
            "module:attribute" of a callable that takes a `StoreConfig` and returns a
            `StoreFactory`, as an entry point is.
        location: Where the store is, in its own terms; empty for its default.
        capacity_bytes: Room for pages, for each pool of each shard.
        model: The model's name, a part of what its pages are stored under. Empty: the path that
            SGLang was started with.
        revision: Which weights; likewise. Empty: SGLang's `--revision`. One of the two is needed:
            pages of other weights are wrong tokens.
        open_timeout_s: Seconds that opening the store may wait for others.
        lookup_timeout_s: Seconds that a match waits for the store before it is a miss.
        load_timeout_s: Seconds from the start of a batch of loads after which no forward waits.
        offload_timeout_s: Seconds after which an offload counts as failed.
        copy_timeout_s: Seconds after which a transfer whose copy has not ended counts as failed.
        quiesce_timeout_s: Seconds that is waited for the copy of a failed transfer to end before
            it is an error of the engine.
        miss_s: Seconds for which the pages of a failed load count as missing, and everything does
            after the store was late.
        lease_s: Seconds for which the store is asked to keep the pages of a load.
        staging_bytes: Host memory that bytes go through, for each rank.
        max_offloads: Nodes that may be on their way to the store; each stays locked on the device.
            More of them fail at once, and are offered again when they are next used.
    """

    store: str = "file"
    location: str = ""
    capacity_bytes: int = 1 << 30
    model: str = ""
    revision: str = ""
    open_timeout_s: float = 30.0
    lookup_timeout_s: float = 2.0
    load_timeout_s: float = 10.0
    offload_timeout_s: float = 30.0
    copy_timeout_s: float = 10.0
    quiesce_timeout_s: float = 30.0
    miss_s: float = 30.0
    lease_s: float = 10.0
    staging_bytes: int = 16 << 20
    max_offloads: int = 256

    @classmethod
    def of_json(cls, value: object) -> Self:
        """The configuration in what came out of JSON.

        Raises:
            LinkerConfigError: It is no object; or a field is not known, is not of its type, is no
                number above 0, or is a time of more than `MAX_TIMEOUT_S`.
        """
        if not isinstance(value, Mapping):
            raise LinkerConfigError(f"linker_extra_config: expected an object, got {value!r}")
        defaults = attrs.asdict(cls())
        unknown = sorted(value.keys() - defaults.keys())
        if unknown:
            raise LinkerConfigError(
                f"linker_extra_config: expected some of {sorted(defaults)}, got {unknown} too"
            )
        fields = {name: _checked(name, given, defaults[name]) for name, given in value.items()}
        return attrs.evolve(cls(), **cast("dict[str, Any]", fields))


def _checked(name: str, given: object, default: object) -> str | int | float:
    """The value of a field, as it was given.

    Raises:
        LinkerConfigError: It is not of the default's type, or out of range.
    """
    kind = type(default)
    right = isinstance(given, (int, float) if kind is float else kind)
    if isinstance(given, bool) or not right or not isinstance(given, (str, int, float)):
        raise LinkerConfigError(
            f"linker_extra_config: expected {name} to be {_KINDS[kind]}, got {given!r}"
        )
    if isinstance(given, str):
        return given
    # What is no number is above nothing.
    if not given > 0:
        raise LinkerConfigError(f"linker_extra_config: expected {name} above 0, got {given!r}")
    if name.endswith("_s") and given > MAX_TIMEOUT_S:
        raise LinkerConfigError(
            f"linker_extra_config: expected {name} of at most {MAX_TIMEOUT_S:g} s, got {given!r}"
        )
    return given
