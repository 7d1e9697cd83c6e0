"""The extra `[torch]`: agreement over torch.distributed's gloo."""

from radixlink_comm._torch import TorchGroup

__all__ = ["TorchGroup"]
