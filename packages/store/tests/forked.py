"""What a child does that is forked while another thread of its parent is in the middle of something."""

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


def in_a_child_while_held(held: AbstractContextManager[object], work: Callable[[], int]) -> int:
    """The exit status, by `work`, of a child that is forked while another thread is in a context."""
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
            code = work()
        finally:
            os._exit(code)
    leave.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the child waited for a thread that it does not have"
    return os.WEXITSTATUS(status)
