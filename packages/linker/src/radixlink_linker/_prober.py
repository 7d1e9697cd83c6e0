"""`Prober`: asks this rank's store, off the scheduler thread, what an iteration's requests may restore.

The lookups of one iteration are one task of the executor, and one question to each store, where the
linker can take them together (`BatchingLinker`); otherwise each is a task of its own. Whatever goes
wrong is a miss of the lookups that it befell. While a task hangs, new lookups are a miss at once, but
for one task in a while (see `Breaker`): each of them would wait for its deadline, and keep a thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from radixlink_contracts import BatchingLinker
from radixlink_contracts.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_contracts import Executor, UnifiedCacheLinker
    from radixlink_linker._breaker import Breaker
    from radixlink_linker._component_transfers import ComponentTransfers
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._lookup import Lookup


class Prober:
    """The lookups that wait to be asked.

    Ranks: local.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        linker: UnifiedCacheLinker,
        transfers: ComponentTransfers,
        executor: Executor,
        breaker: Breaker,
        counters: LinkerCounters,
    ) -> None:
        """Start with none.

        Args:
            linker: Whom to ask.
            transfers: What to ask.
            executor: On whose threads.
            breaker: Of the tasks.
            counters: Of what happens.
        """
        self._linker = linker
        self._batching = linker if isinstance(linker, BatchingLinker) else None
        self._transfers = transfers
        self._executor = executor
        self._breaker = breaker
        self._counters = counters
        self._waiting: list[Lookup] = []

    def add(self, lookup: Lookup) -> None:
        """Ask this with the others of the iteration."""
        self._waiting.append(lookup)

    def submit(self) -> None:
        """Ask what was added since the last time.

        Cost: one task for all of them; one for each where the linker takes no batches.
        """
        if not self._waiting:
            return
        lookups, self._waiting = self._waiting, []
        if self._batching is not None:
            self._run(lookups, partial(_probe_together, lookups, self._batching, self._transfers))
            return
        for lookup in lookups:
            self._run([lookup], partial(lookup.probe, self._linker, self._transfers))

    def clear(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()

    def _run(self, lookups: Sequence[Lookup], task: Callable[[], None]) -> None:
        """Hand a task to the executor; where it cannot be, that is a miss of its lookups."""
        breaker = self._breaker
        hangs = breaker.refusal()
        if hangs is not None:
            self._counters.lookups_refused += len(lookups)
            for lookup in lookups:
                lookup.fail(hangs)
            return
        number = breaker.begin("lookup")

        def watched() -> None:
            try:
                task()
            except BaseException as error:
                # No `Exception`: the executor's to deal with, but nobody is to wait for an answer.
                for lookup in lookups:
                    if lookup.answer is None:
                        lookup.fail(text_of(error))
                raise
            finally:
                breaker.end(number)

        try:
            self._executor.submit(watched)
        except Exception as error:  # noqa: BLE001 -- an executor that refuses is this rank's miss
            breaker.end(number)
            for lookup in lookups:
                lookup.fail(text_of(error))
        except BaseException:
            # A signal's: whether it was taken is not known, and a call that never was would count
            # as one that hangs.
            breaker.end(number)
            raise


def _probe_together(
    lookups: Sequence[Lookup], linker: BatchingLinker, components: ComponentTransfers
) -> None:
    """Hash the tails, and ask for all of them at once. Thread: any, once."""
    asked = [
        (lookup, transfers)
        for lookup in lookups
        if (transfers := lookup.prepare(components)) is not None
    ]
    if not asked:
        return
    try:
        results = linker.lookup_batch(
            [(lookup.request_id, transfers) for lookup, transfers in asked]
        )
        pairs = list(zip(asked, results, strict=True))
    except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's miss
        for lookup, _ in asked:
            lookup.fail(text_of(error))
        return
    for (lookup, transfers), result in pairs:
        lookup.told(transfers, result)
