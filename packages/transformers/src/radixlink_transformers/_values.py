"""What the engine is told and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

from radixlink_contracts import MAX_TIMEOUT_S, LoadMode
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class EngineSettings:
    """How the engine runs and waits. The same on all ranks.

    Attributes:
        chunk_tokens: A prompt is run in pieces of at most so many tokens; None runs it at once.
        wait_timeout_s: How long one request may wait for its lookup and load, or for room. A
            backstop: longer than the cache's own deadlines, which end a wait more gently.
        poll_interval_s: The pause between two steps of such a wait.
        poison_freed_pages: Write NaN over pages and states when they are given back, to find
            whoever still reads them. For debugging: costs a write of each of them.
        state_interval_tokens: A prompt of a model with recurrent states leaves one behind at each
            multiple of this, in whole pages, and at its last page. None: of the chunk in which the
            model computes its recurrence.
        load_mode: STAGED: a request computes when all its bytes are there. LAYER_WISE: it computes
            at once, and each layer waits for its own; of a model with recurrent states that is
            STAGED all the same.
    """

    chunk_tokens: int | None = None
    wait_timeout_s: float = 60.0
    poll_interval_s: float = 0.0002
    poison_freed_pages: bool = False
    state_interval_tokens: int | None = None
    load_mode: LoadMode = LoadMode.STAGED

    def __attrs_post_init__(self) -> None:
        """Refuse an empty chunk and a wait that never ends."""
        for name in ("chunk_tokens", "state_interval_tokens"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ContractError(f"EngineSettings: expected {name} of at least 1, got {value}")
        if (
            not 0 <= self.wait_timeout_s <= MAX_TIMEOUT_S
            or not 0 < self.poll_interval_s <= MAX_TIMEOUT_S
        ):
            raise ContractError(
                f"EngineSettings: expected wait_timeout_s in 0..{MAX_TIMEOUT_S:g} and poll_interval_s "
                f"above 0, got {self.wait_timeout_s} and {self.poll_interval_s}"
            )


@attrs.frozen(kw_only=True)
class LookupStarted:
    """A store is asked for what the device lacks.

    Attributes:
        num_device_tokens: What the device has.
    """

    num_device_tokens: int


@attrs.frozen(kw_only=True)
class LoadStarted:
    """A store has some of it, and it is on its way.

    Attributes:
        num_tokens: How much.
    """

    num_tokens: int


@attrs.frozen(kw_only=True)
class PrefillStarted:
    """The rest is computed. Told once more where what was counted on did not come.

    Attributes:
        num_cached_tokens: What is not computed again.
        num_tokens: What is.
    """

    num_cached_tokens: int
    num_tokens: int


@attrs.frozen(kw_only=True)
class TokenGenerated:
    """A new token is known.

    Attributes:
        token: It.
    """

    token: int


Progress: TypeAlias = LookupStarted | LoadStarted | PrefillStarted | TokenGenerated
"""What `generate` tells on its way, in this order; after a layer-wise load that failed, a second
`PrefillStarted` before the first token."""


@attrs.frozen(kw_only=True)
class RequestFigures:
    """Where a prompt's KV came from, and what that took. At least its last token is computed.

    Attributes:
        prompt_tokens: All of them.
        device_tokens: Were on the device, or came while the request waited for room.
        restored_tokens: Came from the store, by a load of the request or, where two share a prefix, by
            one that it waited for. What another request computes meanwhile counts as that.
        computed_tokens: Were computed: all the others, at least one.
        time_to_first_token_s: From the call until the first token was known.
        load_s: From the call until it was settled what has to be computed: match, lookup, and the
            load unless it is layer-wise; one that failed counts.
        compute_s: From then until the first token: room, the copy out of the pool, the forward, and
            what it waited for layers.
    """

    prompt_tokens: int
    device_tokens: int
    restored_tokens: int
    computed_tokens: int
    time_to_first_token_s: float
    load_s: float
    compute_s: float


@attrs.frozen(kw_only=True, eq=False)
class Generation:
    """An answer.

    Attributes:
        tokens: The new tokens, an end token included.
        first_logits: Behind the prompt. Shape: (vocabulary,).
        figures: Of its prompt.
    """

    tokens: tuple[int, ...]
    first_logits: torch.Tensor
    figures: RequestFigures


@attrs.frozen(kw_only=True, eq=False)
class FirstToken:
    """What follows a prompt.

    Attributes:
        token: The most likely one.
        logits: Shape: (vocabulary,).
        figures: Of its prompt.
    """

    token: int
    logits: torch.Tensor
    figures: RequestFigures
