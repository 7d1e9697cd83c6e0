"""`FileStoreFactory`: segments as files of one directory, shared by whoever can open it.

One file for each layout: `kv.0-of-1.segment` holds pool "kv", shard 0 of 1. Its bytes are mapped;
its slots are locked by locks on the file itself. `creation.lock` is locked by whoever makes a
segment or looks at its superblock, so that

1. a segment has its name only when it is whole: it is made as `*.segment.new` and renamed. What a
   maker that died left under that name is removed by the next opener, whichever segment it opens,
   since all of its room is taken;
2. the lock is released and not only closed: a child that was forked meanwhile would keep it;
3. the stamps of a segment that outlived a boot of the node are started over by one opener, before
   anyone uses them.

The room of a segment is allocated when it is made: a sparse file on a full tmpfs would be a SIGBUS
in some later copy. For the same reason a file that is shorter than its superblock says is refused.
(A file that is truncated while it is mapped cannot be helped; nobody but its owner can do that.)
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    ContractError,
    IdentityError,
    IntegrityError,
)
from radixlink_store._directory import (
    MODE,
    SAFELY,
    default_directory,
    names_in,
    open_directory,
    open_file,
)
from radixlink_store._errors import NO_ROOM, map_exceptions
from radixlink_store._huge_pages import allocate_huge, map_file
from radixlink_store._layout import SUPERBLOCK_BYTES, Geometry
from radixlink_store._locks import LockDescriptor, SlotLocks
from radixlink_store._open_stores import OpenStores
from radixlink_store._prefault import Prefault
from radixlink_store._room import is_in_memory, room_at
from radixlink_store._segment import Segment
from radixlink_store._store import SegmentPageStore
from radixlink_store._superblock import Superblock, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PoolLayout, StoreConfig
    from radixlink_store._room import Room

SUFFIX: Final = ".segment"
"""How the name of every segment ends."""

UNFINISHED_SUFFIX: Final = f"{SUFFIX}.new"
"""How it ends while the segment is made."""

_CREATION_LOCK: Final = "creation.lock"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_POLL_S: Final = 0.005
#: Machines that keep loads in order, and stores.
_ORDERED: Final = {"x86_64", "AMD64"}


def boot_id() -> str:
    """Which boot of the node this is."""
    with map_exceptions({OSError: lambda error: unavailable(_BOOT_ID, "read the boot id", error)}):
        return _BOOT_ID.read_text("ascii").strip()


class FileStoreFactory:
    """Opens the segments of one directory.

    Thread: any.
    """

    def __init__(
        self,
        config: StoreConfig,
        room: Callable[[Path], Room] = room_at,
        *,
        checksums: bool = True,
        prefault: bool = True,
    ) -> None:
        """Opens nothing yet.

        Args:
            config: `location` is a directory, made if only its last part is missing. Empty: one of
                this user for each identity, in shared memory if it has room. `capacity_bytes`
                counts for segments that are made; one that exists keeps its size.
            room: What may be taken at a path; the default asks the system.
            checksums: Whether layer ranges have checksums. All openers of a segment must agree.
                Without them only the order of loads and stores keeps a reader from wrong bytes, so
                they can be left out on x86-64 alone; and a boot of the node empties the segment.
            prefault: Fill this process' page tables in the background: those of a whole segment in
                memory, those of the index of one on a disk.

        Raises:
            ContractError: No checksums on a machine that needs them, or a configuration with a
                persistent tier, which is for `file_stores` to make.
        """
        if config.persistent_path or config.persistent_bytes:
            raise ContractError(
                f"file store: expected no persistent tier, got {config.persistent_path!r} of "
                f"{config.persistent_bytes} bytes; make the factory by file_stores"
            )
        if not checksums and platform.machine() not in _ORDERED:
            raise ContractError(
                f"file store: expected checksums on a {platform.machine()}, which may reorder "
                f"loads and stores, got checksums={checksums}; leave them on"
            )
        self._config: Final = config
        self._room: Final = room
        self._checksums: Final = checksums
        self._prefault: Final = prefault
        self._stores: Final[OpenStores[SegmentPageStore]] = OpenStores("file store")

    def open(self, layout: PoolLayout) -> SegmentPageStore:
        """Open the segment of one layout, making it where it is not there yet.

        Raises:
            IdentityError: The directory holds pages of another identity, or the file is none of
                ours, or it was made with another setting.
            IntegrityError: The segment is damaged or truncated.
            BackendUnavailableError: The directory or a file cannot be used, or another process did
                not finish making its segment within `timeout_s`.
            CapacityError: Not one page fits, or the file system has not enough room.
            StaleHandleError: The factory was closed.

        Owns: the caller closes it; so does the factory's close.
        """
        self._stores.require_open()
        geometry = Geometry.within(self._config.capacity_bytes, layout.range_bytes)
        directory = self._directory(layout, geometry)
        segment = open_segment(
            directory,
            layout,
            geometry,
            checksums=self._checksums,
            timeout_s=self._config.timeout_s,
            room=self._room,
        )
        try:
            prefault = self._start_prefault(segment, directory) if self._prefault else None
            where = str(directory / _name_of(layout))
            store = SegmentPageStore(segment, where, prefault=prefault)
            self._stores.keep(store)
        except BaseException:
            segment.locks.close()
            raise
        return store

    def close(self) -> None:
        """Close every store it opened. Idempotent."""
        self._stores.close()

    def _start_prefault(self, segment: Segment, directory: Path) -> Prefault | None:
        """Fill the page tables of what is in memory; never read a whole disk for it.

        Returns:
            None where no more threads are to be had: then the first touches cost what they cost.
        """
        in_memory = is_in_memory(directory)
        memory = segment.memory if in_memory else segment.memory[: segment.geometry.payload_offset]
        try:
            return Prefault(memory, write=in_memory)
        except RuntimeError:
            return None

    def _directory(self, layout: PoolLayout, geometry: Geometry) -> Path:
        """The directory of this layout's segment."""
        if self._config.location:
            return Path(self._config.location)
        base = default_directory(
            os.geteuid(),
            geometry.total_bytes,
            temp=Path(tempfile.gettempdir()),
            room=self._room,
        )
        os.close(open_directory(base))
        return base / layout.identity.fingerprint.hex()[:16]


def open_segment(
    path: Path,
    layout: PoolLayout,
    geometry: Geometry,
    *,
    checksums: bool,
    timeout_s: float,
    room: Callable[[Path], Room],
) -> Segment:
    """Open the segment of a layout in a directory, or make it with this geometry.

    Raises: as `FileStoreFactory.open` says.
    """
    directory = open_directory(path)
    try:
        with (
            map_exceptions({OSError: lambda error: unavailable(path, "use the store", error)}),
            creation_lock(directory, path, timeout_s),
        ):
            names = names_in(directory)
            remove_unfinished(directory, names)
            for name in sorted(names):
                if name.endswith(SUFFIX):
                    _refuse_stranger(directory, path / name, layout)
            if _name_of(layout) not in names:
                superblock = Superblock(
                    layout=layout, geometry=geometry, boot_id=boot_id(), checksums=checksums
                )
                _make(directory, path, superblock, room)
            return _attach(directory, path / _name_of(layout), checksums=checksums)
    finally:
        os.close(directory)


@contextlib.contextmanager
def creation_lock(directory: int, path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the directory's lock; only one opener at a time gets past this."""
    descriptor = os.open(
        _CREATION_LOCK, os.O_RDWR | os.O_CREAT | SAFELY, mode=MODE, dir_fd=directory
    )
    lock = LockDescriptor(descriptor)
    try:
        deadline = time.monotonic() + timeout_s
        while not lock.try_lock(0):
            # Of a deadline that is no number this is true as well.
            if not time.monotonic() < deadline:
                raise BackendUnavailableError(
                    f"file store: expected the lock {path / _CREATION_LOCK} within {timeout_s} s, "
                    f"got none; another process is making a segment there: try again",
                    transient=True,
                )
            time.sleep(_POLL_S)
        yield
    finally:
        # Closing would be enough, but for a child that another thread forked meanwhile: it shares
        # the description, and would keep the lock for as long as it lives.
        lock.unlock_all()
        lock.close()


def remove_unfinished(directory: int, names: list[str]) -> list[str]:
    """Remove what makers that died left behind, while the directory is locked.

    Args:
        directory: A descriptor.
        names: What is in it.

    Returns:
        The names that are gone.

    Raises:
        OSError: One cannot be removed.
    """
    unfinished = sorted(name for name in names if name.endswith(UNFINISHED_SUFFIX))
    for name in unfinished:
        os.unlink(name, dir_fd=directory)
    return unfinished


def _refuse_stranger(directory: int, file: Path, layout: PoolLayout) -> None:
    """Refuse a segment of another identity, or of another layout under our name.

    Raises:
        IdentityError: It holds other pages than ours.
    """
    descriptor = open_file(directory, file, os.O_RDONLY)
    try:
        found = _read_superblock(descriptor, file).layout
    finally:
        os.close(descriptor)
    another = found if file.name == _name_of(layout) else None
    if found.identity != layout.identity or (another and another != layout):
        raise IdentityError(
            f"{file}: expected pages of this engine, got those of another: "
            f"{differences(found, layout)}; choose another location, or remove the file to give up "
            f"its pages"
        )


def _make(directory: int, path: Path, superblock: Superblock, room: Callable[[Path], Room]) -> None:
    """Make an empty segment; it gets its name when it is whole.

    Raises:
        CapacityError: There is not enough room.
        OSError: The file cannot be made.
    """
    needed, name = superblock.geometry.total_bytes, _name_of(superblock.layout)
    new = name.removesuffix(SUFFIX) + UNFINISHED_SUFFIX
    available = room(path)
    if available.num_bytes < needed:
        raise _no_room(path / name, needed, available)
    head = bytearray(SUPERBLOCK_BYTES)
    superblock.write(memoryview(head))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY
    descriptor = os.open(new, flags, mode=MODE, dir_fd=directory)
    try:
        if is_in_memory(path):
            allocate_huge(descriptor, needed)
        os.posix_fallocate(descriptor, 0, needed)
        os.pwrite(descriptor, head, 0)
        os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException as error:
        # Also where Ctrl-C ends a large one: nobody may ever open this segment again.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=directory)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise _no_room(path / name, needed, room(path)) from error
        raise
    finally:
        os.close(descriptor)


def _attach(directory: int, file: Path, *, checksums: bool) -> Segment:
    """Map a segment that exists, for a store.

    Raises:
        IdentityError: It was made with another setting.
    """
    segment, superblock = map_segment(directory, file)
    try:
        _refuse_other_setting(superblock, file, checksums=checksums)
        now = boot_id()
        if superblock.boot_id != now:
            segment.start_stamps_over(now)
        # While the directory is locked, so that nobody takes it for unused.
        segment.join()
    except BaseException:
        segment.locks.close()
        raise
    return segment


def map_segment(directory: int, file: Path) -> tuple[Segment, Superblock]:
    """Map a segment that exists, and change nothing.

    Raises:
        IdentityError: It is no segment that this version can read.
        IntegrityError: It is damaged or truncated.
        BackendUnavailableError: It is no plain file of ours.
        OSError: It cannot be opened.

    Owns: the caller closes the segment's locks.
    """
    locks = SlotLocks(open_file(directory, file, os.O_RDWR))
    try:
        superblock = _read_superblock(locks.descriptor, file)
        buffer = memoryview(map_file(locks.descriptor, superblock.geometry.total_bytes))
        return Segment(buffer, superblock, locks), superblock
    except BaseException:
        locks.close()
        raise


def _refuse_other_setting(superblock: Superblock, file: Path, *, checksums: bool) -> None:
    """Refuse a segment whose users do otherwise than we would.

    Raises:
        IdentityError: They do.
    """
    if superblock.checksums != checksums:
        raise IdentityError(
            f"{file}: expected a segment made with checksums={checksums}, got one made with "
            f"checksums={superblock.checksums}; open it with the setting that it was made with, "
            f"choose another location, or remove the file to give up its pages"
        )


def _read_superblock(descriptor: int, file: Path) -> Superblock:
    """What a segment's file says of itself, and that it is as long as it says.

    Raises:
        IdentityError: It is no segment that this version can read.
        IntegrityError: It is damaged or truncated.
    """
    # By read and not by the mapping: a mapping of a short file is a SIGBUS.
    superblock = Superblock.read(os.pread(descriptor, SUPERBLOCK_BYTES, 0), str(file))
    length, expected = os.fstat(descriptor).st_size, superblock.geometry.total_bytes
    if length < expected:
        raise IntegrityError(
            f"{file}: expected {expected} bytes, got {length}: it was truncated; remove the file"
        )
    return superblock


def _name_of(layout: PoolLayout) -> str:
    """The name of a layout's file."""
    return f"{layout.pool.value}.{layout.shard.index}-of-{layout.shard.count}{SUFFIX}"


def _no_room(file: Path, needed: int, available: Room) -> CapacityError:
    return CapacityError(
        f"{file}: expected room for a segment of {needed} bytes, got {available.num_bytes} within "
        f"{available.limit}; lower capacity_bytes, free some, or choose another location",
        needed=needed,
        available=available.num_bytes,
    )


def unavailable(path: Path, action: str, error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"file store: expected to {action} at {path}, got {error.strerror} (errno {error.errno}"
        f"{f', {error.filename}' if error.filename else ''}); choose a directory that can be "
        f"written as location"
    )
