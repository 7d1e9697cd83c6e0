"""Break one thing in a copy of this repository's configuration, and see the one line about it."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (".importlinter", ".importlinter-runtime", "LICENSE", "mypy.ini", "tox.ini")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all that the tool reads; tests are left empty, sources import every sibling."""
    for name in CONFIGURATION:
        shutil.copy(ROOT / name, tmp_path / name)
    for pyproject in ROOT.glob("packages/*/pyproject.toml"):
        package = tmp_path / "packages" / pyproject.parent.name
        module = "radixlink" if package.name == "cli" else f"radixlink_{package.name}"
        for directory in (package / "src" / module, package / "tests"):
            directory.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(pyproject.parent / name, package / name)
        (package / "src" / module / "py.typed").touch()
        siblings = re.findall(r'^    "(radixlink-[a-z-]+)', pyproject.read_text(), re.MULTILINE)
        imports = [f"import {sibling.replace('-', '_')}\n" for sibling in siblings]
        (package / "src" / module / "__init__.py").write_text("".join(imports))
        (package / "tests" / "test_it.py").touch()
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text that must be there."""
    text = path.read_text()
    assert old in text, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new))


def edit_tox(tree: Path, section: str, option: str, old: str, new: str) -> None:
    """Replace a text in one option of tox.ini."""
    path = tree / "tox.ini"
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(path)
    value = parser[section][option]
    assert old in value, f"[{section}] {option} has no {old!r}"
    parser[section][option] = value.replace(old, new)
    with path.open("w") as file:
        parser.write(file)


def findings(tree: Path) -> list[str]:
    """Run the tool as tox does; its exit status must agree with what it prints."""
    tool = ROOT / "tools" / "check_packages.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(tree)], capture_output=True, text=True, check=False
    )
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert done.returncode == (1 if lines else 0)
    return lines


def test_an_untouched_copy_has_no_findings(tree: Path) -> None:
    assert findings(tree) == []


@pytest.mark.parametrize("name", ["README.md", "src/radixlink_tree/py.typed", "tests/test_it.py"])
def test_a_missing_file_is_found(tree: Path, name: str) -> None:
    (tree / "packages" / "tree" / name).unlink()
    shown = name.replace("test_it", "**/test_*")
    assert findings(tree) == [f"packages/tree: has no {shown}"]


def test_another_licence_is_found(tree: Path) -> None:
    (tree / "packages/tree/LICENSE").write_text("All rights reserved.")
    assert findings(tree) == ["packages/tree: has no copy of LICENSE"]


def test_a_directory_without_pyproject_is_found(tree: Path) -> None:
    (tree / "packages" / "newcomer").mkdir()
    assert findings(tree) == ["packages/newcomer: has no pyproject.toml"]


def test_a_package_that_no_tool_knows_is_found(tree: Path) -> None:
    newcomer = tree / "packages" / "newcomer"
    shutil.copytree(tree / "packages" / "contracts", newcomer)
    edit(newcomer / "pyproject.toml", '"radixlink-contracts"', '"radixlink-newcomer"')
    (newcomer / "src" / "radixlink_contracts").rename(newcomer / "src" / "radixlink_newcomer")
    assert findings(tree) == [
        "packages/newcomer: .importlinter: root_packages lacks radixlink_newcomer",
        "packages/newcomer: .importlinter-runtime: root_packages lacks radixlink_newcomer",
        "packages/newcomer: mypy.ini: mypy_path lacks $MYPY_CONFIG_FILE_DIR/packages/newcomer/src",
        "packages/newcomer: tox.ini: there is no [testenv:newcomer]",
    ]


def test_a_package_that_tox_does_not_run_is_found(tree: Path) -> None:
    edit_tox(tree, "tox", "env_list", "transformers", "")
    assert findings(tree) == ["packages/transformers: tox.ini: env_list lacks transformers"]


def test_a_stranger_in_importlinter_is_found(tree: Path) -> None:
    edit(tree / ".importlinter", "include_external", "    radixlink_gone\ninclude_external")
    assert findings(tree) == [
        ".importlinter: root_packages has radixlink_gone, which is not a package here"
    ]


def test_a_version_of_its_own_is_found(tree: Path) -> None:
    edit(tree / "packages/comm/pyproject.toml", '\nversion = "0.1.0"', '\nversion = "0.2.0"')
    found = findings(tree)
    assert ("packages/comm: pyproject.toml: version 0.2.0; the packages have 0.1.0, 0.2.0") in found
    assert (
        "packages/cli: pyproject.toml: radixlink-comm[mpi]==0.1.0 is not pinned to ==0.2.0"
    ) in found


def test_a_loose_pin_is_found(tree: Path) -> None:
    edit(tree / "packages/tree/pyproject.toml", "radixlink-contracts==", "radixlink-contracts>=")
    assert findings(tree) == [
        "packages/tree: pyproject.toml: radixlink-contracts>=0.1.0 is not pinned to ==0.1.0"
    ]


def test_a_declared_sibling_that_is_never_imported_is_found(tree: Path) -> None:
    edit(
        tree / "packages/store/src/radixlink_store/__init__.py",
        "import radixlink_contracts",
        "import radixlink_contracts_of_another\n# import radixlink_contracts",
    )
    assert findings(tree) == [
        "packages/store: pyproject.toml: declares radixlink-contracts, which nothing in src imports"
    ]


def test_an_undeclared_sibling_in_an_environment_is_found(tree: Path) -> None:
    edit_tox(
        tree, "testenv:store", "deps", "-e packages/store", "-e packages/store\n-e packages/comm"
    )
    (found,) = findings(tree)
    assert found.startswith("packages/store: tox.ini: [testenv:store] installs radixlink-comm, ")
    assert found.endswith("which pyproject.toml does not declare")


def test_a_declared_sibling_that_an_environment_lacks_is_found(tree: Path) -> None:
    edit_tox(tree, "testenv:transformers", "deps", "-e packages/tree", "")
    (found,) = findings(tree)
    assert "[testenv:transformers] does not install radixlink-tree, " in found
    assert found.endswith("which pyproject.toml declares")


def test_a_third_party_in_an_environment_is_found(tree: Path) -> None:
    edit_tox(tree, "testenv:store_mpi", "deps", "openmpi", "openmpi\ntorch")
    (found,) = findings(tree)
    assert "[testenv:store_mpi] installs torch, " in found
    assert found.endswith("which pyproject.toml does not declare")


def test_a_third_party_that_the_shared_environment_lacks_is_found(tree: Path) -> None:
    edit(tree / "packages/pools/pyproject.toml", '    "torch>', '    "numpy>=2.0",\n    "torch>')
    (found,) = findings(tree)
    assert re.fullmatch(
        r"packages/pools: tox.ini: \[testenv:.*\] does not install numpy, which.* declares", found
    )


def test_a_package_that_is_not_importable_in_its_environment_is_found(tree: Path) -> None:
    edit_tox(
        tree, "testenv:{tree,pools}", "set_env", "packages/{env_name}/src", "packages/gone/src"
    )
    found = findings(tree)
    assert len(found) == len(("tree", "pools"))
    assert all("nor has it on PYTHONPATH" in line for line in found)


def test_an_undeclared_sibling_on_a_path_is_found(tree: Path) -> None:
    edit_tox(tree, "testenv:{tree,pools}", "set_env", "/src{:}", "/src{:}packages/comm/src{:}")
    found = findings(tree)
    assert len(found) == len(("tree", "pools"))
    assert all("installs radixlink-comm, which pyproject.toml does not" in line for line in found)


def test_a_declared_sibling_that_is_not_on_the_path_is_found(tree: Path) -> None:
    section = "testenv:{components,linker}"
    edit_tox(tree, section, "set_env", "{tox_root}/packages/pools/src{:}", "")
    found = findings(tree)
    assert len(found) == len(("components", "linker"))
    assert all("does not install radixlink-pools, which" in line for line in found)
