from __future__ import annotations

import pytest

from radixlink import main
from radixlink._stores import known_stores, store_factory
from radixlink.errors import StoreError
from radixlink_contracts import StoreConfig


def test_a_model_that_is_not_there_ends_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    missing = tmp_path_factory.mktemp("models") / "missing"
    assert main(["demo", "--model", str(missing)]) == 3
    told = capsys.readouterr().err
    assert str(missing) in told
    assert "smollm2" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("arguments", [[], ["sing"], ["demo", "--turns", "1"], ["demo", "--x"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_a_store_that_is_not_installed_names_those_that_are() -> None:
    with pytest.raises(StoreError, match=r"--store tape: .*'file'"):
        store_factory("tape", StoreConfig())
    assert "file" in known_stores()
