"""How the persistent tier is set up, as a value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from radixlink_contracts import StoreConfig


@attrs.frozen(kw_only=True)
class PersistentSettings:
    """Where pages are kept behind a store, and how much of what.

    Attributes:
        path: The directory, made if only its last part is missing. Several stores, processes and
            nodes may share it; all of them should say the same of it.
        capacity_bytes: What its files may take together.
        file_bytes: How long a file may get: pages are evicted by whole files, and one that is being
            written counts whole. None: a 64th of the capacity, 256 MiB at most. Never longer than
            the process may write (`RLIMIT_FSIZE`), but for one page.
        queue_bytes: Bytes of pages that may wait to be written, for each store. They wait in
            memory where they are; only their keys are queued.
        rescan_s: Seconds after which a look-up looks for files of others again.
        retry_s: Seconds from an error of a write to the next try.
        close_s: For how many seconds closing may write what still waits.
    """

    path: Path
    capacity_bytes: int
    file_bytes: int | None = None
    queue_bytes: int = 1 << 28
    rescan_s: float = 1.0
    retry_s: float = 10.0
    close_s: float = 10.0

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot work."""
        if not self.path.is_absolute():
            raise ContractError(
                f"persistent tier: expected an absolute path, so that every process means the same "
                f"directory, got {str(self.path)!r}"
            )
        if self.capacity_bytes < 1 or self.queue_bytes < 1:
            raise ContractError(
                f"persistent tier: expected capacity and queue of at least 1 byte, got "
                f"{self.capacity_bytes} and {self.queue_bytes}"
            )
        if self.file_bytes is not None and not 1 <= self.file_bytes <= self.capacity_bytes:
            raise ContractError(
                f"persistent tier: expected file_bytes in 1..{self.capacity_bytes}, the capacity, "
                f"got {self.file_bytes}"
            )
        for name in ("rescan_s", "retry_s", "close_s"):
            seconds = getattr(self, name)
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise ContractError(
                    f"persistent tier: expected {name} to be a number of seconds, 0 or more, got "
                    f"{seconds}"
                )

    @classmethod
    def of_config(cls, config: StoreConfig) -> Self | None:
        """What a store's configuration says; None if it asks for no tier.

        Raises:
            ContractError: It says one thing without the other, or what cannot work.
        """
        if not config.persistent_path and not config.persistent_bytes:
            return None
        if not config.persistent_path or config.persistent_bytes < 1:
            raise ContractError(
                f"persistent tier: expected persistent_path and persistent_bytes together, got "
                f"{config.persistent_path!r} and {config.persistent_bytes}"
            )
        return cls(path=Path(config.persistent_path), capacity_bytes=config.persistent_bytes)
