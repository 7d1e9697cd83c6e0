"""What a child does that is forked while a lock of its parent is held."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

#: After so many seconds a child that waits for ever is ended.
PATIENCE_S = 20


def ends_well_in_a_child(held: AbstractContextManager[object], work: Callable[[], None]) -> bool:
    """True where `work` returns in a child that is forked while another thread is in a context."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(PATIENCE_S)
            work()
            code = 0
        finally:
            os._exit(code)
    leave.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
