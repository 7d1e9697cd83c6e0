"""The one place where foreign exceptions become ours."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from radixlink_contracts.errors import LinkError

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What a file system says when it is full, or a limit of the user or the process is reached."""

_Foreign = TypeVar("_Foreign", bound=Exception)


@contextlib.contextmanager
def map_exceptions(
    mapping: Mapping[type[_Foreign], Callable[[_Foreign], LinkError]],
) -> Iterator[None]:
    """Raise, in place of a foreign exception of the block, what the mapping makes of it.

    Raises:
        LinkError: What the first entry that fits makes; the cause is chained. Other exceptions
        pass.
    """
    try:
        yield
    except tuple(mapping) as error:
        make = next(make for kind, make in mapping.items() if isinstance(error, kind))
        raise make(error) from error
