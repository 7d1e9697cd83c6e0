"""Locks on slots: one byte of a file for each, held by whoever writes the slot, never waited for.

Theory of operation. An open-file-description (OFD) lock belongs to an open file description and not
to a process or a thread, and the kernel releases it when the last descriptor of that description is
closed, be it by kill -9. So

1. a writer that was stopped keeps its slot, one that was killed loses it at once, and no clock is
   asked;
2. two threads that write at the same time need descriptors of two descriptions, or each would be
   granted the other's lock. A descriptor is lent to one write at a time and then kept for the next:
   there are as many as threads ever wrote at once. It is made by opening /proc/self/fd/N again,
   which also works for a file that has no name any more;
3. a forked child shares its parent's descriptions. It must not write by them, so it is refused
   (open the store again); and while it lives, what its parent had locked at the fork stays locked
   even if the parent dies. That costs one slot until the child ends or executes another program,
   and nothing else;
4. an exception may come between any two steps (Ctrl-C), so also before a descriptor is unlocked and
   given back. One that is lost on the way is closed when nothing refers to it any more, and its
   locks end;
5. bytes behind those of the slots say who has the segment open; `SlotLocks.hold` keeps one for as
   long as the locks are open, by a description of its own.

Only Linux has these locks. They say nothing on network file systems that emulate them between
nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import weakref
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import StaleHandleError
from radixlink_store._process_mutex import ProcessMutex

if TYPE_CHECKING:
    from collections.abc import Iterator

# `struct flock` of 64-bit Linux: type, whence (0 is the start), start, length, pid (0 for OFD locks),
# padding.
_FLOCK: Final = struct.Struct("hhqqi4x")
_WRITE: Final = fcntl.F_WRLCK
_READ: Final = fcntl.F_RDLCK
_UNLOCK: Final = fcntl.F_UNLCK
_SET: Final = fcntl.F_OFD_SETLK
#: A length of 0 goes to the end, wherever that is.
_UNLOCK_ALL: Final = _FLOCK.pack(_UNLOCK, 0, 0, 0, 0)


class LockDescriptor:
    """One open file description, used by one thread at a time.

    Owns: the descriptor is closed by `close`, or when nothing refers to this any more.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = weakref.finalize(self, os.close, descriptor)
        self._end.atexit = False

    def try_lock(self, byte: int) -> bool:
        """Lock a byte, unless somebody else has it. Never waits.

        Returns:
            Whether the lock was granted; a lock that this description holds already is granted
            again.
        """
        try:
            fcntl.fcntl(self._descriptor, _SET, _FLOCK.pack(_WRITE, 0, byte, 1, 0))
        except OSError as error:
            return _refused(error)
        return True

    def try_share(self, byte: int) -> bool:
        """Lock a byte together with all others that share it, unless somebody has it alone.

        Returns:
            Whether the lock was granted.
        """
        try:
            fcntl.fcntl(self._descriptor, _SET, _FLOCK.pack(_READ, 0, byte, 1, 0))
        except OSError as error:
            return _refused(error)
        return True

    def unlock(self, byte: int) -> None:
        """Release a byte."""
        fcntl.fcntl(self._descriptor, _SET, _FLOCK.pack(_UNLOCK, 0, byte, 1, 0))

    def unlock_all(self) -> None:
        """Release every byte that this description has, in one call of the kernel."""
        fcntl.fcntl(self._descriptor, _SET, _UNLOCK_ALL)

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._end()


def _refused(error: OSError) -> bool:
    """False for the error that says that somebody else has the lock.

    Raises:
        OSError: Any other one.
    """
    if error.errno in {errno.EAGAIN, errno.EACCES}:
        return False
    raise error


class SlotLocks:
    """The locks of one segment.

    Thread: any.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor of the lock file, open for reading and writing.

        Owns: the descriptor is closed with the locks.
        """
        self._process = os.getpid()
        self._mutex = ProcessMutex()
        self._origin = descriptor
        #: Descriptors that no write uses now. Appended to and popped from without the mutex (both are
        #: atomic): whoever gives one back after `close` has set its mark closes it.
        self._idle: list[LockDescriptor] = []
        #: The description of what is kept until the end; made when something is.
        self._holder: LockDescriptor | None = None
        self._closed = False

    @property
    def descriptor(self) -> int:
        """The descriptor of the lock file, for everything but locking."""
        return self._origin

    @property
    def are_ours(self) -> bool:
        """False in a forked child: it must not lock."""
        return os.getpid() == self._process

    @contextlib.contextmanager
    def lend(self) -> Iterator[LockDescriptor]:
        """A descriptor for one thread's writes; nothing is locked by it afterwards.

        Raises: as `take` says.
        """
        descriptor = self.take()
        try:
            yield descriptor
        finally:
            # What an exception left locked; where another comes before it, the descriptor is lost.
            descriptor.unlock_all()
            self.give_back(descriptor)

    def take(self) -> LockDescriptor:
        """A descriptor for one thread's writes, until it is given back.

        Raises:
            StaleHandleError: The locks were closed, or this is a forked child.
            OSError: No more descriptors.
        """
        # `are_ours`, with every page that comes alone.
        if os.getpid() != self._process:
            raise StaleHandleError(
                f"store: expected to write in process {self._process} that opened it, got its "
                f"forked child {os.getpid()}; open the store again in the child"
            )
        try:
            return self._idle.pop()
        except IndexError:
            with self._mutex.lock:
                return self._another()

    def give_back(self, descriptor: LockDescriptor) -> None:
        """Take a descriptor back, with nothing locked by it."""
        self._idle.append(descriptor)
        if self._closed:
            self._close_idle()

    def hold(self, shared: int, alone: range) -> int | None:
        """Keep a byte together with others, and one for ourselves, until the locks are closed.

        Args:
            shared: The byte to share.
            alone: Of these the first one that nobody has.

        Returns:
            The byte of our own; None if others have all of them.

        Raises:
            StaleHandleError: The locks were closed.
            OSError: No more descriptors, or no locks here.
        """
        with self._mutex.lock:
            if self._holder is None:
                self._holder = self._another()
            self._holder.try_share(shared)
            return next((byte for byte in alone if self._holder.try_lock(byte)), None)

    def close(self) -> None:
        """Close every descriptor; those lent close when they come back. Idempotent."""
        with self._mutex.lock:
            if self._closed:
                return
            self._closed = True
            if self._holder is not None:
                self._idle.append(self._holder)
            os.close(self._origin)
        self._close_idle()

    def _close_idle(self) -> None:
        """Close what no write uses; each descriptor is popped, and so closed, by one thread."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _another(self) -> LockDescriptor:
        """A descriptor of a description of its own; the mutex is held."""
        if self._closed:
            raise StaleHandleError("store: expected an open store, got one that was closed")
        path = f"/proc/self/fd/{self._origin}"
        return LockDescriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
