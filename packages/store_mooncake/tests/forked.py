"""What a forked child of this process is told."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

_HANGS_S: Final = 20


def told_in_child(*calls: Callable[[], object]) -> list[str]:
    """For each call in one child, the message of its error on one line, or "nothing".

    A child that hangs is ended by a signal; what it was not told by then is not in the list.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # Nothing of the parent's is run at its end, whatever a call does.
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_HANGS_S)
            for call in calls:
                os.write(writer, f"{_told(call)}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        messages = told.read().splitlines()
    os.waitpid(child, 0)
    return messages


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except BackendUnavailableError as error:
        return " ".join(str(error).split())
    return "nothing"
