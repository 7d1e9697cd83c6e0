"""What can be wrong when SGLang starts: children of `radixlink_contracts.errors.ContractError`."""

from __future__ import annotations

from radixlink_contracts.errors import ContractError


class LinkerConfigError(ContractError):
    """`linker_extra_config` asks for what there is not, or leaves out what must be known."""


class UnsupportedEngineError(ContractError):
    """This SGLang, or a pool or setting of it, is none that the linker can serve."""
