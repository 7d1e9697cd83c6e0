"""The one error tree.

A miss is a value and never an error: errors say that a caller broke a rule (`ContractError`), that there is no room
(`CapacityError`), that a backend failed (`StorageError`), that a transfer failed (`TransferError`) or that ranks do not
agree (`AgreementError`). Messages say what, expected, got, and which id. Every error pickles, so that it can cross a
process boundary with all its fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

    from radixlink_contracts._ids import OperationId


class LinkError(Exception):
    """Root of the tree; abstract: raise one of its children.

    Attributes:
        message: What happened, what was expected, what was got, which id.
        rank: The rank it happened on, where that is known.
        operation: The operation it belongs to, where there is one.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, operation: OperationId | None = None
    ) -> None:
        """Keep the message and where it belongs.

        Raises:
            TypeError: `LinkError` itself was constructed.
        """
        if type(self) is LinkError:
            msg = "LinkError is abstract: raise one of its children"
            raise TypeError(msg)
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.operation = operation

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by class and fields: the constructors take keywords, which the default cannot replay."""
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[LinkError], message: str, fields: dict[str, object]) -> LinkError:
    """Return the error that `__reduce__` took apart."""
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    error.args = (message,)
    return error


class ContractError(LinkError):
    """The caller broke a precondition: a bug, never retried."""


class InvalidTransitionError(ContractError):
    """An event came in a state that does not allow it.

    Attributes:
        state: The state it came in.
        event: The event.
        story: What happened to that object before, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        state: str,
        event: str,
        story: tuple[str, ...] = (),
        operation: OperationId | None = None,
    ) -> None:
        """Keep the transition that was refused."""
        super().__init__(message, operation=operation)
        self.state = state
        self.event = event
        self.story = story


class StaleHandleError(ContractError):
    """A receipt, handle or id was used after it ended, for example a lock that was released before."""


class CapacityError(LinkError):
    """There is no room.

    Attributes:
        needed: What was asked for, in the unit that the message names.
        available: What there was.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        """Keep both numbers."""
        super().__init__(message)
        self.needed = needed
        self.available = available


class StorageError(LinkError):
    """A backend failed.

    Attributes:
        transient: True where the same call may go through later.
    """

    def __init__(
        self,
        message: str,
        *,
        transient: bool = False,
        rank: int | None = None,
        operation: OperationId | None = None,
    ) -> None:
        """Keep whether another try can help."""
        super().__init__(message, rank=rank, operation=operation)
        self.transient = transient


class IntegrityError(StorageError):
    """Stored bytes do not match their key."""


class IdentityError(StorageError):
    """A store belongs to another model, layout or version than the one that opens it."""


class BackendUnavailableError(StorageError):
    """A backend cannot be reached or opened."""


class TransferError(LinkError):
    """A transfer of pages failed; what caused it is chained or, where it is a value, in the message.

    Attributes:
        direction: "load", "offload" or "touch".
        pages: How many pages it was to move.
    """

    def __init__(
        self,
        message: str,
        *,
        direction: str,
        pages: int,
        rank: int | None = None,
        operation: OperationId | None = None,
    ) -> None:
        """Keep what was being moved."""
        super().__init__(message, rank=rank, operation=operation)
        self.direction = direction
        self.pages = pages


class TransferTimeoutError(TransferError):
    """A transfer did not end before its deadline."""


class AgreementError(LinkError):
    """Ranks do not agree, or one did not answer in time. Raised on every rank alike; fatal until `reset`.

    Attributes:
        by_rank: What is known of each rank, by rank.
    """

    def __init__(
        self, message: str, *, by_rank: Mapping[int, str], rank: int | None = None
    ) -> None:
        """Keep what each rank said."""
        super().__init__(message, rank=rank)
        self.by_rank = dict(by_rank)
