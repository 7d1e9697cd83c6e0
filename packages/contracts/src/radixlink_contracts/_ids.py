"""Identifiers, each its own type, so that one cannot be passed for another."""

from typing import NewType

NodeId = NewType("NodeId", int)
"""A node of one tree. Never reused within a process; a split leaves it with the lower half."""

OperationId = NewType("OperationId", int)
"""A load or an offload. Minted in replicated order, so it is the same number on all ranks."""

RequestId = NewType("RequestId", str)
"""A request, as the engine names it. The same on all ranks."""

BatchIndex = NewType("BatchIndex", int)
"""A batch of layer-wise loads (provisional, with the layer counter)."""
