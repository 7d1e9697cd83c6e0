"""`RadixlinkLinker`: the class that SGLang constructs in each worker that owns a cache.

The only module here that imports SGLang; SGLang imports it by `linker_module_path`.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, cast

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName as EnginePoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from typing_extensions import override

from radixlink_contracts import ComponentType, PoolName, Shard
from radixlink_linker import (
    MonotonicClock,
    StoreLinker,
    StoreLinkerSettings,
    ThreadExecutor,
)
from radixlink_pools import CpuCopier, CudaCopier
from radixlink_sglang._bridge import Bridge
from radixlink_sglang._config import LinkerConfig
from radixlink_sglang._layer_gate import LayerGate
from radixlink_sglang._pools import engine_pools
from radixlink_sglang._ready_pools import ReadyPools
from radixlink_sglang._stores import store_factory
from radixlink_sglang.errors import LinkerConfigError, UnsupportedEngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from radixlink_contracts import CacheIdentity, Copier, DevicePool, PageStore, StoreFactory
    from radixlink_linker import StoreLinkerCounters
    from radixlink_sglang._engine import (
        CacheParams,
        EngineEvent,
        EngineTransfer,
        ServerSettings,
        StateSource,
    )
    from radixlink_sglang._pools import EnginePools

SUPPORTED_SGLANG: Final = "0.5.23"
"""The release whose interface this serves; its post-releases have the same."""


class RadixlinkLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is not typed
    """A linker of SGLang over any radixlink store.

    Ranks: one for each; SGLang's wrapper agrees with the others.
    Thread: the scheduler's. Owns threads for lookups and one for bytes.
    Errors: SGLang does not start where the constructor raises. Later only a copy that does not end
        is an error; whatever else goes wrong is a miss or a verdict.
    """

    def __init__(
        self,
        server_args: ServerSettings,
        params: CacheParams,
        *,
        components: AbstractSet[object],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Open the stores of this rank's pools.

        Args:
            server_args: What SGLang was started with.
            params: The parts of its cache.
            components: What its tree has.
            extra_config: `linker_extra_config`; see `LinkerConfig`.
            forward_stream: The stream that writes the pools.

        Raises:
            LinkerConfigError: The configuration is not right.
            UnsupportedEngineError: This SGLang, or a pool of it, is not known.
            LinkError: The store cannot be opened; its message says why.
        """
        _check_version()
        config = LinkerConfig.of_json({} if extra_config is None else extra_config)
        identity_of = _named_weights(server_args, config)
        self.forward_stream = forward_stream
        rank, num_ranks = _place_of(params)
        pools = engine_pools(params, _our_components(components))
        identity = pools.identity(
            model=identity_of[0], revision=identity_of[1], page_size=params.page_size
        )
        ready = ReadyPools(pools.group)
        copier = _copier(pools.device)
        with ExitStack() as opened:
            self._stores = store_factory(config)
            opened.callback(self._stores.close)
            self._linker = StoreLinker(
                pools=ready,
                stores=_opened(self._stores, pools, identity, Shard(index=rank, count=num_ranks)),
                copier=copier,
                settings=_linker_settings(config),
            )
            opened.callback(self._linker.close)
            #: SGLang reads these two.
            self.layer_done_counter = LayerGate(
                self._linker.layer_done_counter, pools.group.num_layers
            )
            self.pools = {
                EnginePoolName(name.value): pools.group.pool(name) for name in self._linker.pools
            }
            self._executor = ThreadExecutor()
            opened.callback(self._executor.close)
            self._bridge = Bridge(
                linker=self._linker,
                gate=self.layer_done_counter,
                ready=ready,
                record_ready=self._record_ready,
                stored_elsewhere=[
                    name for name in pools.group.pools if rank and pools.group.pool(name).replicated
                ],
                executor=self._executor,
                clock=MonotonicClock(),
                config=config,
            )
            if PoolName.MAMBA in self._linker.pools:
                # SGLang registers the counter with the KV pool alone.
                states = cast("StateSource", params.req_to_token_pool)
                states.register_layer_transfer_counter(self.layer_done_counter)
            # All is made: `close` closes it from here on.
            opened.pop_all()

    @override
    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]:
        """Every prefix length, in pages, that this rank can restore."""
        return self._bridge.lookup(rid, transfers)

    @override
    def load(self, rid: str, transfers: list[EngineTransfer]) -> bool:
        """Queue a load."""
        return self._bridge.load(rid, transfers)

    @override
    def start_layer_wise_loading(self) -> int:
        """Start what is queued as one batch."""
        return self._bridge.start_layer_wise_loading()

    @override
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch writes no more; True when all of it landed."""
        return self._bridge.finish_layer_wise_loading(counter_index)

    @override
    def cancel_queued_load(self, rid: str) -> bool:
        """Take back a load that was not started."""
        return self._bridge.cancel_queued_load(rid)

    @override
    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool:
        """Queue the storing of one node. Pages are stored by what they are, not by session."""
        del session_id
        return self._bridge.offload(transfers)

    @override
    def num_completed_offloads(self) -> int:
        """How many offloads have ended."""
        return self._bridge.num_completed_offloads()

    @override
    def pop_completed_offload(self) -> bool:
        """How the oldest one ended."""
        return self._bridge.pop_completed_offload()

    @override
    def reset(self) -> None:
        """Drop everything; return when no copy runs. What is stored stays."""
        self._bridge.reset()

    @override
    def close(self) -> None:
        """`reset`, and release everything. Idempotent.

        Raises:
            TransferTimeoutError: A copy did not end; all else is released. It may be called again.
        """
        with ExitStack() as last_first:
            last_first.callback(self._stores.close)
            last_first.callback(self._executor.close)
            last_first.callback(self._bridge.close)

    @property
    def counters(self) -> StoreLinkerCounters:
        """What was moved so far, for people."""
        return self._linker.counters

    def _record_ready(self) -> Sequence[EngineEvent]:
        """The events after which slots that SGLang hands over are ready."""
        return cast("Sequence[EngineEvent]", self.record_offload_ready())


def _linker_settings(config: LinkerConfig) -> StoreLinkerSettings:
    """What a configuration says to `StoreLinker`."""
    return StoreLinkerSettings(
        staging_bytes=config.staging_bytes,
        lease_s=config.lease_s,
        copy_timeout_s=config.copy_timeout_s,
        layer_timeout_s=config.load_timeout_s,
        quiesce_timeout_s=config.quiesce_timeout_s,
        # A call that is slow, and not too slow for its batch, fails nobody behind it.
        hang_s=config.load_timeout_s,
    )


def _check_version() -> None:
    """Refuse another SGLang: what it hands over may mean something else.

    Raises:
        UnsupportedEngineError: It is another one.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "one without metadata"
    if found != SUPPORTED_SGLANG and not found.startswith(f"{SUPPORTED_SGLANG}.post"):
        raise UnsupportedEngineError(
            f"radixlink-sglang: expected sglang {SUPPORTED_SGLANG}, got {found}"
        )


def _named_weights(server_args: ServerSettings, config: LinkerConfig) -> tuple[str, str]:
    """The model and its revision.

    Raises:
        LinkerConfigError: Nobody said which weights these are.
    """
    revision = config.revision or server_args.revision
    if not revision:
        raise LinkerConfigError(
            "linker_extra_config: expected revision, or SGLang's --revision, to name the weights: "
            "pages of other weights are wrong tokens; got neither"
        )
    return config.model or server_args.model_path, revision


def _our_components(components: AbstractSet[object]) -> frozenset[ComponentType]:
    """SGLang's components in our words.

    Raises:
        UnsupportedEngineError: There is one that we have not.
    """
    names = {str(component).upper() for component in components}
    unknown = sorted(names - ComponentType.__members__.keys())
    if unknown:
        raise UnsupportedEngineError(
            f"SGLang: expected components among {sorted(ComponentType.__members__)}, got {unknown}"
        )
    return frozenset(ComponentType[name] for name in names)


def _place_of(params: CacheParams) -> tuple[int, int]:
    """This rank and the number of ranks that share a page's heads.

    Ranks: local; nothing is communicated.
    """
    group = params.attn_tp_cache_group
    if group is None:
        group = params.tp_cache_group
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _copier(device: torch.device) -> Copier:
    """What copies between the pools and the host.

    Raises:
        UnsupportedEngineError: Nothing does, on that kind of device.
    """
    match device.type:
        case "cpu":
            return CpuCopier()
        case "cuda":
            return CudaCopier(device)
        case _:
            raise UnsupportedEngineError(f"SGLang: expected pools on cpu or cuda, got {device}")


def _opened(
    stores: StoreFactory, pools: EnginePools, identity: CacheIdentity, shard: Shard
) -> list[tuple[DevicePool, PageStore]]:
    """A store beside each pool.

    Raises:
        LinkError: One cannot be opened.
    """
    layouts = pools.group.layouts(identity, rank=shard.index, num_ranks=shard.count)
    return [(pool, stores.open(layout)) for pool, layout in layouts]
