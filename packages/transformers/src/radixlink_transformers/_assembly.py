"""`build_engine`: the parts of one rank's engine, wired."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_components import FullComponent, MambaComponent, SWAComponent
from radixlink_contracts import LoadMode, Shard
from radixlink_contracts.errors import (
    AgreementError,
    BackendUnavailableError,
    ContractError,
)
from radixlink_linker import (
    DeviceSlots,
    LinkerSettings,
    MonotonicClock,
    StoreLinker,
    StoreLinkerSettings,
    ThreadExecutor,
    UnifiedRadixCache,
)
from radixlink_pools import CpuCopier
from radixlink_transformers._device import Device
from radixlink_transformers._engine import TransformersEngine
from radixlink_transformers._forward import kept_of_a_token
from radixlink_transformers._gate import LayerGate
from radixlink_transformers._geometry import KVGeometry, cache_identity
from radixlink_transformers._kinds import ModelKind
from radixlink_transformers._states import StateGeometry
from radixlink_transformers._values import EngineSettings
from radixlink_tree import StateRules, UnifiedTreeCore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from radixlink_contracts import (
        LinkerComponent,
        PageStore,
        PoolLayout,
        RankGroup,
        StoreFactory,
    )
    from radixlink_transformers._hugging_face import CausalModel

#: How long a transfer may still be busy after its verdict.
_WRITE_OFF_S: Final = 60.0


def build_engine(
    model: CausalModel,
    *,
    identity_name: str,
    revision: str,
    page_size: int,
    num_pages: int,
    num_window_pages: int | None = None,
    num_states: int | None = None,
    stores: StoreFactory | None,
    group: RankGroup,
    shard: Shard | None = None,
    settings: EngineSettings | None = None,
    linker_settings: LinkerSettings | None = None,
    store_settings: StoreLinkerSettings | None = None,
) -> TransformersEngine:
    """An engine of one rank, ready for its first request.

    Args:
        model: From `load_model`; spread over `shard.count` ranks.
        identity_name: The model's name, part of what its pages are stored under.
        revision: Which weights; likewise.
        page_size: Tokens of a page.
        num_pages: Pages of this rank's device pool, for full attention.
        num_window_pages: Pages for sliding-window attention, where the model has it. None: as many.
            With fewer, long prompts keep only their last windows.
        num_states: Slots for recurrent states, where the model has them; a request that goes on
            from one needs two. None: for as many prompts as the pages.
        stores: Opens the store that pages go to and come from; None runs with the device alone.
            What all ranks have alike is put by rank 0 alone: each has to see it there.
        group: The ranks that make the same calls.
        shard: This rank's part of the heads; None for all of them.
        settings: How to run and wait.
        linker_settings: What the ranks of the group agree on; None for `default_linker_settings`.
            Which of them stores what is set here.
        store_settings: How this rank moves bytes; None for the linker's own defaults.

    Raises:
        UnsupportedModelError: The model keeps what this engine cannot page.
        ContractError: The numbers do not fit, or the model is not on the CPU.
        StorageError: The store cannot be opened on this rank or another, or holds pages of another
            model.
        AgreementError: The ranks do not agree on the settings.

    Owns: the engine owns what is made here, the opened store included; the caller keeps model,
        group and store factory, and closes the engine first.
    Ranks: all, the same arguments but for `shard.index`.
    """
    if model.device.type != "cpu":
        raise ContractError(
            f"build_engine: expected a model on the CPU, got {model.device}; other devices need "
            "an order between their streams and the transfers, which is not built yet"
        )
    settings = settings or EngineSettings()
    linker_settings = linker_settings or default_linker_settings(settings)
    shard = shard or Shard()
    if shard.count not in {1, group.size}:
        raise ContractError(
            f"build_engine: expected a shard for each of the {group.size} ranks, or one for all, "
            f"got {shard.count}"
        )
    kind = ModelKind.of_config(model.config)
    geometry = KVGeometry.of_model(model, page_size=page_size, tensor_parallel_size=shard.count)
    kept = kept_of_a_token(model)
    states: StateGeometry | None = None
    if kind.state_layers:
        states = StateGeometry.of_model(model, kind, kept, tensor_parallel_size=shard.count)
    identity = cache_identity(identity_name, revision, geometry, kind, states)
    num_window_pages = num_pages if num_window_pages is None else num_window_pages
    _agree(
        group,
        f"{settings} {identity} shards={shard.count} pages={num_pages},{num_window_pages} "
        f"states={num_states} store={stores is not None}",
        shard,
        linker_settings.step_timeout_s,
    )
    geometry.require_of(model, kind, kept)
    device = Device.allocate(
        kind,
        geometry,
        model.device,
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        states=None
        if states is None
        else (states, settings.state_interval_tokens or kind.state_chunk_tokens),
        num_states=num_states,
        poison=settings.poison_freed_pages,
    )
    clock = MonotonicClock()
    tree = UnifiedTreeCore(
        page_size=page_size,
        sliding_window=kind.lookback,
        states=None if states is None else StateRules(),
    )
    slots = DeviceSlots(
        tree=tree,
        allocator=device.allocator,
        states=None if device.states is None else device.states.slots,
        copy_state=None if device.states is None else device.states.pool.copy,
    )
    # Released in reverse order: the linker with its thread, the lookup threads, the store.
    with ExitStack() as building:
        linker: StoreLinker | None = None
        gate: LayerGate | None = None
        if stores is not None:
            pools = device.group
            layouts = pools.layouts(identity, rank=shard.index, num_ranks=shard.count)
            opened = _open_on_all(
                stores, [layout for _, layout in layouts], group, linker_settings.step_timeout_s
            )
            for store in opened:
                building.callback(store.close)
            # What all ranks have alike is stored by the first of them.
            linker_settings = attrs.evolve(
                linker_settings,
                storing_ranks=(0,) * group.size,
                shared_pools=tuple(
                    name for name in pools.pools if shard.count == 1 or pools.pool(name).replicated
                ),
            )
            linker = StoreLinker(
                pools=pools,
                stores=zip([pool for pool, _ in layouts], opened, strict=True),
                copier=CpuCopier(),
                settings=store_settings,
            )
            building.callback(linker.close)
            if settings.load_mode is LoadMode.LAYER_WISE and states is None:
                gate = LayerGate(model, kind, linker.layer_done_counter)
        executor = ThreadExecutor(num_threads=linker_settings.max_hanging_lookups)
        building.callback(executor.close)
        cache = UnifiedRadixCache(
            tree=tree,
            slots=slots,
            components=_components(device, slots),
            group=group,
            executor=executor,
            clock=clock,
            settings=linker_settings,
        )
        building.callback(cache.release_host_resources)
        if linker is not None:
            cache.init_cache_linker(linker)
        return TransformersEngine(
            model=model,
            cache=cache,
            tree=tree,
            device=device,
            clock=clock,
            settings=settings,
            gate=gate,
            num_ranks=group.size,
            pages_by_writer=dict if linker is None else _writers_of(linker),
            resources=building.pop_all(),
        )


def _components(device: Device, slots: DeviceSlots) -> list[LinkerComponent]:
    """What takes part in a load: as much as the model has."""
    components: list[LinkerComponent] = [
        FullComponent(allocator=device.full, evict=slots.make_room, release=slots.retire)
    ]
    if device.windows is not None:
        components.append(
            SWAComponent(
                pair=device.windows.pair,
                sliding_window=device.kind.lookback,
                evict=slots.make_room_swa,
                release=slots.retire_swa,
            )
        )
    if device.states is not None:
        components.append(
            MambaComponent(
                states=device.states.slots,
                evict=slots.make_room_states,
                release=slots.retire_state,
            )
        )
    return components


def _open_on_all(
    stores: StoreFactory, layouts: Sequence[PoolLayout], group: RankGroup, timeout_s: float
) -> list[PageStore]:
    """Open this rank's stores; where one rank cannot, none has any, and nobody waits for that rank.

    Raises:
        Exception: This rank's own reason; a `LinkError` of a factory that keeps its contract.
        BackendUnavailableError: Another rank's; names it.
        AgreementError: A rank did not come in time.
    """
    with ExitStack() as opening:
        opened: list[PageStore] = []
        failure: Exception | None = None
        try:
            for layout in layouts:
                store = stores.open(layout)
                opening.callback(store.close)
                opened.append(store)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are told of it
            failure = error
        told = [b""]
        if group.size > 1:
            reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
            told = list(group.all_gather(reason.encode(), timeout_s))
        if failure is not None:
            raise failure
        for rank, of_rank in enumerate(told):
            if of_rank:
                raise BackendUnavailableError(
                    f"build_engine: rank {rank} could not open its store: {of_rank.decode()}",
                    rank=rank,
                )
        opening.pop_all()
        return opened


def _writers_of(linker: StoreLinker) -> Callable[[], Mapping[int, int]]:
    return lambda: linker.counters.pages_by_writer


def _agree(group: RankGroup, facts: str, shard: Shard, timeout_s: float) -> None:
    """All ranks build the same engine, each of its own shard; the linker agrees on the rest by itself.

    Raises:
        AgreementError: They do not, or one did not come in time. On every rank alike.
    """
    if group.size == 1:
        return
    mine = f"{shard.index} {facts}".encode()
    told = [value.decode().partition(" ") for value in group.all_gather(mine, timeout_s)]
    by_rank = {rank: of_rank for rank, (_, _, of_rank) in enumerate(told)}
    wanted = "the same on all ranks"
    if len(set(by_rank.values())) == 1:
        by_rank = {rank: f"shard {index}" for rank, (index, _, _) in enumerate(told)}
        if shard.count == 1 or len(set(by_rank.values())) == group.size:
            return
        wanted = "another shard on each rank"
    raise AgreementError(
        f"build_engine: expected {wanted}, got {list(by_rank.values())}",
        by_rank=by_rank,
        rank=group.rank,
    )


def default_linker_settings(settings: EngineSettings) -> LinkerSettings:
    """The linker's own defaults, but for what this engine does differently.

    * Who runs has all its slots, so the loads of those that wait may take what is left of the pool.
    * It steps as often as it polls, not once a forward, so what is counted in steps is longer.
    """
    return LinkerSettings(
        staged_percent=100,
        write_off_steps=math.ceil(_WRITE_OFF_S / settings.poll_interval_s),
    )
