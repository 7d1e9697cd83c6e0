"""A Hypothesis machine that drives logs of one directory against a dict of what was written."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from packages.store.tests.conftest import IDENTITY, NumberedLog
from typing_extensions import override

from radixlink_contracts import PoolLayout, PoolName
from radixlink_store import PersistentSettings
from radixlink_store._log_file import LOG_SUFFIX, LogFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = PoolLayout(identity=IDENTITY, pool=PoolName.KV, range_bytes=(40, 24))
FORMAT = LogFormat(LAYOUT)
NUM_PAGES = 12
PAGES = st.integers(0, NUM_PAGES - 1)
OPENERS = st.integers(0, 1)
RECORDS_A_FILE = 3


@contextlib.contextmanager
def writable(path: Path) -> Iterator[BinaryIO]:
    """A file, sealed or not, open to be damaged."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:
        yield file
    path.chmod(mode)


class LogMachine(RuleBasedStateMachine):
    """Two logs, as two processes have them, which look at the directory with every look-up.

    Files are cut and damaged while all logs are closed: that is what a crash does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._path = Path(tempfile.mkdtemp(prefix="radixlink-test-"))
        self._logs: list[NumberedLog] = []
        #: What each file has, by its name: the page of each record, in order.
        self._model: dict[str, list[int | None]] = {}
        #: Logs that were opened again without being closed.
        self._left: list[NumberedLog] = []
        #: Files that those write.
        self._kept: set[str] = set()
        #: Files that were cut to nothing.
        self._bare: set[str] = set()
        #: Which file each log writes.
        self._writing: list[str | None] = [None, None]

    @initialize()
    def make(self) -> None:
        """Open both."""
        self._logs = [self._open() for _ in range(2)]

    @rule(opener=OPENERS, page=PAGES)
    def append(self, opener: int, page: int) -> None:
        """Write a page, if it cannot be found, as a store does."""
        if page in self._logs[opener].held([page]):
            return
        before = set(self._names())
        assert self._logs[opener].put(page)
        new = set(self._names()) - before
        if new:
            # Who begins a file removes those without a byte that nobody writes.
            for name in self._bare - self._kept:
                assert name in before
                assert name not in self._names()
                del self._model[name]
            self._bare &= self._kept
            (name,) = new
            self._model[name] = []
            self._writing[opener] = name
        name = self._writing[opener] or ""
        self._model[name].append(page)
        assert len(self._model[name]) <= RECORDS_A_FILE

    @rule(closed=st.booleans())
    def reopen(self, closed: bool) -> None:  # noqa: FBT001
        """Open both again, after they closed or without."""
        if closed:
            self._close()
        else:
            self._left += self._logs
            self._kept |= {name for name in self._writing if name}
            self._writing = [None, None]
        self.make()

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """Cut a file somewhere, and open both again."""
        self._close()
        names = list(self._model)
        if names:
            name = data.draw(st.sampled_from(names))
            path = self._path / name
            length = data.draw(st.integers(0, path.stat().st_size))
            with writable(path) as file:
                file.truncate(length)
            whole = max(0, length - FORMAT.start) // FORMAT.record.record_bytes
            self._model[name] = self._model[name][:whole]
            if not length:
                self._bare.add(name)
        self.make()

    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        """Flip a bit of a whole record, and open both again."""
        self._close()
        # One that is damaged already might become whole again.
        whole = [
            (name, number)
            for name, pages in self._model.items()
            for number, page in enumerate(pages)
            if page is not None
        ]
        if whole:
            name, number = data.draw(st.sampled_from(whole))
            place = data.draw(st.integers(0, FORMAT.record.head_bytes + LAYOUT.page_bytes - 1))
            bit = data.draw(st.integers(0, 7))
            with writable(self._path / name) as file:
                file.seek(FORMAT.offset(number) + place)
                (before,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([before ^ 1 << bit]))
            self._model[name][number] = None
        self.make()

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Remove a file, as an eviction by others does."""
        names = list(self._model)
        if names:
            name = data.draw(st.sampled_from(names))
            (self._path / name).unlink()
            del self._model[name]
            self._bare.discard(name)
            self._writing = [None if writing == name else writing for writing in self._writing]

    @invariant()
    def pages_are_those_of_the_model(self) -> None:
        """Each log reads every page that was written and is whole, and no other."""
        whole = {page for pages in self._model.values() for page in pages if page is not None}
        for log in self._logs:
            held = set(log.held(range(NUM_PAGES)))
            assert held == whole

    @override
    def teardown(self) -> None:
        for log in self._logs + self._left:
            log.close()
        shutil.rmtree(self._path)

    def _names(self) -> Iterator[str]:
        return (path.name for path in self._path.glob(f"*{LOG_SUFFIX}"))

    def _open(self) -> NumberedLog:
        tier = PersistentSettings(
            path=self._path,
            capacity_bytes=1 << 20,
            file_bytes=FORMAT.sealed_bytes(RECORDS_A_FILE),
            rescan_s=0.0,
        )
        return NumberedLog(LAYOUT, tier, lambda: 0.0)

    def _close(self) -> None:
        for log in self._logs:
            log.close()
        self._writing = [None, None]


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(stateful_step_count=20)
