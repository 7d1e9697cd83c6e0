"""A case: what all ranks of a job do and expect, for some kinds of tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs
from tests.integration.linker.cases.job import Job
from tests.integration.linker.models import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tests.integration.linker.models import Model

    from radixlink_contracts import RankGroup

Body: TypeAlias = "Callable[[Job, Model], None]"

HYBRIDS = ("full+swa", "full+mamba", "full+swa+mamba")
"""The component sets with more than full attention."""
WINDOWS = ("full+swa", "full+swa+mamba")
"""Those with windows, which may be lost below full attention that stays."""
STATES = ("full+mamba", "full+swa+mamba")
"""Those with states: all layers of a state come at once, so that their loads are staged."""
LAYERS = ("full", "full+swa")
"""Those whose loads may be layer-wise."""


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """A case, whatever its ranks are.

    Attributes:
        rules: What it is about, by the names in README.md.
        body: What every rank runs.
        kinds: The component sets that it is run with.
        least_ranks: The fewest ranks with which it says something.
    """

    rules: tuple[str, ...]
    body: Body
    kinds: tuple[str, ...]
    least_ranks: int

    @property
    def name(self) -> str:
        """A sentence."""
        return self.body.__name__


def case(
    *rules: str, kinds: tuple[str, ...] = tuple(KINDS), least_ranks: int = 1
) -> Callable[[Body], Case]:
    """Make a case of a function."""

    def made(body: Body) -> Case:
        return Case(rules=rules, body=body, kinds=kinds, least_ranks=least_ranks)

    return made


def cases_of(*modules: ModuleType) -> tuple[Case, ...]:
    """The cases of some modules, in their order."""
    return tuple(
        value for module in modules for value in vars(module).values() if isinstance(value, Case)
    )


@attrs.frozen
class Run:
    """A case with one kind of tree."""

    case: Case
    kind: str

    @property
    def name(self) -> str:
        """Names it in a report."""
        return f"{self.case.name}-{self.kind}"

    def __call__(self, world: RankGroup, new_group: Callable[[], RankGroup]) -> None:
        """Run it on this rank. Ranks: all of `world`; see `Job`."""
        job = Job(world, new_group)
        try:
            self.case.body(job, KINDS[self.kind])
            job.finish()
        finally:
            job.close()
