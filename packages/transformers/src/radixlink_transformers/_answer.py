"""`Answer`: what one request does, from its prompt to its tokens, one forward an iteration.

1. Be admitted (`_admission`): a prefix that is locked, slots for the rest.
2. Copy the prefix out of the pools and run the rest of the prompt, chunk by chunk, then decode
   greedily. Where the load is layer-wise, each layer of the first forward waits for its own bytes,
   and it is agreed how the load ended before anything of that forward is used; when it failed,
   begin at 1 again.
3. Write the new whole pages into the pools and insert them; the cache offers them to the store.
4. Give back what is left: the slots of the last, partial page, the lock, the name.

When anything is raised on the way, a KeyboardInterrupt included, or the request is aborted, all of
this is undone. An interrupt inside a call of the cache is the cache's: it may take a `reset`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import ComponentType, InsertParams, RadixKey
from radixlink_transformers._boundaries import Boundaries
from radixlink_transformers._forward import answer_is_over, ends_of_chunks, most_likely
from radixlink_transformers._scheduler import Turn
from radixlink_transformers._sequence import RunningSequence
from radixlink_transformers._values import Generation, PrefillStarted, TokenGenerated

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

    import torch

    from radixlink_transformers._admission import Admission, Admitted, Tell
    from radixlink_transformers._device import Device
    from radixlink_transformers._gate import LayerGate
    from radixlink_transformers._hugging_face import CausalModel
    from radixlink_transformers._pending import PendingGeneration
    from radixlink_transformers._request import EngineRequest
    from radixlink_transformers._scheduler import Traffic
    from radixlink_transformers._stay import Stay
    from radixlink_transformers._timer import Timer


@attrs.frozen(kw_only=True)
class Question:
    """What is asked.

    Attributes:
        tokens: The prompt.
        max_new_tokens: How many tokens at most.
        eos_ids: Tokens that end the answer.
        tell: Is told what starts, and each token.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int
    eos_ids: Collection[int]
    tell: Tell


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


class Answer:
    """Answers the requests of one engine.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        model: CausalModel,
        device: Device,
        admission: Admission,
        traffic: Traffic,
        gate: LayerGate | None,
        chunk_tokens: int | None,
    ) -> None:
        """Take the parts.

        Args:
            model: Computes.
            device: Holds the pages.
            admission: Says what need not be computed, and takes room.
            traffic: What requests share.
            gate: Lets layers wait; needed for layer-wise loads.
            chunk_tokens: A forward runs at most so many; None for any number.
        """
        self._model: Final = model
        self._device: Final = device
        self._admission: Final = admission
        self._traffic: Final = traffic
        self._gate: Final = gate
        self._chunk_tokens: Final = chunk_tokens

    def way(
        self,
        request: EngineRequest,
        question: Question,
        stay: Stay,
        timer: Timer,
        pending: PendingGeneration,
    ) -> Generator[Turn, None, None]:
        """The turns of one request; leaving it early gives back all that it holds.

        Args:
            request: Not begun.
            question: What is asked.
            stay: Of the request, not entered.
            timer: Of the request.
            pending: Is told the answer.
        """
        page_size, tokens = self._device.page_size, question.tokens
        # The last new token is never run, so it needs no slot.
        longest = self._whole_pages(len(tokens) + question.max_new_tokens - 1 + page_size - 1)
        new: list[int] = []
        with stay:
            while True:
                admitted = yield from self._admission.admit(request, stay, longest, question.tell)
                timer.settled()
                self._traffic.num_running += 1
                try:
                    run = yield from self._prefill(request, question, admitted, stay)
                    if run is not None:
                        new = yield from self._decode(question, run, timer)
                        self._keep(stay, run, (*tokens, *new[:-1]))
                        break
                finally:
                    self._traffic.num_running -= 1
                # What was being loaded did not come, so nothing that was computed counts.
                stay.let_go()
                yield Turn.WAITS
        pending.end(
            Generation(
                tokens=tuple(new),
                first_logits=run.logits,
                figures=timer.figures(
                    len(tokens),
                    device_tokens=admitted.device_tokens,
                    restored_tokens=admitted.restored_tokens,
                ),
            )
        )

    def _prefill(
        self, request: EngineRequest, question: Question, admitted: Admitted, stay: Stay
    ) -> Generator[Turn, None, _Run | None]:
        """Run the prompt behind what it begins with; None where a load failed meanwhile."""
        slots, tokens = admitted.slots, question.tokens
        question.tell(
            PrefillStarted(num_cached_tokens=len(slots), num_tokens=len(tokens) - len(slots))
        )
        boundaries = Boundaries(self._device, stay, admitted.match, len(tokens), admitted.state)
        sequence = RunningSequence(
            self._model,
            self._device,
            self._device.rows_of_prefix(slots),
            state=admitted.state,
            on_run=boundaries.note,
        )
        first, *ends = ends_of_chunks(len(slots), len(tokens), self._chunk_tokens, boundaries.stops)
        if admitted.loading:
            yield Turn.RUNS_WHILE_LOADING
            assert self._gate is not None, "only a linker with layers admits"
            with self._gate.before_each_layer(self._traffic.batch, sequence.fill_layer):
                logits = sequence.run(tokens[len(slots) : first])
            yield Turn.RAN
            if request.load_failed:
                return None
            # Where the cache has it now, and locked from here on; another may have added to it.
            num_tokens = len(slots)
            slots = stay.lock(self._admission.on_device(request.key)).slots
            assert len(slots) >= num_tokens, "what landed is locked for its request"
        else:
            sequence.fill()
            logits = yield from _in_turn(sequence, tokens[len(slots) : first])
        for end in ends:
            yield Turn.WAITS
            logits = yield from _in_turn(sequence, tokens[sequence.num_tokens : end])
        return _Run(sequence=sequence, logits=logits, prefix_slots=slots, boundaries=boundaries)

    def _decode(
        self, question: Question, run: _Run, timer: Timer
    ) -> Generator[Turn, None, list[int]]:
        """The new tokens; the last one is not run."""
        tokens: list[int] = []
        logits = run.logits
        while True:
            token = most_likely(logits)
            if not tokens:
                timer.answered()
            tokens.append(token)
            question.tell(TokenGenerated(token=token))
            if answer_is_over(tokens, question.max_new_tokens, question.eos_ids):
                return tokens
            yield Turn.WAITS
            logits = yield from _in_turn(run.sequence, [token])

    def _keep(self, stay: Stay, run: _Run, tokens: tuple[int, ...]) -> None:
        """Write the new pages of a sequence that are of use into the pools, and insert them."""
        start = len(run.prefix_slots)
        ends = run.boundaries.of_insert(start, len(tokens))
        if not ends:
            return
        new = stay.new_slots(ends[-1].num_tokens - start)
        floor = start + new.num_without_window
        run.sequence.save(new.full, start, floor)
        value = run.prefix_slots.new_empty(start + len(new.full))
        value[:start], value[start:] = run.prefix_slots, new.full
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
        return num_tokens - num_tokens % self._device.page_size


def _in_turn(
    sequence: RunningSequence, tokens: Sequence[int]
) -> Generator[Turn, None, torch.Tensor]:
    """One forward when it is its turn; the logits behind it, when they may be looked at."""
    yield Turn.RUNS
    logits = sequence.run(tokens)
    yield Turn.RAN
    return logits
