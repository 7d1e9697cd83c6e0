"""Real memory for a window, before anybody relies on it."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

from radixlink_store.segments import Advice, advise

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def populate(memory: npt.NDArray[np.uint8]) -> None:
    """Back every page of memory, so that no later store into it can be a SIGBUS.

    A window is a sparse file in shared memory; if that is full when a page of it is first touched,
    the process dies. Asking the kernel for the pages gives an error instead.

    Raises:
        OSError: There is not so much memory.

    Cost: about a second for each GiB.
    """
    address = memory.ctypes.data
    start = address - address % mmap.PAGESIZE
    error = advise(start, address + memory.nbytes - start, Advice.POPULATE_WRITE)
    if not error:
        return
    if error != errno.EINVAL:
        raise OSError(error, os.strerror(error))
    # Linux before 5.14 cannot be asked. Touching all pages dies now, if it must, not in a request.
    memory[:] = 0
