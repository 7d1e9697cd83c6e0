"""What a child does that is forked while another thread of its parent is in the middle of something."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_PATIENCE_S: Final = 20


def in_a_child_while_held(held: AbstractContextManager[object], work: Callable[[], int]) -> int:
    """Fork while another thread is in a context, for example has a lock, and work in the child.

    Args:
        held: The context.
        work: What the child does. It ends with what this returns, or with 1 where this raises.

    Returns:
        The child's exit status.

    Raises:
        AssertionError: The child waits for what it does not have; it was killed after 20 seconds.
    """
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(_PATIENCE_S), "expected a context that can be entered"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(_PATIENCE_S)
            code = work()
        finally:
            os._exit(code)
    leave.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the child waited for a thread that it does not have"
    return os.WEXITSTATUS(status)
