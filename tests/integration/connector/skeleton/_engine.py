"""What vLLM hands in, and what goes from its scheduler to each worker.

The Protocols are as narrow as the skeleton is: what vLLM hands in has more, under these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Adapter(Protocol):
    """vLLM's `LoRARequest`."""

    @property
    def lora_name(self) -> str:
        """Its name; in all engines that share a store it has to mean the same weights."""
        ...


class Request(Protocol):
    """A request of vLLM's scheduler."""

    @property
    def request_id(self) -> str:
        """Its id."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and answer."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """The first so many are the prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks, or will be: it counts what is being loaded or run."""
        ...

    @property
    def lora_request(self) -> Adapter | None:
        """The adapter that it runs with."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Whoever has another one may not share its KV."""
        ...

    @property
    def mm_features(self) -> Collection[object]:
        """Images and the like, whose KV does not follow from its token ids."""
        ...

    @property
    def prompt_embeds(self) -> object | None:
        """Likewise, in the place of tokens."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Its whole prompt has to be computed, for the logprobs of the prompt."""
        ...


class KVCacheBlocks(Protocol):
    """The blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """For each group of layers of the cache, its blocks, first tokens first."""
        ...


class KVConnectorOutput(Protocol):
    """What all workers said of a step."""

    @property
    def finished_recving(self) -> set[str] | None:
        """The requests whose asynchronous load has ended on every worker."""
        ...


@attrs.frozen(kw_only=True)
class Move:
    """Blocks to be loaded or stored. It is sent to each worker, so it holds plain values only.

    Attributes:
        request_id: Whose.
        keys: Of the pages, 32 bytes each.
        block_ids: The block of each page.
    """

    request_id: str
    keys: bytes
    block_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Metadata:
    """What workers do in one step; vLLM's `KVConnectorMetadata`.

    Attributes:
        loads: Before, or while, its forward runs.
        offloads: Blocks of requests that are finished.
    """

    loads: tuple[Move, ...] = ()
    offloads: tuple[Move, ...] = ()
