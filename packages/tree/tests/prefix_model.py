"""`Model`: what a tree should do, told by a dictionary of prefixes that knows nothing of trees.

Where pages come and go together, it keeps that a run ends at a page; all else is asked of the pages
one by one, the slow way: what is a leaf, how far a lock reaches, where a match may end.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

import attrs

from radixlink_contracts import ComponentType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from radixlink_contracts import Namespace, OperationId

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

Prefix: TypeAlias = "tuple[Namespace, tuple[int, ...]]"
"""A sequence of symbols, one a page."""


class Gone(enum.IntEnum):
    """What an action does to a slot."""

    #: A full page, and the window page beside it where there are windows.
    WHOLE = 0
    #: A full page without a window.
    BARE = 1
    #: The window page beside a full page that stays.
    WINDOW = 2
    STATE = 3
    #: The window page beside a full page goes to stand beside another.
    MOVED = 4


Event: TypeAlias = "tuple[Gone, int, int]"
"""What goes, of which page or state, and for MOVED where to; else 0."""


@attrs.define
class Page:
    """What the model knows of the last page of a prefix.

    Attributes:
        slot: The pool's page.
        used: When it was last used.
        ends: A run of pages that comes and goes together ends here.
        live: The window of its tokens is there.
        window_used: When the windows of the run that ends here were last used.
        state: The slot of the state at its end.
        state_used: When that was last used.
        hits: The inserts that counted it.
        stored: What of it the store has; the state at its end is of this page alone.
        pending: What of it is being offloaded, and by what.
        failures: Offloads of its run that failed in a row.
        due_at: The use of the tree from which on the run is offered again.
    """

    slot: int
    used: int
    ends: bool = False
    live: bool = False
    window_used: int = 0
    state: int | None = None
    state_used: int = 0
    hits: int = 0
    stored: set[ComponentType] = attrs.field(factory=set)
    pending: dict[ComponentType, OperationId] = attrs.field(factory=dict)
    failures: int = 0
    due_at: int = 0

    @property
    def lacks(self) -> set[ComponentType]:
        """What of it is neither stored nor on its way."""
        return self.held - self.stored - self.pending.keys()

    @property
    def held(self) -> set[ComponentType]:
        return {FULL, *[SWA] * self.live, *[MAMBA] * (self.state is not None)}


@attrs.define(eq=False)
class Lock:
    """What a receipt has: a path, the windows of so many pages at its end, the state there."""

    prefix: Prefix
    window: int = 0
    state: bool = False


@attrs.frozen
class Match:
    """Lengths in pages; `branching` in tokens."""

    length: int
    full: int
    branching: int


@attrs.frozen
class Insert:
    """An insert of the first pages of a sequence. Lengths in pages.

    Attributes:
        prefix: The pages.
        matched: Pages that the tree owns.
        own: The caller's slots for what follows those.
        floor: Page from which on these have windows.
        prompt: Pages of the prompt.
        state: What it brings.
    """

    prefix: Prefix
    matched: int
    own: Sequence[int]
    floor: int = 0
    prompt: int = 0
    state: int | None = None


@attrs.define
class Outcome:
    """What an insert did. Ranges in pages, but for MAMBA's: the page at whose end the state is."""

    was_there: int
    events: list[Event] = attrs.field(factory=list)
    adopted: dict[ComponentType, set[int]] = attrs.field(
        factory=lambda: {kind: set() for kind in ComponentType}
    )
    mamba_exist: bool = False


@attrs.frozen
class Rules:
    """What a tree is made of. A window in pages, 0 for none; the rest in tokens and states."""

    page_size: int
    window: int = 0
    states: bool = False
    chunk: int = 1
    cap: int | None = None


class Model:
    """Every cached prefix, by its symbols."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.pages: dict[Prefix, Page] = {}
        self.locks: list[Lock] = []
        self.now = 0
        #: Matches and inserts.
        self.uses = 0
        self.retry_after = 1

    # -- asking ------------------------------------------------------------------------------------

    def path(self, prefix: Prefix) -> list[Page]:
        """The pages from the first one on, as far as they are there."""
        namespace, symbols = prefix
        path: list[Page] = []
        while len(path) < len(symbols) and (namespace, symbols[: len(path) + 1]) in self.pages:
            path.append(self.pages[namespace, symbols[: len(path) + 1]])
        return path

    def runs(self, prefix: Prefix) -> Iterator[tuple[int, int]]:
        """The runs of a cached prefix as [start, end) of its pages, first one first."""
        start = 0
        for end, page in enumerate(self.path(prefix), 1):
            if page.ends:
                yield start, end
                start = end

    def run_to(self, last: Prefix) -> list[Page]:
        """The pages of the run that ends there."""
        start, end = list(self.runs(last))[-1]
        return self.path(last)[start:end]

    def locked(self, prefix: Prefix) -> bool:
        return any(begins(prefix, lock.prefix) for lock in self.locks)

    def window_locked(self, prefix: Prefix) -> bool:
        return any(
            begins(prefix, lock.prefix) and len(prefix[1]) > len(lock.prefix[1]) - lock.window
            for lock in self.locks
        )

    def state_locked(self, prefix: Prefix) -> bool:
        return any(lock.state and lock.prefix == prefix for lock in self.locks)

    def children(self, prefix: Prefix) -> int:
        """How many different pages follow it."""
        namespace, symbols = prefix
        return sum(other == namespace and more[:-1] == symbols for other, more in self.pages)

    def sizes(self, component: ComponentType) -> tuple[int, int]:
        """What can be given up and what is locked, in pages; in states for MAMBA."""
        locks = {FULL: self.locked, SWA: self.window_locked, MAMBA: self.state_locked}
        locked = [
            locks[component](prefix)
            for prefix, page in self.pages.items()
            if component in page.held
        ]
        return locked.count(False), locked.count(True)

    def may_end(self, path: list[Page], length: int) -> bool:
        """Whether a match may end behind that many pages."""
        if length and self.rules.states and path[length - 1].state is None:
            return False
        first = max(0, length - self.rules.window)
        return not self.rules.window or all(page.live for page in path[first:length])

    # -- calls -------------------------------------------------------------------------------------

    def match(self, prefix: Prefix) -> Match:
        full, path = self.use(prefix), self.path(prefix)
        length = max(end for end in range(full + 1) if self.may_end(path, end))
        self.use_window((prefix[0], prefix[1][:length]))
        if length and path[length - 1].state is not None:
            path[length - 1].state_used = self.tick()
        rules = self.rules
        wanted = range((length * rules.page_size) + 1, full * rules.page_size + 1)
        if rules.states:
            grid = [at for at in wanted if at % rules.page_size == 0 and at % rules.chunk == 0]
        else:
            grid = list(wanted)
        return Match(length, full, max(grid, default=0))

    def insert(self, params: Insert) -> Outcome:
        (namespace, symbols), floor = params.prefix, params.floor
        outcome = Outcome(self.use(params.prefix))
        self.overlap(params, outcome)
        length, window = len(symbols), self.rules.window
        cuts = {length, params.prompt}
        if window:
            cuts |= {floor, max(floor, length - window)}
        for at in range(outcome.was_there, length):
            slot = params.own[at - params.matched]
            page = Page(slot, self.now, ends=at + 1 in cuts, live=bool(window) and at >= floor)
            self.pages[namespace, symbols[: at + 1]] = page
            if page.ends:
                page.window_used = self.tick()
            outcome.adopted[FULL].add(at)
            if page.live:
                outcome.adopted[SWA].add(at)
        self.use_window(params.prefix)
        self.take_state(params, outcome)
        return outcome

    def overlap(self, params: Insert, outcome: Outcome) -> None:
        """Give back what is there already, and take the windows that are not."""
        path = self.path(params.prefix)
        taking = [
            self.rules.window and not path[at].live and at >= params.floor
            for at in range(outcome.was_there)
        ]
        for start, end in list(self.runs(params.prefix)):
            first = max(start, params.matched)
            for at in range(first, end):
                slot = params.own[at - params.matched]
                bare = self.rules.window and at < params.floor
                if not taking[at]:
                    outcome.events.append((Gone.BARE if bare else Gone.WHOLE, slot, 0))
            taken = [at for at in range(first, end) if taking[at]]
            if taken:
                self.recover(params, taken, outcome)
                if taken[0] > start:
                    path[taken[0] - 1].ends = True

    def recover(self, params: Insert, taken: list[int], outcome: Outcome) -> None:
        """The last pages of a run get their windows back, all at once."""
        (namespace, symbols), path = params.prefix, self.path(params.prefix)
        own = {at: params.own[at - params.matched] for at in taken}
        if self.locked((namespace, symbols[: taken[-1] + 1])):
            outcome.events += [(Gone.MOVED, own[at], path[at].slot) for at in taken]
            outcome.events += [(Gone.BARE, own[at], 0) for at in taken]
        else:
            outcome.events += [(Gone.BARE, path[at].slot, 0) for at in taken]
            for at in taken:
                path[at].slot = own[at]
            outcome.adopted[FULL].update(taken)
        for at in taken:
            path[at].live = True
        path[taken[-1]].window_used = self.tick()
        outcome.adopted[SWA].update(taken)

    def take_state(self, params: Insert, outcome: Outcome) -> None:
        """Take a state where there is none, and give up what is over the cap."""
        path = self.path(params.prefix)
        if not self.rules.states:
            return
        outcome.mamba_exist = not path or path[-1].state is not None
        if not path:
            return
        if not outcome.mamba_exist and params.state is None:
            return
        path[-1].state_used = self.tick()
        if outcome.mamba_exist:
            return
        path[-1].state = params.state
        outcome.adopted[MAMBA].add(len(path) - 1)
        if self.rules.cap is None:
            return
        over = sum(page.state is not None for page in path) - self.rules.cap
        for length, page in enumerate(path[:-1], 1):
            prefix = (params.prefix[0], params.prefix[1][:length])
            free = page.state is not None and not self.state_locked(prefix)
            if over > 0 and free and self.children(prefix) == 1:
                over -= 1
                outcome.events.append((Gone.STATE, lose_state(page), 0))

    def note_insert(
        self, params: Insert, inserted: int, threshold: int, *, restored: bool
    ) -> list[int]:
        """Count the use; say at which lengths of the prefix the runs end that are offered."""
        path = self.path(params.prefix)
        due: list[int] = []
        for start, end in reversed(list(self.runs(params.prefix))):
            run = path[start:end]
            idle = not any(page.pending for page in run)
            for page in run:
                if not restored:
                    page.hits += end > inserted
                elif idle and start >= params.matched:
                    page.stored |= {FULL, *[SWA] * (start >= params.floor)} & page.held
            # A state may be all that a load brings.
            if restored and idle and params.state is not None and end == len(path):
                run[-1].stored |= {MAMBA} & run[-1].held
            # What is on its way is not offered again; what came since is.
            lacks = set[ComponentType]().union(*[page.lacks for page in run])
            if lacks and self.uses < run[0].due_at:
                # What failed waits, and nothing is stored behind pages that are not.
                due = [] if FULL in lacks else due
            elif lacks and (due or run[0].hits >= threshold):
                due.insert(0, end)
        return due

    def finish_offload(self, operation: OperationId, *, stored: bool) -> None:
        """What was on its way is stored; or its runs wait for a use, and for twice as many each time."""
        for prefix, page in self.pages.items():
            of_it = [kind for kind, by in page.pending.items() if by == operation]
            for kind in of_it:
                del page.pending[kind]
                if stored:
                    page.stored.add(kind)
            # A state is of the last page alone, and what failed with it is the run.
            for member in self.run_to(prefix) if of_it and page.ends else ():
                if not stored:
                    member.due_at = self.uses + self.retry_after * 2 ** min(member.failures, 6)
                member.failures = 0 if stored else member.failures + 1

    def evict(self, num_pages: int, windows: int, states: int) -> list[Event]:
        """Give up full pages, then windows, then states."""
        gone: list[Event] = []
        while count(gone, Gone.WHOLE, Gone.BARE) < num_pages:
            leaves = [prefix for prefix in self.pages if self.is_free_leaf(prefix)]
            if not leaves:
                break
            gone += self.remove_run(min(leaves, key=lambda prefix: self.pages[prefix].used))
        # Without windows there is no window beside a page.
        while self.rules.window and count(gone, Gone.WHOLE, Gone.WINDOW) < windows:
            runs = [
                prefix
                for prefix, page in self.pages.items()
                if page.ends and page.live and not self.window_locked(prefix)
            ]
            if not runs:
                break
            oldest = min(runs, key=lambda prefix: self.pages[prefix].window_used)
            gone += self.remove_run(oldest) if self.is_free_leaf(oldest) else self.entomb(oldest)
        while count(gone, Gone.STATE) < states:
            ends = [
                prefix
                for prefix, page in self.pages.items()
                if page.state is not None and not self.state_locked(prefix)
            ]
            if not ends:
                break
            oldest = min(ends, key=lambda prefix: self.pages[prefix].state_used)
            if self.is_free_leaf(oldest):
                gone += self.remove_run(oldest)
            else:
                gone.append((Gone.STATE, lose_state(self.pages[oldest]), 0))
        return gone

    def lock(self, prefix: Prefix, skipped: Sequence[ComponentType] = ()) -> Lock:
        """Lock a path: of windows whole runs, until they are a window or the path is over."""
        lock = Lock(prefix)
        if self.rules.window and SWA not in skipped:
            for start, _ in reversed(list(self.runs(prefix))):
                if lock.window < self.rules.window:
                    lock.window = len(prefix[1]) - start
        if MAMBA not in skipped and prefix[1]:
            lock.state = self.pages[prefix].state is not None
        self.locks.append(lock)
        return lock

    def move_on(self, lock: Lock) -> None:
        """Release the windows and the state of a lock; what nobody else has was just used."""
        namespace, symbols = lock.prefix
        first, lock.window = len(symbols) - lock.window, 0
        had_state, lock.state = lock.state, False
        for start, end in self.runs(lock.prefix):
            run_end = (namespace, symbols[:end])
            if start >= first and not self.window_locked(run_end):
                self.pages[run_end].window_used = self.tick()
        if had_state and not self.state_locked(lock.prefix):
            self.pages[lock.prefix].state_used = self.tick()

    def unlock(self, lock: Lock) -> None:
        self.move_on(lock)
        self.locks.remove(lock)

    # -- steps -------------------------------------------------------------------------------------

    def tick(self) -> int:
        self.now += 1
        return self.now

    def use(self, prefix: Prefix) -> int:
        """Use what is there; a run is cut where the use ends."""
        self.uses += 1
        path, now = self.path(prefix), self.tick()
        for page in path:
            page.used = now
        if path and not path[-1].ends:
            path[-1].ends, path[-1].window_used = True, self.tick()
        return len(path)

    def use_window(self, prefix: Prefix) -> None:
        """Use the runs of the window at the end of a prefix, the end last."""
        path = self.path(prefix)
        for _, end in self.runs(prefix):
            if end > len(path) - self.rules.window:
                path[end - 1].window_used = self.tick()

    def is_free_leaf(self, prefix: Prefix) -> bool:
        return not self.locked(prefix) and not self.children(prefix)

    def remove_run(self, last: Prefix) -> list[Event]:
        """Take out a run by its last page."""
        namespace, symbols = last
        run = [self.pages.pop(last)]
        while symbols := symbols[:-1]:
            if self.pages[namespace, symbols].ends:
                break
            run.insert(0, self.pages.pop((namespace, symbols)))
        whole = not self.rules.window or run[0].live
        gone: list[Event] = [(Gone.WHOLE if whole else Gone.BARE, page.slot, 0) for page in run]
        return [*gone, *[(Gone.STATE, run[-1].state, 0) for _ in [0] if run[-1].state is not None]]

    def entomb(self, last: Prefix) -> list[Event]:
        """A run loses its windows, and the state that stands on them unless it is locked."""
        namespace, symbols = last
        start = next(start for start, end in self.runs(last) if end == len(symbols))
        gone: list[Event] = []
        for end in range(start + 1, len(symbols) + 1):
            page = self.pages[namespace, symbols[:end]]
            page.live = False
            gone.append((Gone.WINDOW, page.slot, 0))
        if self.pages[last].state is not None and not self.state_locked(last):
            gone.append((Gone.STATE, lose_state(self.pages[last]), 0))
        return gone


def begins(prefix: Prefix, sequence: Prefix) -> bool:
    """Whether a sequence begins with a prefix."""
    return prefix[0] == sequence[0] and prefix[1] == sequence[1][: len(prefix[1])]


def count(events: list[Event], *kinds: Gone) -> int:
    return sum(kind in kinds for kind, _, _ in events)


def lose_state(page: Page) -> int:
    """Take the state of a page away."""
    slot, page.state = page.state, None
    assert slot is not None
    return slot
