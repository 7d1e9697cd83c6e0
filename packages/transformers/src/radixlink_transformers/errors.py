"""What can be wrong with a model: children of `radixlink_contracts.errors.ContractError`."""

from __future__ import annotations

from radixlink_contracts.errors import ContractError


class UnsupportedModelError(ContractError):
    """The model keeps attention state that this engine cannot page."""


class ModelLoadError(ContractError):
    """There is no loadable model at that place; the cause is chained where there is one."""
