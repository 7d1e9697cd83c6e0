"""The pools of each kind of model, made of an engine's tensors.

| assembly       | KV          | SWA         | MAMBA            | replicated unless told |
|----------------|-------------|-------------|------------------|------------------------|
| MHA            | keys, values|             |                  | nothing                |
| MLA            | latents     |             |                  | KV                     |
| FULL_SWA       | keys, values| keys, values|                  | nothing                |
| FULL_MAMBA     | keys, values|             | states, 1 a slot | nothing                |
| FULL_SWA_MAMBA | keys, values| keys, values| states, 1 a slot | nothing                |

What else there is beside the pages (an indexer, a draft model) comes as sidecars.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from radixlink_contracts import POOL_OF, ComponentType
from radixlink_contracts.errors import ContractError
from radixlink_pools._device_pool import DevicePoolEntry
from radixlink_pools._pool_group import DevicePoolGroup

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from radixlink_pools._buffers import LayerBuffers


class Assembly(enum.StrEnum):
    """A kind of model, by the state it keeps."""

    #: Keys and values of every token in every layer.
    MHA = "mha"
    #: One latent of every token in every layer, the same on all ranks.
    MLA = "mla"
    #: Some layers see only a window.
    FULL_SWA = "full+swa"
    #: Some layers keep a recurrent state.
    FULL_MAMBA = "full+mamba"
    #: Both.
    FULL_SWA_MAMBA = "full+swa+mamba"


_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

_COMPONENTS: Final[Mapping[Assembly, frozenset[ComponentType]]] = {
    Assembly.MHA: frozenset({_FULL}),
    Assembly.MLA: frozenset({_FULL}),
    Assembly.FULL_SWA: frozenset({_FULL, _SWA}),
    Assembly.FULL_MAMBA: frozenset({_FULL, _MAMBA}),
    Assembly.FULL_SWA_MAMBA: frozenset({_FULL, _SWA, _MAMBA}),
}


def components_of(assembly: Assembly) -> frozenset[ComponentType]:
    """The components whose transfers an assembly takes."""
    return _COMPONENTS[assembly]


def assembly_of(components: Collection[ComponentType], *, latent: bool = False) -> Assembly:
    """The assembly for a tree of these components.

    Args:
        components: What the tree has.
        latent: KV is one latent a token, the same on all ranks. Beside other components that is no
            assembly of its own: pass FULL to `assemble` as replicated.

    Raises:
        ContractError: There is no assembly for them; it names them.
    """
    wanted = frozenset(components)
    for assembly, needed in _COMPONENTS.items():
        if needed == wanted and (assembly is Assembly.MLA) == (latent and needed == {_FULL}):
            return assembly
    names = "+".join(component.name for component in sorted(wanted)) or "no component"
    msg = f"assembly_of: expected one of {[str(one) for one in Assembly]}, got {names}"
    raise ContractError(msg)


def assemble(
    assembly: Assembly,
    *,
    page_size: int,
    buffers: Mapping[ComponentType, LayerBuffers],
    sidecars: Sequence[DevicePoolEntry] = (),
    replicated: Collection[ComponentType] = (),
    packed: bool = True,
    num_layers: int | None = None,
) -> DevicePoolGroup:
    """The pools of a model, as a transfer sees them.

    Args:
        assembly: Which kind of model.
        page_size: Tokens of a page. States have one slot each, whatever this is.
        buffers: The engine's tensors of each component.
        sidecars: Pools that borrow from these.
        replicated: Components whose bytes are the same on all ranks; FULL of MLA always is.
        packed: A page is one stored object; otherwise one for each group of tensors.
        num_layers: Layers of the model. None: as many as the tensors are said to be of.

    Raises:
        ContractError: A component's tensors are missing, or are not this assembly's, or show no
            rows of bytes; a sidecar borrows from what is not here.
    """
    needed = _COMPONENTS[assembly]
    if needed != buffers.keys():
        expected = "+".join(component.name for component in sorted(needed))
        got = "+".join(component.name for component in sorted(buffers)) or "nothing"
        msg = f"assemble {assembly}: expected buffers of {expected}, got {got}"
        raise ContractError(msg)
    entries = [
        DevicePoolEntry.of_buffers(
            POOL_OF[component],
            buffers[component],
            1 if component is _MAMBA else page_size,
            packed=packed,
            replicated=component in replicated or assembly is Assembly.MLA,
        )
        for component in sorted(needed)
    ]
    names = {entry.name for entry in entries}
    for sidecar in sidecars:
        if sidecar.source not in names or sidecar.name in names:
            msg = (
                f"assemble {assembly}: expected sidecars of {sorted(names)}, "
                f"got {sidecar.name}, which borrows from {sidecar.source}"
            )
            raise ContractError(msg)
    return DevicePoolGroup([*entries, *sidecars], num_layers)
