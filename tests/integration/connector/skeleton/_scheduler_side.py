"""The scheduler's side: decides what is loaded and stored. It sees no KV."""

from __future__ import annotations

import contextlib
from array import array
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import DEFAULT_NAMESPACE, LoadMode, Namespace, PageKeys
from radixlink_linker import MonotonicClock
from radixlink_tree import hash_pages, namespace_seed

from ._engine import Metadata, Move

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import Clock, Executor, PageStore

    from ._engine import KVCacheBlocks, KVConnectorOutput, Request


@attrs.define(eq=False)
class Lookup:
    """What the stores have of a prompt.

    Attributes:
        deadline: When it counts as a miss, by the clock.
        num_pages: The answer; None until there is one. Written once by a thread of the executor.
        keys: Of all whole pages of the prompt; written before `num_pages`.
    """

    deadline: float
    num_pages: int | None = None
    keys: PageKeys = attrs.field(factory=PageKeys)


class SchedulerSide:
    """Decides what is loaded and stored.

    Process: the scheduler's. Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        shards: Sequence[PageStore],
        executor: Executor,
        mode: LoadMode,
        lookup_timeout_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Remember nothing yet.

        Args:
            shards: The store of each worker, opened with that worker's layout. Owns: this.
            executor: Runs lookups. Owns: this.
            mode: STAGED: vLLM's asynchronous loads. LAYER_WISE: its synchronous ones.
            lookup_timeout_s: Seconds after which a lookup counts as a miss.
            clock: What counts them; None: the monotonic clock.
        """
        self._shards: Final = tuple(shards)
        self._page_size: Final = shards[0].layout.identity.page_size
        self._executor: Final = executor
        self._mode: Final = mode
        self._lookup_timeout_s: Final = lookup_timeout_s
        self._clock: Final = clock or MonotonicClock()
        self._lookups: dict[str, Lookup] = {}
        #: Those that no request waits for any more, and that had not returned.
        self._left: list[Lookup] = []
        self._loads: list[Move] = []
        self._offloads: list[Move] = []
        #: Requests whose blocks may hold anything, with the tokens they had when they got them.
        self._unproven: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how much of a prompt can be loaded behind what the device has; None: ask again.

        After the deadline, and while a lookup before it hangs, the answer is 0.
        """
        namespace = namespace_of(request)
        if namespace is None or request.skip_reading_prefix_cache:
            return 0, False
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            lookup = self._lookups[request.request_id] = self._ask(request, namespace)
        if lookup.num_pages is None:
            if self._clock.now() < lookup.deadline:
                return None, False
            # Another takes its place: the answer that comes now is too late for this request.
            self._left.append(lookup)
            lookup = self._lookups[request.request_id] = Lookup(lookup.deadline, num_pages=0)
        assert lookup.num_pages is not None, "it was given up where there is no answer"
        num_tokens = max(0, lookup.num_pages * self._page_size - num_computed_tokens)
        return num_tokens, num_tokens > 0 and self._mode is LoadMode.STAGED

    def _ask(self, request: Request, namespace: Namespace) -> Lookup:
        now = self._clock.now()
        lookup = Lookup(now + self._lookup_timeout_s)
        self._left = [one for one in self._left if one.num_pages is None]
        if any(one.deadline <= now for one in self._left):
            # A store hangs: until it returns the stores are asked nothing more.
            lookup.num_pages = 0
            return lookup
        # The last token of a prompt is always computed.
        tokens = tuple(request.all_token_ids[: request.num_prompt_tokens - 1])
        try:
            self._executor.submit(lambda: self._look_up(lookup, tokens, namespace))
        except Exception:  # noqa: BLE001 - no thread can be had: likewise a miss
            lookup.num_pages = 0
        return lookup

    def _look_up(self, lookup: Lookup, tokens: tuple[int, ...], namespace: Namespace) -> None:
        """Thread: any. Whatever goes wrong is a miss."""
        try:
            lookup.keys = page_keys(tokens, self._page_size, namespace)
            lookup.num_pages = min(shard.contains(lookup.keys).leading for shard in self._shards)
        except Exception:  # noqa: BLE001 - a store that fails costs a recompute
            lookup.num_pages = 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Queue the load into the blocks that the request was given; 0 tokens are no load.

        After a load it is called once more, with 0; then whoever asks again must not be told of it.
        """
        if num_external_tokens or self._mode is LoadMode.LAYER_WISE:
            self._unproven[request.request_id] = len(request.all_token_ids)
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            return
        # Tried once: after a failure vLLM asks again, and the rest is computed.
        stop, lookup.num_pages = lookup.num_pages, 0
        if not num_external_tokens:
            return
        assert stop is not None, "tokens are loaded that a lookup has found"
        start = stop - num_external_tokens // self._page_size
        (block_ids,) = blocks.get_block_ids()
        self._loads.append(
            Move(
                request_id=request.request_id,
                keys=lookup.keys.span(start, stop).data,
                block_ids=tuple(block_ids[start:stop]),
            )
        )

    def build_connector_meta(self, scheduler_output: object) -> Metadata:
        """Hand over what was queued in this step, and forget it."""
        del scheduler_output
        metadata = Metadata(loads=tuple(self._loads), offloads=tuple(self._offloads))
        self._loads.clear()
        self._offloads.clear()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """These asynchronous loads have ended; vLLM counts only what they brought as computed."""
        for request_id in connector_output.finished_recving or ():
            self._unproven.pop(request_id, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Have its whole pages stored; True: its blocks stay until `get_finished` names it.

        Nothing is stored of a request that ends while its blocks may hold anything: while an
        asynchronous load is on its way, or, layer by layer, before vLLM took a token of it, which
        it does only when no block of the forward was broken. vLLM counts their tokens as computed
        all the same. Of the first kind it keeps the blocks itself until `get_finished` says
        received; whoever is named sent as well is an error to it.
        """
        lookup = self._lookups.pop(request.request_id, None)
        if lookup is not None and lookup.num_pages is None:
            self._left.append(lookup)
        num_tokens_before = self._unproven.pop(request.request_id, None)
        namespace = namespace_of(request)
        if namespace is None or num_tokens_before == len(request.all_token_ids):
            return False, None
        tokens = tuple(request.all_token_ids[: request.num_computed_tokens])
        keys = page_keys(tokens, self._page_size, namespace)
        if not keys.data:
            return False, None
        self._offloads.append(
            Move(
                request_id=request.request_id,
                keys=keys.data,
                block_ids=tuple(block_ids[: len(keys)]),
            )
        )
        return True, None

    def shutdown(self) -> None:
        """Close the executor and all stores, whatever one of them raises. A lookup that hangs is left behind."""
        with contextlib.ExitStack() as opened:
            for shard in self._shards:
                opened.callback(shard.close)
            opened.callback(self._executor.close)


def namespace_of(request: Request) -> Namespace | None:
    """Who may share its KV; None: nobody, since it does not follow from its token ids alone."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    return Namespace(
        extra_key=None if adapter is None else adapter.lora_name, cache_salt=request.cache_salt
    )


def page_keys(
    tokens: Sequence[int], page_size: int, namespace: Namespace = DEFAULT_NAMESPACE
) -> PageKeys:
    """The keys of all whole pages of a sequence. Cost: one hash a page."""
    whole = array("q", tokens[: len(tokens) // page_size * page_size])
    return PageKeys(hash_pages(namespace_seed(namespace), whole.tobytes(), page_size))
