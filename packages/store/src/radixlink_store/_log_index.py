"""Where each page is in the files of a log: an index in this process' memory.

It is a hint about files that others write and evict: what it leads to is read, and compared with
the whole key and every checksum. Of several records of a page the one that was added last is found
first; if that is damaged, or its file gone, the next one is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBER_BITS: Final = 32
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1


class Look(NamedTuple):
    """What a file's status says: as long as it says the same, there is nothing new to read.

    Attributes:
        num_bytes: Its length.
        used_ns: When it was written or used, by the file system's clock. Nanoseconds.
        mode: Who may do what with it: nobody writes one that is sealed.
    """

    num_bytes: int
    used_ns: int
    mode: int


@attrs.define(kw_only=True, eq=False)
class IndexedFile:
    """A file that the index knows.

    Attributes:
        name: Its name in the directory.
        file_id: Its id.
        serial: Its number in this index.
        sealed: Whether nothing will be added to it.
        ours: Whether this log writes it.
        named: Whether it has had its name in the directory: one of ours is known before it has.
        looked: What was seen of it before it was last read; None if it was not, or not to its end.
        used_at: When this log last said that it is used, in seconds of its clock.
        keys: The key of each record; None where there is none to be found.
    """

    name: str
    file_id: int
    serial: int
    sealed: bool = False
    ours: bool = False
    named: bool = True
    looked: Look | None = None
    used_at: float = -float("inf")
    keys: list[bytes | None] = attrs.field(factory=list)


class LogIndex:
    """Pages by key, and files by name.

    Thread: any.
    Cost: some 200 bytes of memory for each record.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._mutex: Final = threading.Lock()
        #: A file's serial and a record's number, in one integer.
        self._places: Final[dict[bytes, int]] = {}
        #: Places of older records of a page; few pages have any.
        self._older: Final[dict[bytes, list[int]]] = {}
        self._files: Final[dict[int, IndexedFile]] = {}
        self._serial = 0

    def __len__(self) -> int:
        """How many pages can be found."""
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        """True when a page can be found."""
        return key in self._places

    @property
    def files(self) -> list[IndexedFile]:
        """The files that it knows, in the order in which they came."""
        with self._mutex:
            return list(self._files.values())

    def find(self, key: bytes) -> tuple[IndexedFile, int] | None:
        """The file of a page, and which record of it."""
        place = self._places.get(key)
        if place is None:
            return None
        file = self._files.get(place >> _NUMBER_BITS)
        return None if file is None else (file, place & _NUMBER_MASK)

    def add_file(self, name: str, file_id: int, *, ours: bool = False) -> IndexedFile:
        """Know one more file, with no record yet."""
        with self._mutex:
            file = IndexedFile(
                name=name, file_id=file_id, serial=self._serial, ours=ours, named=not ours
            )
            self._serial += 1
            self._files[file.serial] = file
            return file

    def extend(self, file: IndexedFile, keys: Iterable[bytes | None]) -> None:
        """Know the next records of a file, unless it was dropped meanwhile."""
        with self._mutex:
            if file.serial not in self._files:
                return
            number = len(file.keys)
            for key in keys:
                file.keys.append(key)
                if key is not None:
                    if key in self._places:
                        self._older.setdefault(key, []).append(self._places[key])
                    self._places[key] = file.serial << _NUMBER_BITS | number
                number += 1

    def forget(self, file: IndexedFile, number: int) -> None:
        """Find a record no more: it is damaged."""
        with self._mutex:
            key, file.keys[number] = file.keys[number], None
            self._remove(key, file.serial << _NUMBER_BITS | number)

    def drop(self, file: IndexedFile) -> None:
        """Find no record of a file any more: it is gone."""
        with self._mutex:
            if self._files.pop(file.serial, None) is None:
                return
            for number, key in enumerate(file.keys):
                self._remove(key, file.serial << _NUMBER_BITS | number)

    def _remove(self, key: bytes | None, place: int) -> None:
        """Find a page at this place no more; the mutex is held."""
        if key is None:
            return
        older = self._older.get(key, [])
        if place in older:
            older.remove(place)
        elif self._places.get(key) == place:
            if older:
                self._places[key] = older.pop()
            else:
                del self._places[key]
        if not older:
            self._older.pop(key, None)
