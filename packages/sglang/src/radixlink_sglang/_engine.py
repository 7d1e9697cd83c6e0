"""What this package reads of SGLang 0.5.23, as protocols: SGLang has no types that a checker sees.

Source: sglang 0.5.23, `mem_cache/{cache_init_params,device_pool_info,hicache_storage}.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class NamedValue(Protocol):
    """A member of an enum of strings."""

    @property
    def value(self) -> str:
        """What it is called."""
        ...


class EngineTransfer(Protocol):
    """`PoolTransfer`: pages of one pool, their keys in hex."""

    @property
    def name(self) -> NamedValue:
        """The pool."""
        ...

    @property
    def keys(self) -> Sequence[str] | None:
        """A hex digest for each page."""
        ...

    @property
    def device_indices(self) -> torch.Tensor | None:
        """The slots. Shape: (num_pages * page_size,) int64, or (1,) for a state."""
        ...

    @property
    def hit_policy(self) -> NamedValue:
        """Which pages a lookup needs."""
        ...


class EngineEvent(Protocol):
    """An event of a device's stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come to it."""
        ...


class ServerSettings(Protocol):
    """`ServerArgs`: what SGLang was started with."""

    @property
    def model_path(self) -> str:
        """Where the model is."""
        ...

    @property
    def revision(self) -> str | None:
        """Which weights."""
        ...


class SlotSource(Protocol):
    """The allocator of KV slots."""

    def get_kvcache(self) -> object:
        """The pool that it deals out."""
        ...


class CacheParams(Protocol):
    """`CacheInitParams`: the parts of one rank's cache."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def token_to_kv_pool_allocator(self) -> SlotSource:
        """Of KV slots."""
        ...

    @property
    def req_to_token_pool(self) -> object:
        """Of requests, and of their states where the model has any."""
        ...

    @property
    def sliding_window_size(self) -> int | None:
        """Tokens that window layers see."""
        ...

    @property
    def tp_cache_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks of tensor parallelism."""
        ...

    @property
    def attn_tp_cache_group(self) -> torch.distributed.ProcessGroup | None:
        """Those of them that share the heads of attention, where these are fewer."""
        ...

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        ...

    @property
    def attn_cp_size(self) -> int:
        """Ranks that share the tokens of a sequence."""
        ...

    @property
    def mtp_draft_device_pools(self) -> Sequence[object]:
        """Pools of draft layers."""
        ...

    @property
    def sidecar_draft_device_pools(self) -> Sequence[object]:
        """Pools of a draft model."""
        ...

    @property
    def mtp_draft_mamba_pools(self) -> Sequence[object]:
        """States of draft layers."""
        ...


class KVTensors(Protocol):
    """`KVBuffers`: keys and values of each layer."""

    @property
    def k(self) -> tuple[torch.Tensor, ...]:
        """Shape of each: (slots, heads, dim)."""
        ...

    @property
    def v(self) -> tuple[torch.Tensor, ...]:
        """Likewise."""
        ...

    @property
    def layout(self) -> NamedValue:
        """The order of their axes."""
        ...


class BufferInfo(Protocol):
    """What all kinds of buffer information have: `MHABufferInfo`, `MLABufferInfo`."""

    @property
    def scales(self) -> object | None:
        """Scales beside the elements, where there are any."""
        ...


class MHAInfo(BufferInfo, Protocol):
    """`MHABufferInfo`: keys and values."""

    @property
    def buffers(self) -> KVTensors:
        """The tensors."""
        ...

    @property
    def head_num(self) -> int:
        """KV heads of this rank."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        ...

    @property
    def v_head_dim(self) -> int:
        """Elements of a value."""
        ...


class MLAInfo(BufferInfo, Protocol):
    """`MLABufferInfo`: latents."""

    @property
    def buffers(self) -> object:
        """A tuple of tensors, or something of a device's own. Shape of each: (slots, 1, width)."""
        ...

    @property
    def kv_lora_rank(self) -> int:
        """Elements of the latent without position."""
        ...

    @property
    def qk_rope_head_dim(self) -> int:
        """Elements of the part with position."""
        ...


class StateInfo(Protocol):
    """`MambaStateBufferInfo`: recurrent states."""

    @property
    def temporal(self) -> torch.Tensor:
        """Shape: (layers, slots, ...)."""
        ...

    @property
    def conv(self) -> tuple[torch.Tensor, ...]:
        """Shape of each: (layers, slots, ...)."""
        ...

    @property
    def extra_checkpoint_buffers(self) -> tuple[torch.Tensor, ...]:
        """What else a state has, without an axis of layers."""
        ...


class PoolInfo(Protocol):
    """`DevicePoolInfo`: the persistent tensors of one pool."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The model's layers, in the tensors' order."""
        ...

    @property
    def buffer_info(self) -> object:
        """The tensors, by the kind of the pool."""
        ...


class DescribedPool(Protocol):
    """A pool that describes its tensors."""

    def get_device_pool_infos(self) -> tuple[PoolInfo, ...]:
        """One description for each kind of tensor it keeps."""
        ...


class KVPool(DescribedPool, Protocol):
    """`MHATokenToKVPool`, `MLATokenToKVPool`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements; they may be kept as bytes of it."""
        ...


class HybridPool(Protocol):
    """`HybridLinearKVPool`: full attention beside recurrent layers."""

    @property
    def full_kv_pool(self) -> object:
        """Of the full-attention layers."""
        ...

    @property
    def full_attention_layer_id_mapping(self) -> dict[int, int]:
        """The place of each of the model's layers in it."""
        ...


class WindowPool(Protocol):
    """`SWAKVPool`: full attention beside windows."""

    @property
    def full_kv_pool(self) -> object:
        """Of the full-attention layers."""
        ...

    @property
    def swa_kv_pool(self) -> object:
        """Of the window layers."""
        ...

    @property
    def layers_mapping(self) -> dict[int, tuple[int, bool]]:
        """The place of each of the model's layers in its pool, and whether that is the window's."""
        ...


class StateSource(Protocol):
    """`HybridReqToTokenPool`: has the pool of states."""

    @property
    def mamba_pool(self) -> DescribedPool:
        """The states."""
        ...

    @property
    def mamba_ckpt_pool(self) -> object | None:
        """Where a tree keeps states in another form, if it does."""
        ...

    def register_layer_transfer_counter(self, layer_transfer_counter: object) -> None:
        """Wait on this counter before a state is read."""
        ...
