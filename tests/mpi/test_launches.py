"""What a launch that was killed leaves to the next one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun

PROGRAM = Path(__file__).parent / "programs" / "never_ends.py"


@pytest.mark.open_mpi
def test_a_launcher_that_is_killed_leaves_no_session(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Where Open MPI puts a session by itself; a later launcher with its process id would not start.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="still running after 5 s"):
        mpirun(PROGRAM, 2, timeout_s=5)
    assert list(tmp_path.iterdir()) == []
