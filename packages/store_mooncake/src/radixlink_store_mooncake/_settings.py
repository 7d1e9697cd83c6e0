"""`MooncakeSettings`: where the master is, and how its pages are stored, fetched and waited for."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import attrs

from radixlink_contracts.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

SMALLEST_SEGMENT_BYTES: Final = 16 << 20
"""Mooncake takes no smaller one."""

_MAX_PORT: Final = 65535
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "str": (str,),
}


def _refuse(expected: str, got: object) -> NoReturn:
    raise BackendUnavailableError(f"Mooncake store: expected {expected}, got {got!r}")


@attrs.frozen(kw_only=True)
class MooncakeSettings:
    """How a process uses one Mooncake. The first fields are named as in Mooncake's own configuration.

    Attributes:
        master_server_address: "HOST:PORT" of the `mooncake_master`.
        local_hostname: How other hosts reach this one; empty for the address that this host has on
            its way to the master.
        metadata_server: As the master and the owners have it; "P2PHANDSHAKE" needs no server.
        protocol: "tcp", "rdma", or another that this build of Mooncake has.
        device_name: RDMA devices, separated by commas; empty for none or for discovery.
        global_segment_size: Bytes of memory that this process gives to all; its pages go when it
            does. 0 where owners of their own do that.
        local_buffer_size: Bytes for Mooncake's copying calls, which this store does not use.
        replica_num: Copies of each page. Mooncake makes fewer where it finds no room for all.
        with_hard_pin: Pages are never evicted.
        preferred_segment: The owner that should get pages, by its host name in Mooncake.
        namespace: The first part of every object's name; the layout's fingerprint and the page's
            key follow.
        buffer_bytes: Of one staging buffer. A page must fit.
        num_buffers: How many, all registered with Mooncake at once; each call uses one at a time.
        whole_pages: `open` fetches pages whole where those of one call fit a buffer: one transfer
            for all layers. Else it fetches 64 bytes of each, and each `read` its layer range.
        call_timeout_s: Seconds that one call of Mooncake may take, with all its tries.
        max_late_calls: Calls that have not returned by then; with so many no further one is made.
    """

    master_server_address: str
    local_hostname: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    global_segment_size: int = 0
    local_buffer_size: int = 0
    replica_num: int = 1
    with_hard_pin: bool = False
    preferred_segment: str = ""
    namespace: str = "radixlink"
    buffer_bytes: int = 16 << 20
    num_buffers: int = 4
    whole_pages: bool = True
    call_timeout_s: float = 2.0
    max_late_calls: int = 4

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            BackendUnavailableError: A field has another type, or a value that cannot be.
        """
        for field in attrs.fields(MooncakeSettings):
            value, kind = getattr(self, field.name), str(field.type)
            # To Python a bool is an int.
            if isinstance(value, bool) != (kind == "bool") or not isinstance(value, _KINDS[kind]):
                _refuse(f"{field.name} of type {kind}", value)
        host, _, port = self.master_server_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
            _refuse("master_server_address as HOST:PORT", self.master_server_address)
        for name in ("metadata_server", "protocol", "namespace"):
            if not getattr(self, name):
                _refuse(f"{name} not to be empty", "")
        if 0 < self.global_segment_size < SMALLEST_SEGMENT_BYTES or self.global_segment_size < 0:
            _refuse(
                f"global_segment_size of 0 or at least {SMALLEST_SEGMENT_BYTES}",
                self.global_segment_size,
            )
        for name, least in (("local_buffer_size", 0), ("replica_num", 1), ("buffer_bytes", 4096)):
            if getattr(self, name) < least:
                _refuse(f"{name} of at least {least}", getattr(self, name))
        for name, least in (("num_buffers", 2), ("max_late_calls", 1)):
            if getattr(self, name) < least:
                _refuse(f"{name} of at least {least}", getattr(self, name))
        if not 0 < self.call_timeout_s <= threading.TIMEOUT_MAX:
            _refuse(
                f"call_timeout_s above 0 and at most {threading.TIMEOUT_MAX:g}", self.call_timeout_s
            )

    @property
    def master(self) -> tuple[str, int]:
        """Host and port of the master."""
        host, _, port = self.master_server_address.rpartition(":")
        return host.strip("[]"), int(port)

    @classmethod
    def from_location(cls, location: str) -> MooncakeSettings:
        """The settings that a `StoreConfig.location` names.

        Args:
            location: "HOST:PORT" of a master, or the path of a JSON file with one object, its
                fields those of this class.

        Raises:
            BackendUnavailableError: It is neither, the file cannot be read, or a field is unknown,
                missing, or has a value that cannot be.
        """
        if not location:
            _refuse("a location: HOST:PORT of a mooncake_master, or a JSON file's path", location)
        if not location.endswith(".json"):
            return cls(master_server_address=location)
        try:
            fields = json.loads(Path(location).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BackendUnavailableError(
                f"Mooncake store: expected settings as JSON in {location}, got: {error}"
            ) from error
        if not isinstance(fields, dict):
            _refuse(f"one JSON object in {location}", fields)
        return cls.from_fields(fields, where=location)

    @classmethod
    def from_fields(cls, fields: Mapping[str, object], where: str) -> MooncakeSettings:
        """The settings with these fields.

        Args:
            fields: By name.
            where: Where they are from, for messages.

        Raises:
            BackendUnavailableError: As for `from_location`.
        """
        known = [field.name for field in attrs.fields(cls)]
        unknown = sorted(fields.keys() - set(known))
        if unknown:
            raise BackendUnavailableError(
                f"Mooncake store: expected in {where} only the fields {', '.join(known)}, got also "
                f"{', '.join(unknown)}"
            )
        if "master_server_address" not in fields:
            _refuse(f"the field master_server_address in {where}", sorted(fields))
        # Checked in the constructor, field by field.
        return cls(**fields)  # type: ignore[arg-type]
