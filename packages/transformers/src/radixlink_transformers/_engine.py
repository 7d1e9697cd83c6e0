"""`TransformersEngine`: one request at a time, from a prompt to tokens; whole pages are kept.

A request's way, each step made by all ranks alike:

1. `step`, then match, lookup and load until it is settled what must be computed (`_prefix`).
2. Lock what was matched, make room for the rest and take its slots (`_stay`).
3. Launch: copy the prefix out of the pools, run the rest of the prompt, decode greedily. Where the
   load is layer-wise, each layer of the first forward waits for its own bytes, and it is agreed
   how the load ended before anything of that forward is used; when it failed, begin at 2 again
   with what the device has.
4. Write the new whole pages into the pools and insert them; the cache offers them to the store.
5. Give back what is left: the slots of the last, partial page, the lock, the name, the batch.

When anything is raised on the way, a KeyboardInterrupt included, all of this is undone. An
interrupt inside a call of the cache is the cache's: it may take a `reset`.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Self

import attrs
import torch

from radixlink_contracts import ComponentType, InsertParams, RadixKey
from radixlink_contracts.errors import ContractError, InvalidTransitionError
from radixlink_transformers._boundaries import Boundaries
from radixlink_transformers._forward import decode_greedily, ends_of_chunks, most_likely
from radixlink_transformers._patience import Patience
from radixlink_transformers._prefix import PrefixFinder
from radixlink_transformers._request import EngineRequest, prompt_key
from radixlink_transformers._sequence import RunningSequence
from radixlink_transformers._stay import Stay
from radixlink_transformers._values import (
    EngineSettings,
    FirstToken,
    Generation,
    PrefillStarted,
    RequestFigures,
    TokenGenerated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from radixlink_contracts import (
        Clock,
        LinkedPrefixCache,
        LinkedTreeCore,
        MatchResult,
        RequestId,
    )
    from radixlink_transformers._device import Device, PrefixRows
    from radixlink_transformers._gate import LayerGate
    from radixlink_transformers._hugging_face import CausalModel
    from radixlink_transformers._prefix import FoundPrefix
    from radixlink_transformers._stay import LockedPrefix
    from radixlink_transformers._values import Progress


class TransformersEngine:
    """A small engine: real models, real KV, one request at a time.

    Ranks: all, the same calls with the same arguments in the same order. A callback must not raise
        on one rank alone.
    Thread: one, the scheduler's.
    Owns: what `resources` holds; `close` releases it.
    """

    def __init__(
        self,
        *,
        model: CausalModel,
        cache: LinkedPrefixCache,
        tree: LinkedTreeCore,
        device: Device,
        clock: Clock,
        settings: EngineSettings,
        gate: LayerGate | None = None,
        num_ranks: int = 1,
        pages_by_writer: Callable[[], Mapping[int, int]] = dict,
        resources: ExitStack | None = None,
    ) -> None:
        """Take the parts; `build_engine` makes them.

        Args:
            model: Computes.
            cache: Decides what need not be computed.
            tree: That cache's own, to read where a prefix lies.
            device: Holds the pages.
            clock: For figures, and for deadlines where there is one rank.
            settings: How to run and wait.
            gate: Lets layers wait; needed for layer-wise loads.
            num_ranks: How many ranks make the same calls.
            pages_by_writer: Says what the property of that name does.
            resources: What to release at the end.

        Raises:
            ContractError: The parts do not fit each other.
        """
        if tree.page_size != device.page_size or tree.sliding_window < device.kind.lookback:
            raise ContractError(
                f"TransformersEngine: expected a tree of pages of {device.page_size} tokens and a "
                f"window of at least {device.kind.lookback}, got pages of {tree.page_size} and a "
                f"window of {tree.sliding_window}"
            )
        self._model: Final = model
        self._cache: Final = cache
        self._tree: Final = tree
        self._device: Final = device
        self._clock: Final = clock
        self._settings: Final = settings
        self._gate: Final = gate
        self._num_ranks: Final = num_ranks
        self._pages_by_writer: Final = pages_by_writer
        self._resources: Final = resources or ExitStack()
        self._finder: Final = PrefixFinder(cache, settings.load_mode)
        self._page_size: Final = device.page_size
        self._closed = False

    def __enter__(self) -> Self:
        """Be closed at the end of a `with` block."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # -- requests -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Sequence[int],
        request_id: RequestId,
        max_new_tokens: int,
        eos_ids: Collection[int] = frozenset(),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Generation:
        """Answer a prompt, with as little computed as device and store allow, and keep its pages.

        Args:
            prompt: At least one token.
            request_id: The same on all ranks.
            max_new_tokens: At least 1.
            eos_ids: Tokens that end the answer.
            on_progress: Is told what starts, and each token.

        Raises:
            CapacityError: Prompt and answer do not fit into the pool beside what is in use.
            AgreementError: The ranks do not agree; only `reset`, by all of them, helps.
            ContractError: There is no prompt, or nothing to answer.
        """
        self._require_open("generate")
        if max_new_tokens < 1:
            raise ContractError(
                f"generate {request_id}: expected max_new_tokens of at least 1, "
                f"got {max_new_tokens}"
            )
        timer = _Timer(self._clock)
        tell = on_progress or _tell_nobody
        tokens = tuple(prompt)
        request = EngineRequest(request_id, tokens)
        self._cache.step()
        with self._stay() as stay:
            found = self._finder.find(request, stay, self._begin_wait, tell)
            timer.settled()
            run = self._launch(request, tokens, max_new_tokens, found, stay, tell)
            if run is None:
                # It is computed now, whatever the store has; what ran is over.
                stay.retire()
                found = attrs.evolve(found, match=self._on_device(request), loading_tokens=0)
                timer.settled()
                run = self._launch(request, tokens, max_new_tokens, found, stay, tell)
                assert run is not None, "nothing is loaded that could fail"
            sequence, logits = run.sequence, run.logits
            new_tokens: list[int] = []
            for token in decode_greedily(sequence.run, logits, max_new_tokens, eos_ids):
                if not new_tokens:
                    timer.answered()
                new_tokens.append(token)
                tell(TokenGenerated(token=token))
            self._keep(stay, run, (*tokens, *new_tokens[:-1]))
        return Generation(
            tokens=tuple(new_tokens),
            first_logits=logits,
            figures=_figures(len(tokens), found, timer),
        )

    def num_tokens_on_device(self, prompt: Sequence[int]) -> int:
        """How much of a prompt's KV the device has now.

        Args:
            prompt: At least one token.

        Raises:
            ContractError: There is no prompt.
        """
        self._require_open("num_tokens_on_device")
        return self._finder.find_on_device(prompt_key(tuple(prompt))).num_tokens

    def first_token_without_store(self, prompt: Sequence[int]) -> FirstToken:
        """What follows a prompt with what the device has now, and no store.

        The other arm of a comparison. Inserts nothing, offloads nothing, and takes no slot but one
        for a state.

        Args:
            prompt: At least one token.

        Raises:
            CapacityError: There is no room for a state.
            ContractError: There is no prompt.
        """
        self._require_open("first_token_without_store")
        timer = _Timer(self._clock)
        tokens = tuple(prompt)
        with self._stay() as stay:
            found = self._finder.find_on_device(prompt_key(tokens))
            timer.settled()
            prefix = stay.lock(found.match)
            rows = self._device.rows_of_prefix(prefix.slots)
            return self._first_token(tokens, rows, self._take_state(stay, prefix), timer)

    def first_token_with_pages_swapped(
        self,
        prompt: Sequence[int],
        *,
        page: int,
        other: int,
        num_prefix_tokens: int | None = None,
    ) -> FirstToken:
        """A control: the same, but with one page's bytes taken from another page.

        A check that compares logits must see this; one that does not sees no stale page either. The
        pool is not changed. It is the keys and values of full attention that are wrong.

        Args:
            prompt: A prompt whose pages are on the device, for example after `generate`.
            page: Index of the page, in the prompt, that is wrong.
            other: Index of the page whose bytes stand in its place.
            num_prefix_tokens: Use no more than so many tokens of what is on the device, to compare
                with a run that had no more; None uses all.

        Raises:
            ContractError: One of the pages is not on the device, or they are the same.
        """
        self._require_open("first_token_with_pages_swapped")
        timer = _Timer(self._clock)
        tokens = tuple(prompt)
        key = prompt_key(tokens)
        if num_prefix_tokens is not None:
            key = attrs.evolve(key, token_ids=key.token_ids[:num_prefix_tokens])
        with self._stay() as stay:
            found = self._finder.find_on_device(key)
            timer.settled()
            prefix = stay.lock(found.match)
            of_prefix = self._device.rows_of_prefix(prefix.slots)
            rows = of_prefix.kv.clone()
            if page == other or not (0 <= page < len(rows) and 0 <= other < len(rows)):
                raise ContractError(
                    "first_token_with_pages_swapped: expected two different pages of the "
                    f"{len(rows)} that are used from the device, got {page} and {other}"
                )
            rows[page] = rows[other]
            state = self._take_state(stay, prefix)
            return self._first_token(tokens, attrs.evolve(of_prefix, kv=rows), state, timer)

    # -- the cache as a whole -------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def pages_by_writer(self) -> Mapping[int, int]:
        """Pages that came from the store so far, by the process that wrote them (0: unknown).

        Ranks: local.
        """
        return self._pages_by_writer()

    @property
    def available_tokens(self) -> int:
        """Slots that are free, without evicting anything."""
        return self._device.full.available_size

    @property
    def num_outstanding(self) -> int:
        """Lookups, loads and offloads that are not over."""
        return self._cache.num_outstanding

    def settle(self, timeout_s: float) -> bool:
        """Step until nothing is outstanding: all offloads are confirmed, or failed.

        Args:
            timeout_s: How long, at least; with several ranks it is counted in steps, so that all of
                them give up in the same one.

        Returns:
            False when that took too long.
        """
        self._require_open("settle")
        patience = self._begin_wait(timeout_s)
        while self._cache.num_outstanding:
            self._cache.step()
            if self._cache.num_outstanding and not patience.pause():
                return False
        return True

    def reset(self) -> None:
        """Forget all that is cached on the device. The only way on after an `AgreementError`.

        Ranks: all.
        """
        self._require_open("reset")
        self._cache.reset()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._closed = True
        self._resources.close()

    # -- steps of the above ---------------------------------------------------------------------

    def _first_token(
        self, tokens: tuple[int, ...], prefix: PrefixRows, state: int | None, timer: _Timer
    ) -> FirstToken:
        sequence = RunningSequence(self._model, self._device, prefix, state=state)
        sequence.fill()
        logits = torch.empty(0)
        for end in self._ends(sequence, tokens):
            logits = sequence.run(tokens[sequence.num_tokens : end])
        token = most_likely(logits)
        timer.answered()
        return FirstToken(
            token=token,
            logits=logits,
            figures=timer.figures(len(tokens), device_tokens=prefix.num_tokens, restored_tokens=0),
        )

    def _launch(
        self,
        request: EngineRequest,
        tokens: tuple[int, ...],
        max_new_tokens: int,
        found: FoundPrefix,
        stay: Stay,
        tell: Callable[[Progress], None],
    ) -> _Run | None:
        """Make room, and run the prompt behind what was found.

        Returns:
            None where what was being loaded did not come: nothing that was computed counts.
        """
        prefix = stay.lock(found.match)
        slots = torch.cat([prefix.slots, request.loading[: found.loading_tokens]])
        # The last new token is never run, so it needs no slot.
        longest = self._whole_pages(len(tokens) + max_new_tokens - 1 + self._page_size - 1)
        stay.reserve(longest - len(slots), len(slots))
        state = self._take_state(stay, prefix)
        if found.loading_tokens and stay.load_failed:
            return None
        batch = stay.launch()
        tell(PrefillStarted(num_cached_tokens=len(slots), num_tokens=len(tokens) - len(slots)))
        boundaries = Boundaries(self._device, stay, found.match, len(tokens), state)
        sequence = RunningSequence(
            self._model,
            self._device,
            self._device.rows_of_prefix(slots),
            state=state,
            on_run=boundaries.note,
        )
        first, *ends = self._ends(sequence, tokens, boundaries.stops)
        if found.loading_tokens:
            assert self._gate is not None, "only a linker with layers admits"
            with self._gate.before_each_layer(batch, sequence.fill_layer):
                logits = sequence.run(tokens[len(slots) : first])
        else:
            sequence.fill()
            logits = sequence.run(tokens[len(slots) : first])
        stay.finish_loads(batch)
        if found.loading_tokens:
            if stay.load_failed:
                return None
            # Where the cache has it now, and locked from here on.
            num_tokens, slots = len(slots), stay.lock(self._on_device(request)).slots
            assert len(slots) == num_tokens, "what landed is locked for its request"
        for end in ends:
            logits = sequence.run(tokens[sequence.num_tokens : end])
        return _Run(sequence=sequence, logits=logits, prefix_slots=slots, boundaries=boundaries)

    def _on_device(self, request: EngineRequest) -> MatchResult:
        """Where the device has a request's prompt."""
        return self._finder.find_on_device(request.key).match

    def _take_state(self, stay: Stay, prefix: LockedPrefix) -> int | None:
        """A slot for the states of a request; None for a model without."""
        return None if self._device.states is None else stay.take_state(prefix)

    def _ends(
        self, sequence: RunningSequence, tokens: tuple[int, ...], stops: Collection[int] = ()
    ) -> list[int]:
        """Where each forward of the rest of a prompt ends."""
        chunk_tokens = self._settings.chunk_tokens
        return ends_of_chunks(sequence.num_tokens, len(tokens), chunk_tokens, stops)

    def _keep(self, stay: Stay, run: _Run, tokens: tuple[int, ...]) -> None:
        """Write the new pages of a sequence that are of use into the pools, and insert them."""
        start = len(run.prefix_slots)
        ends = run.boundaries.of_insert(start, len(tokens))
        if not ends:
            return
        new = stay.new_slots(ends[-1].num_tokens - start)
        floor = start + new.num_without_window
        run.sequence.save(new.full, start, floor)
        value = torch.cat([run.prefix_slots, new.full])
        inserted = start
        for boundary in ends:
            end = boundary.num_tokens
            params = InsertParams(
                key=RadixKey(array("q", tokens[:end])),
                value=value[:end],
                prev_prefix_len=inserted,
                inserted_len=inserted if inserted > start else 0,
                component_evicted_seqlens=self._floors(floor),
                mamba_value=boundary.state,
            )
            stay.insert(params, end - inserted)
            inserted = end

    def _floors(self, window_start: int) -> dict[ComponentType, int]:
        """From which token on a sequence has a window, for an insert."""
        return {} if self._device.windows is None else {ComponentType.SWA: window_start}

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._page_size

    def _stay(self) -> Stay:
        return Stay(
            cache=self._cache,
            tree=self._tree,
            device=self._device,
            begin_wait=self._begin_wait,
        )

    def _begin_wait(self, timeout_s: float | None = None) -> Patience:
        settings = self._settings
        return Patience(
            clock=self._clock,
            timeout_s=settings.wait_timeout_s if timeout_s is None else timeout_s,
            poll_interval_s=settings.poll_interval_s,
            num_ranks=self._num_ranks,
        )

    def _require_open(self, event: str) -> None:
        if self._closed:
            raise InvalidTransitionError(
                f"{event}: expected an open engine, got a closed one", state="closed", event=event
            )


@attrs.frozen(kw_only=True, eq=False)
class _Run:
    """A prompt that was run.

    Attributes:
        sequence: It.
        logits: Behind it. Shape: (vocabulary,).
        prefix_slots: Full slots of what was not computed, which are the cache's. Shape: (n,) int64.
        boundaries: Where it can be gone on from.
    """

    sequence: RunningSequence
    logits: torch.Tensor
    prefix_slots: torch.Tensor
    boundaries: Boundaries


@attrs.define
class _Timer:
    """Two moments of a request. Starts when it is made."""

    _clock: Clock
    _started: float = attrs.field(init=False)
    _settled: float = attrs.field(init=False)
    _answered: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._started = self._settled = self._answered = self._clock.now()

    def settled(self) -> None:
        """It is settled what must be computed."""
        self._settled = self._clock.now()

    def answered(self) -> None:
        """The first token is known."""
        self._answered = self._clock.now()

    def figures(
        self, prompt_tokens: int, *, device_tokens: int, restored_tokens: int
    ) -> RequestFigures:
        """The figures of a request that was answered."""
        return RequestFigures(
            prompt_tokens=prompt_tokens,
            device_tokens=device_tokens,
            restored_tokens=restored_tokens,
            computed_tokens=prompt_tokens - device_tokens - restored_tokens,
            time_to_first_token_s=self._answered - self._started,
            load_s=self._settled - self._started,
            compute_s=self._answered - self._settled,
        )


def _figures(prompt_tokens: int, found: FoundPrefix, timer: _Timer) -> RequestFigures:
    return timer.figures(
        prompt_tokens,
        device_tokens=found.device_tokens,
        restored_tokens=found.restored_tokens,
    )


def _tell_nobody(progress: Progress) -> None:
    del progress
