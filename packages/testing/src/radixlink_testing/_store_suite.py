"""What the store suites have in common: a place, a store, a deadline and a guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from typing_extensions import override

from radixlink_testing._deadlines import with_deadline, within
from radixlink_testing._overrides import unexplained_overrides
from radixlink_testing._places import SUITE_LAYOUT

if TYPE_CHECKING:
    from radixlink_contracts import PageStore
    from radixlink_testing._places import StorePlace

_OURS = __name__.partition(".")[0] + "."


class StoreSuite:
    """Cases about the stores of a place.

    Every case runs in a thread of its own. One that does not end in time fails with its name and
    the stack of where it is; its thread is left behind.
    """

    #: Seconds after which a case hangs. Far above what any case needs on a busy machine.
    case_deadline_s: ClassVar[float] = 30.0

    #: What the guard compares with; set by Python when a subclass is made.
    _overridden: ClassVar[tuple[str, ...]] = ()

    @override
    def __init_subclass__(cls) -> None:
        """Give the cases of a suite their deadline; in a subclass of one, note what it replaces."""
        super().__init_subclass__()
        if cls.__module__.startswith(_OURS):
            for name, case in list(vars(cls).items()):
                if name.startswith("test_"):
                    setattr(cls, name, with_deadline(case, _deadline_of))
        else:
            ours = [suite for suite in cls.__mro__ if suite.__module__.startswith(_OURS)]
            cls._overridden = unexplained_overrides(cls, ours)

    @pytest.fixture
    def place(self) -> StorePlace:
        """The place under test. Every subclass gives its own."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, place: StorePlace) -> PageStore:
        """A store of the suite's layout."""
        return within(self.case_deadline_s, "open", lambda: place.open(SUITE_LAYOUT))

    def test_no_case_is_overridden(self) -> None:
        assert self._overridden == ()


def _deadline_of(suite: StoreSuite, *_: object, **__: object) -> float:
    """What the subclass says, read when the case runs."""
    return suite.case_deadline_s
