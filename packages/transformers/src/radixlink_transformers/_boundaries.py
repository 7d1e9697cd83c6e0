"""`Boundaries`: where a sequence can be gone on from later, and what is taken along for it.

Behind each page, for a model without recurrent states. With them only where a state was kept, and
one can be taken only between two forwards. So the forwards of a prompt end

* at each multiple of an interval (`EngineSettings.state_interval_tokens`),
* behind the last page that the same prompt could match again,
* and where the match says that an earlier prompt parted from this one.

While it decodes, a request has one more state, which it moves from page to page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from radixlink_contracts import MatchResult
    from radixlink_transformers._device import Device, States
    from radixlink_transformers._stay import Stay


@attrs.frozen(kw_only=True)
class Boundary:
    """The end of an insert.

    Attributes:
        num_tokens: Whole pages.
        state: Slot of the state there, for a model with states.
    """

    num_tokens: int
    state: int | None


class Boundaries:
    """Those of one request, of any kind of model.

    Thread: the scheduler's.
    """

    def __init__(
        self, device: Device, stay: Stay, found: MatchResult, prompt_len: int, state: int | None
    ) -> None:
        """Say where the forwards of the prompt have to end.

        Args:
            device: Holds what is kept.
            stay: Of the request: takes slots.
            found: What the request begins with.
            prompt_len: Tokens of the prompt.
            state: The slot in which the request's forwards change its states.
        """
        self._page_size: Final = device.page_size
        self._states: Final[States | None] = device.states
        self._stay: Final = stay
        self._working: Final = state
        #: Slots of the states taken, by where they stand, first tokens first.
        self._taken: dict[int, int] = {}
        stops: set[int] = set()
        if self._states is not None:
            start, interval = found.device_prefix_len, self._states.interval
            stops.update(range(start - start % interval + interval, prompt_len + 1, interval))
            stops.update((self._whole_pages(prompt_len - 1), found.branching_len))
        self._stops: Final = frozenset(stops)

    @property
    def stops(self) -> frozenset[int]:
        """Tokens in front of which a forward has to end; those that were run do not count."""
        return self._stops

    def note(self, num_tokens: int) -> None:
        """A forward ended: keep the state, if a later request may go on from it."""
        if self._states is None or num_tokens % self._page_size:
            return
        slot = self._slot_for_state()
        if slot is not None:
            assert self._working is not None, "a request of a model with states has a slot"
            self._states.pool.copy(self._working, slot)
            self._taken[num_tokens] = slot

    def of_insert(self, start: int, num_tokens: int) -> list[Boundary]:
        """Where a sequence is to be inserted up to, first tokens first.

        Args:
            start: Tokens that it began with.
            num_tokens: Tokens that it has.
        """
        if self._states is not None:
            return [Boundary(num_tokens=end, state=slot) for end, slot in self._taken.items()]
        end = self._whole_pages(num_tokens)
        return [Boundary(num_tokens=end, state=None)] if end > start else []

    def _slot_for_state(self) -> int | None:
        """One that moves, else a new one, else that of the first tokens; None where all is taken."""
        last = next(reversed(self._taken), 0)
        if last and last not in self._stops:
            return self._taken.pop(last)
        slot = self._stay.spare_state()
        if slot is None and self._taken:
            slot = self._taken.pop(next(iter(self._taken)))
        return slot

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._page_size
