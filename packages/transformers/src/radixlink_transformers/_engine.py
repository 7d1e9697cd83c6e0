"""`TransformersEngine`: what a caller sees: prompts in, tokens out; whole pages are kept.

Requests are a `Scheduler`'s; what one does is `Answer`'s.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Self, TypeVar

from radixlink_contracts import MAX_TIMEOUT_S
from radixlink_contracts.errors import ContractError, InvalidTransitionError
from radixlink_transformers._admission import Admission
from radixlink_transformers._answer import Answer, Question
from radixlink_transformers._first_token import FirstTokens
from radixlink_transformers._hugging_face import vocabulary_size
from radixlink_transformers._patience import Patience
from radixlink_transformers._pending import PendingGeneration
from radixlink_transformers._request import EngineRequest, prompt_key, token_ids
from radixlink_transformers._scheduler import Scheduler
from radixlink_transformers._stay import Stay
from radixlink_transformers._timer import Timer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from radixlink_contracts import Clock, LinkedPrefixCache, LinkedTreeCore, RequestId
    from radixlink_transformers._device import Device
    from radixlink_transformers._gate import LayerGate
    from radixlink_transformers._hugging_face import CausalModel
    from radixlink_transformers._values import EngineSettings, FirstToken, Generation, Progress

_T = TypeVar("_T")


class TransformersEngine:
    """A small engine: real models, real KV, requests whose forwards take turns.

    `generate` answers one prompt. `submit` takes in several, and each `iterate` lets all of them go
    on by one forward; their answers are what they would be alone.

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
        self._cache: Final = cache
        self._tree: Final = tree
        self._device: Final = device
        self._clock: Final = clock
        self._settings: Final = settings
        self._num_ranks: Final = num_ranks
        self._vocab_size: Final = vocabulary_size(model.config)
        self._pages_by_writer: Final = pages_by_writer
        self._resources: Final = resources or ExitStack()
        self._scheduler: Final = Scheduler(cache, settings.poll_interval_s)
        self._admission: Final = Admission(
            cache=cache,
            device=device,
            traffic=self._scheduler.traffic,
            mode=settings.load_mode,
            begin_wait=lambda: self._begin_wait(settings.wait_timeout_s),
        )
        self._answer: Final = Answer(
            model=model,
            device=device,
            admission=self._admission,
            traffic=self._scheduler.traffic,
            gate=gate,
            chunk_tokens=settings.chunk_tokens,
        )
        self._first_tokens: Final = FirstTokens(
            model=model,
            device=device,
            admission=self._admission,
            stay=self._stay,
            wait_for_offloads=self._wait_for_offloads,
            timer=lambda: Timer(clock),
            chunk_tokens=settings.chunk_tokens,
        )
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

        `submit`, and `iterate` until it is over: others that are in flight go on meanwhile.

        Args:
            prompt: At least one token id of the model's vocabulary.
            request_id: The same on all ranks.
            max_new_tokens: At least 1.
            eos_ids: Tokens that end the answer.
            on_progress: Is told what starts, and each token.

        Raises:
            CapacityError: Prompt and answer do not fit into the pool beside what is in use.
            AgreementError: The ranks do not agree; only `reset`, by all of them, helps.
            ContractError: There is no prompt or one of no token ids of the model, or nothing to
                answer.
        """
        pending = self.submit(prompt, request_id, max_new_tokens, eos_ids, on_progress)
        while not pending.is_over:
            self.iterate()
        return pending.result()

    def submit(
        self,
        prompt: Sequence[int],
        request_id: RequestId,
        max_new_tokens: int,
        eos_ids: Collection[int] = frozenset(),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> PendingGeneration:
        """Take a request in; it takes part from the next `iterate` on.

        Requests ask for room in the order in which they came; one that has none lets those that run
        go on, and holds nothing meanwhile. Two that share a prefix share its load: the later one
        waits for that of the earlier one. What a request computes is there for others when it ends.

        Args:
            prompt: As of `generate`; likewise the others.
            request_id: Of no other request in flight.
            max_new_tokens: At least 1.
            eos_ids: Tokens that end the answer.
            on_progress: Is called within `iterate`; it must not call this engine. What it raises ends
                the request, so with several ranks it must not raise on some of them alone.

        Returns:
            How the request stands. What it failed with is a value there: one request's failure,
            whatever it is, leaves the others as they are.

        Raises:
            ContractError: There is no prompt or one of no token ids of the model, nothing to answer,
                or such a request already.
            InvalidTransitionError: It is called from within an iteration.
        """
        self._require_open("submit")
        self._scheduler.refuse_within_iteration("submit")
        if max_new_tokens < 1:
            raise ContractError(
                f"submit {request_id}: expected max_new_tokens of at least 1, got {max_new_tokens}"
            )
        tokens = self._tokens_of(prompt, f"submit {request_id}")
        request, pending = EngineRequest(request_id, tokens), PendingGeneration(request_id)
        question = Question(
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            eos_ids=frozenset(eos_ids),
            tell=on_progress or _tell_nobody,
        )
        stay = self._stay(request_id)
        way = self._answer.way(request, question, stay, Timer(self._clock), pending)
        self._scheduler.add(request, way, pending)
        return pending

    def iterate(self) -> None:
        """Let each request in flight go on by one turn: one forward, or a part of its wait.

        Raises:
            AgreementError: The ranks do not agree; all requests are gone, and only `reset`, by all
                ranks, helps.
        """
        self._require_open("iterate")
        self._scheduler.iterate()

    def abort(self, request_id: RequestId) -> None:
        """A request is gone, whatever it was at: it gives back all it has, and inserts nothing.

        Nothing to do for one that is over. A load that was started ends for nobody.

        Raises:
            InvalidTransitionError: It is called from within an iteration.
        """
        self._require_open("abort")
        self._scheduler.abort(request_id)

    @property
    def num_in_flight(self) -> int:
        """Requests that are not over."""
        return self._scheduler.num_in_flight

    def num_tokens_on_device(self, prompt: Sequence[int]) -> int:
        """How much of a prompt's KV the device has now.

        Args:
            prompt: At least one token.

        Raises:
            ContractError: There is no prompt.
        """
        self._require_open("num_tokens_on_device")
        tokens = self._tokens_of(prompt, "num_tokens_on_device")
        return self._admission.on_device(prompt_key(tokens)).device_prefix_len

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
        tokens = self._tokens_of(prompt, "first_token_without_store")
        return self._first_tokens.without_store(tokens)

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
        return self._first_tokens.with_pages_swapped(
            self._tokens_of(prompt, "first_token_with_pages_swapped"),
            page=page,
            other=other,
            num_prefix_tokens=num_prefix_tokens,
        )

    # -- the cache as a whole -------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._device.page_size

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
        """Iterate until nothing is in flight or outstanding: all offloads are confirmed, or failed.

        Args:
            timeout_s: How long, at least; with several ranks it is counted in steps, so that all of
                them give up in the same one.

        Returns:
            False when that took too long.

        Raises:
            ContractError: That is no time to wait.
        """
        self._require_open("settle")
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise ContractError(
                f"settle: expected timeout_s in 0..{MAX_TIMEOUT_S:g}, got {timeout_s}"
            )
        patience = self._begin_wait(timeout_s)
        while self._scheduler.num_in_flight or self._cache.num_outstanding:
            if not patience.lasts():
                return False
            self._scheduler.iterate()
        return True

    def reset(self) -> None:
        """Forget all that is cached on the device. The only way on after an `AgreementError`.

        Requests in flight are aborted.

        Raises:
            InvalidTransitionError: It is called from within an iteration.

        Ranks: all.
        """
        self._require_open("reset")
        self._scheduler.refuse_within_iteration("reset")
        try:
            self._scheduler.abort_all()
        finally:
            self._cache.reset()

    def close(self) -> None:
        """Release everything; requests in flight are aborted. Idempotent.

        Raises:
            InvalidTransitionError: It is called from within an iteration.
        """
        self._scheduler.refuse_within_iteration("close")
        self._closed = True
        try:
            self._scheduler.abort_all()
        finally:
            self._resources.close()

    # -- steps of the above ---------------------------------------------------------------------

    def _tokens_of(self, prompt: Sequence[int], call: str) -> tuple[int, ...]:
        """A prompt as plain ids, each of the model.

        Raises:
            ContractError: It is none, or empty.
        """
        return token_ids(prompt, self._vocab_size, call)

    def _stay(self, request_id: RequestId | None = None) -> Stay:
        return Stay(
            cache=self._cache,
            tree=self._tree,
            device=self._device,
            retire_batches=self._scheduler.retire,
            request_id=request_id,
        )

    def _begin_wait(self, timeout_s: float) -> Patience:
        return Patience(
            clock=self._clock,
            timeout_s=timeout_s,
            poll_interval_s=self._settings.poll_interval_s,
            num_ranks=self._num_ranks,
        )

    def _wait_for_offloads(self, take: Callable[[], _T | None]) -> _T | None:
        """What `take` gives in the end, when what offloads still read is free; else None."""
        patience = self._begin_wait(self._settings.wait_timeout_s)
        while True:
            taken = take()
            if taken is not None or not self._cache.num_outstanding or not patience.lasts():
                return taken
            self._scheduler.iterate()

    def _require_open(self, event: str) -> None:
        if self._closed:
            raise InvalidTransitionError(
                f"{event}: expected an open engine, got a closed one", state="closed", event=event
            )


def _tell_nobody(progress: Progress) -> None:
    del progress
