"""What is named like something of ours and is none, as a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from pathlib import Path


@attrs.frozen(kw_only=True)
class Unreadable:
    """A file that is named like one of a store and cannot be read as one; it is left alone.

    Attributes:
        file: The file; or the directory that has such files and cannot be used.
        why: What was expected of it, and what it is.
    """

    file: Path
    why: str
