"""`Errands`: foreign calls without a deadline, on threads that one can stop waiting for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from radixlink_comm._health import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


class Errands:
    """Calls that are under way, each on a thread of its own.

    The threads are daemons: a call that never returns keeps neither the caller nor the end of the
    process waiting. (`concurrent.futures.ThreadPoolExecutor` joins its threads at exit.)

    Thread: the owner's. The calls must allow for running beside it.
    Cost: a thread for each call; not for the step path.
    """

    def __init__(self) -> None:
        #: Those that had not ended when the last was started.
        self._threads: list[threading.Thread] = []

    def send(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Start a call; `result(timeout_s)` waits for it, and may be asked again.

        Raises:
            CollectiveError: No thread can be had; the call was not begun.
        """
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  it belongs to who asks for the result
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = threading.Thread(target=run, name="radixlink-errand", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise CollectiveError(f"no thread can be had on this rank: {error}") from error
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)
        return future

    def settle(self, timeout_s: float) -> None:
        """Wait until all have ended, but no longer than told.

        A thread that comes back from C++ while the interpreter ends makes the process abort, so
        none should be under way then.
        """
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
