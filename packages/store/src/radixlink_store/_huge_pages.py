"""Huge pages for a file in memory, which the kernel gives to whoever asks for them in place.

A file on tmpfs has pages of 4 KiB unless its mount or the whole system was set otherwise. From Linux
6.1 on `MADV_COLLAPSE` puts the pages of a mapped part into one huge page without either. It is soon
done while nearly all of the part is still a hole: one byte is written there and the rest comes
zeroed, which takes a quarter of the time of allocating small pages. From then on each process that
maps the file where its huge pages line up fills its page tables 512 pages at once.

Whatever the kernel refuses stays in small pages: nothing but time depends on it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import Final

from radixlink_store._address import address_of
from radixlink_store._advice import Advice, advise

_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
#: Mappings that were placed elsewhere than in the gap they were made for, until one is given up.
_TRIES: Final = 32


def huge_page_bytes(file: Path = _SIZE) -> int:
    """Of a huge page of this machine; 0 where it has none, or does not say."""
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return 0


def allocate_huge(descriptor: int, num_bytes: int) -> None:
    """Give a file in memory huge pages as far as the kernel has them.

    Args:
        descriptor: An empty file that nobody else maps, open for writing.
        num_bytes: How long it becomes. What has no huge page may still be a hole afterwards.

    Raises:
        OSError: It cannot be so long, or there is no room.

    Cost: 0.06 s for each GiB.
    """
    os.ftruncate(descriptor, num_bytes)
    size = huge_page_bytes()
    if not 0 < size <= num_bytes:
        return
    with map_file(descriptor, num_bytes) as mapping:
        start = address_of(mapping)
        for offset in range(0, num_bytes - size + 1, size):
            # By a call and not by a store, which would be a SIGBUS where there is no room.
            os.pwrite(descriptor, b"\0", offset)
            # Where somebody looks at the page just now the next may be had all the same.
            if advise(start + offset, size, Advice.COLLAPSE) not in {0, errno.EAGAIN}:
                return


def map_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a file from its beginning, where its huge pages line up with those of the machine.

    Raises:
        OSError: It cannot be mapped.
    """
    mapping = mmap.mmap(descriptor, num_bytes)
    size = huge_page_bytes()
    if not 0 < size <= num_bytes:
        return mapping
    with contextlib.ExitStack() as gaps:
        try:
            for _ in range(_TRIES):
                beyond = address_of(mapping) % size
                if not beyond:
                    break
                # Mappings are placed one below the other: below a gap so large, the next one fits.
                mapping.close()
                gaps.enter_context(mmap.mmap(-1, beyond, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                mapping = mmap.mmap(descriptor, num_bytes)
        except OSError:
            # The process may have no more memory mapped than this: then anywhere.
            gaps.close()
            mapping = mmap.mmap(descriptor, num_bytes)
    return mapping
