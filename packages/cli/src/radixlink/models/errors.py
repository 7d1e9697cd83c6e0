"""The errors of preparing a model, each with an exit code of its own.

All other codes are in `radixlink.errors`.
"""

from radixlink.errors import CommandError

__all__ = [
    "MissingExtraError",
    "ModelCacheError",
    "ModelDownloadError",
    "ModelNotFoundError",
]


class ModelNotFoundError(CommandError):
    """The name is no known model, the path is no model directory, or what is there does not load."""

    exit_code = 3


class ModelDownloadError(CommandError):
    """The download failed, or what arrived does not match the pinned digests."""

    exit_code = 4


class ModelCacheError(CommandError):
    """The cache directory cannot hold the model: space, permission, or a lock held too long."""

    exit_code = 5


class MissingExtraError(CommandError):
    """A module of an optional dependency is missing; the message says what to install."""

    exit_code = 6
