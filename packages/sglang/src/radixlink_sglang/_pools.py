"""SGLang's pools as a group of device pools, and what their bytes mean.

SGLang describes the persistent tensors of a pool itself (`get_device_pool_infos`). Only pools whose
description is known to be all that they keep are taken: a pool of a subclass may keep more beside
it (an indexer, scales), and a prefix restored without that is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import attrs

from radixlink_contracts import CacheIdentity, ComponentType
from radixlink_pools import LayerBuffers, assemble, assembly_of
from radixlink_sglang.errors import UnsupportedEngineError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from radixlink_pools import DevicePoolGroup
    from radixlink_sglang._engine import (
        CacheParams,
        HybridPool,
        KVPool,
        MHAInfo,
        MLAInfo,
        StateInfo,
        StateSource,
        WindowPool,
    )

_MHA, _MLA = "MHATokenToKVPool", "MLATokenToKVPool"
_WINDOWS, _HYBRID, _STATES = "SWAKVPool", "HybridLinearKVPool", "HybridReqToTokenPool"

_KEYS_AND_VALUES: Final = "nhd"


@attrs.frozen(kw_only=True, eq=False)
class ComponentPool:
    """The tensors of one component.

    Attributes:
        buffers: These.
        dtype: Of their elements.
        layout: What a page's bytes are, for an identity.
        replicated: Every rank holds the same bytes.
    """

    buffers: LayerBuffers
    dtype: str
    layout: str
    replicated: bool = False


@attrs.frozen(kw_only=True, eq=False)
class EnginePools:
    """All that one rank stores for.

    Attributes:
        group: The pools.
        dtype: Of the KV.
        layout: What a page's bytes are, in all pools.
        device: Where they are.
    """

    group: DevicePoolGroup
    dtype: str
    layout: str
    device: torch.device

    def identity(self, *, model: str, revision: str, page_size: int) -> CacheIdentity:
        """What the pages of these pools mean, of a model's weights."""
        return CacheIdentity(
            model=model,
            revision=revision,
            dtype=self.dtype,
            page_size=page_size,
            num_layers=self.group.num_layers,
            layout=self.layout,
        )


def engine_pools(params: CacheParams, components: Collection[ComponentType]) -> EnginePools:
    """The pools of one rank of SGLang.

    Args:
        params: SGLang's.
        components: What its tree has.

    Raises:
        UnsupportedEngineError: A pool, or a setting, is none that can be served.
        ContractError: A pool's tensors show no pages.
    """
    _refuse_settings(params)
    wanted = frozenset(components)
    pools = _attention_pools(params, wanted)
    if ComponentType.MAMBA in wanted:
        pools[ComponentType.MAMBA] = _states(params.req_to_token_pool)
    if pools.keys() != wanted:
        raise UnsupportedEngineError(
            f"SGLang: expected pools for {_names(wanted)}, got those of {_names(pools)}"
        )
    replicated = [component for component, pool in pools.items() if pool.replicated]
    full = pools[ComponentType.FULL]
    group = assemble(
        assembly_of(wanted, latent=full.replicated),
        page_size=params.page_size,
        buffers={component: pool.buffers for component, pool in pools.items()},
        replicated=replicated,
    )
    parts = [f"{component.name.lower()}:{pool.layout}" for component, pool in pools.items()]
    if ComponentType.SWA in wanted:
        parts.append(f"window={params.sliding_window_size}")
    return EnginePools(
        group=group,
        dtype=full.dtype,
        layout="sglang|" + "|".join(parts),
        device=full.buffers.groups[0][0].device,
    )


def _refuse_settings(params: CacheParams) -> None:
    """Refuse what a restored prefix would lack something in.

    Raises:
        UnsupportedEngineError: There is something of that kind.
    """
    drafts = (
        len(params.mtp_draft_device_pools)
        + len(params.sidecar_draft_device_pools)
        + len(params.mtp_draft_mamba_pools)
    )
    for what, got, expected in (
        ("pipeline stages", params.pp_size, 1),
        ("ranks of attention context parallelism", params.attn_cp_size, 1),
        ("pools of a draft model", drafts, 0),
    ):
        if got != expected:
            raise UnsupportedEngineError(f"SGLang: expected {expected} {what}, got {got}")


def _attention_pools(
    params: CacheParams, wanted: frozenset[ComponentType]
) -> dict[ComponentType, ComponentPool]:
    """Full attention, and windows where the tree has them."""
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    kind = type(pool).__name__
    if kind == _WINDOWS:
        both = cast("WindowPool", pool)
        full = _global_ids(both, of_windows=False)
        windows = _global_ids(both, of_windows=True)
        found = {ComponentType.FULL: _attention(both.full_kv_pool, full)}
        if ComponentType.SWA in wanted:
            found[ComponentType.SWA] = _attention(both.swa_kv_pool, windows)
        return found
    if kind == _HYBRID:
        hybrid = cast("HybridPool", pool)
        layers = _in_place_order(hybrid.full_attention_layer_id_mapping)
        return {ComponentType.FULL: _attention(hybrid.full_kv_pool, layers)}
    return {ComponentType.FULL: _attention(pool, None)}


def _global_ids(pool: WindowPool, *, of_windows: bool) -> tuple[int, ...]:
    """The model's layers of one of two pools, in its order."""
    return _in_place_order(
        {
            layer: place
            for layer, (place, window) in pool.layers_mapping.items()
            if window == of_windows
        }
    )


def _in_place_order(places: dict[int, int]) -> tuple[int, ...]:
    """Layers by their place in a pool."""
    return tuple(sorted(places, key=places.__getitem__))


def _attention(pool: object, layers: tuple[int, ...] | None) -> ComponentPool:
    """One pool of KV.

    Args:
        pool: SGLang's.
        layers: The model's layer of each tensor. None: as the pool says.

    Raises:
        UnsupportedEngineError: It is of a kind that is not known.
    """
    kind = type(pool).__name__
    if kind not in {_MHA, _MLA}:
        raise UnsupportedEngineError(
            f"SGLang: expected a pool that is exactly {_MHA} or {_MLA}, got {kind}"
        )
    described = cast("KVPool", pool)
    (info,) = described.get_device_pool_infos()
    own_layers = info.layer_ids if layers is None else layers
    dtype = str(described.dtype).removeprefix("torch.")
    if kind == _MHA:
        return _keys_and_values(cast("MHAInfo", info.buffer_info), own_layers, dtype)
    return _latents(cast("MLAInfo", info.buffer_info), own_layers, dtype)


def _keys_and_values(info: MHAInfo, layers: tuple[int, ...], dtype: str) -> ComponentPool:
    """Keys and values of each head.

    Raises:
        UnsupportedEngineError: They have scales, or their axes are in another order.
    """
    order = info.buffers.layout.value
    if info.scales is not None or order != _KEYS_AND_VALUES:
        raise UnsupportedEngineError(
            f"SGLang: expected keys and values in order {_KEYS_AND_VALUES} and without scales, "
            f"got {order}, {'no ' if info.scales is None else ''}scales"
        )
    return ComponentPool(
        buffers=LayerBuffers(groups=[info.buffers.k, info.buffers.v], layers=layers),
        dtype=dtype,
        layout=f"k..,v..;heads={info.head_num};dim={info.head_dim};v_dim={info.v_head_dim};"
        f"order=token,head;rope=applied;layers={_spans(layers)}",
    )


def _latents(info: MLAInfo, layers: tuple[int, ...], dtype: str) -> ComponentPool:
    """One latent for each token, the same on all ranks.

    Raises:
        UnsupportedEngineError: They have scales, or are not tensors of rows.
    """
    buffers = info.buffers
    if info.scales is not None or not isinstance(buffers, tuple):
        raise UnsupportedEngineError(
            "SGLang: expected latents as a tensor for each layer and without scales, "
            f"got {type(buffers).__name__}, {'no ' if info.scales is None else ''}scales"
        )
    return ComponentPool(
        buffers=LayerBuffers(groups=[buffers], layers=layers),
        dtype=dtype,
        layout=f"latent;rank={info.kv_lora_rank};rope_dim={info.qk_rope_head_dim};"
        f"layers={_spans(layers)}",
        replicated=True,
    )


def _states(source: object) -> ComponentPool:
    """Recurrent states, one a slot.

    Raises:
        UnsupportedEngineError: They are of a kind that is not known, or have parts of no layer.
    """
    kind = type(source).__name__
    if kind != _STATES:
        raise UnsupportedEngineError(
            f"SGLang: expected states in a pool that is exactly {_STATES}, got {kind}"
        )
    pool = cast("StateSource", source)
    (info,) = pool.mamba_pool.get_device_pool_infos()
    states = cast("StateInfo", info.buffer_info)
    if pool.mamba_ckpt_pool is not None or states.extra_checkpoint_buffers:
        raise UnsupportedEngineError(
            "SGLang: expected states of layers alone, in one pool, "
            f"got {len(states.extra_checkpoint_buffers)} tensors beside them and "
            f"{'no' if pool.mamba_ckpt_pool is None else 'a'} pool of checkpoints"
        )
    tensors = (states.temporal, *states.conv)
    shapes = ",".join(
        f"{'x'.join(map(str, tensor.shape[2:]))}:{str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors
    )
    return ComponentPool(
        buffers=LayerBuffers(
            groups=[list(tensor.unbind()) for tensor in tensors],
            layers=info.layer_ids,
            rows_are_pages=True,
        ),
        dtype=str(states.temporal.dtype).removeprefix("torch."),
        layout=f"temporal,conv..;shapes={shapes};layers={_spans(info.layer_ids)}",
    )


def _spans(layers: Sequence[int]) -> str:
    """Layers in short: "0-3,5"."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in spans)


def _names(components: Collection[ComponentType]) -> str:
    return "+".join(component.name for component in sorted(components)) or "nothing"
