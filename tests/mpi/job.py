"""What the ranks of a job printed: a JSON line for each thing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable


@attrs.frozen
class Job:
    """What the ranks of a job printed."""

    ranks: int
    statuses: tuple[int, ...]
    told: tuple[dict[str, object], ...]
    log: str

    @classmethod
    def of(cls, ranks: int, results: Iterable[subprocess.CompletedProcess[str]]) -> Job:
        """Read the JSON lines of all processes."""
        results = tuple(results)
        lines = [line for result in results for line in result.stdout.splitlines()]
        told = tuple(json.loads(line) for line in lines if line.startswith("{"))
        statuses = tuple(result.returncode for result in results)
        log = "\n".join(f"{r.returncode} {r.stdout} {r.stderr}" for r in results)
        return cls(ranks, statuses, told, log)

    def passed(self, case: str) -> bool:
        """True when every rank passed a case."""
        ranks = sorted(str(one["rank"]) for one in self.told if one.get("case") == case)
        return ranks == [str(rank) for rank in range(self.ranks)]

    def check(self, case: str) -> None:
        """Fail unless every rank passed a case, and the job ended well."""
        assert self.passed(case), self.log
        assert not any(self.statuses), self.log

    def of_rank(self, rank: int, key: str) -> dict[str, object]:
        """The line of a rank that has a key."""
        lines = [one for one in self.told if one["rank"] == rank and key in one]
        assert len(lines) == 1, self.log
        return lines[0]
