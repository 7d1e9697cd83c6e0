"""`ReportBuilder`: what a step decided, while it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from radixlink_contracts import NOTHING_HAPPENED, StepReport

if TYPE_CHECKING:
    from radixlink_contracts import RequestId


@attrs.define(kw_only=True)
class ReportBuilder:
    """A `StepReport` in the making."""

    landed: list[RequestId] = attrs.field(factory=list)
    failed: list[RequestId] = attrs.field(factory=list)
    ready: list[RequestId] = attrs.field(factory=list)
    num_offloads_stored: int = 0
    num_offloads_failed: int = 0
    detached: bool = False

    def build(self) -> StepReport:
        """The report; each request is named once."""
        offloads = self.num_offloads_stored or self.num_offloads_failed
        if not (self.landed or self.failed or self.ready or offloads or self.detached):
            return NOTHING_HAPPENED
        told = {*self.landed, *self.failed}
        ready = [request for request in dict.fromkeys(self.ready) if request not in told]
        return StepReport(
            landed=tuple(self.landed),
            failed=tuple(self.failed),
            ready=tuple(ready),
            num_offloads_stored=self.num_offloads_stored,
            num_offloads_failed=self.num_offloads_failed,
            detached=self.detached,
        )
