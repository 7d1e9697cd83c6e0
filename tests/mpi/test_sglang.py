"""SGLang's tensor-parallel ranks over the MPI store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from packages.sglang.tests.sglang_import import directory

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun

PROGRAM = Path(__file__).parent / "programs" / "sglang_rank.py"


def test_a_replica_restores_what_another_stored_in_the_window(
    mpirun: Mpirun, tmp_path: Path
) -> None:
    directory()
    done = mpirun(PROGRAM, 4, str(tmp_path / "meeting"), timeout_s=240)
    assert done.stdout.count("ok\n") == 4, done.stdout[-1500:] + done.stderr[-1500:]
