"""Import every module of the wheels named on the command line, from where they are installed.

Run by `tools/check_wheels.py`, with the Python of an environment that has only the wheels.
"""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path, PurePosixPath

# What a wheel is a plug-in of, and does not bring: its modules for it cannot be imported here.
HOSTS = {"sglang"}


def modules(wheel: Path) -> tuple[set[str], set[str]]:
    """Return a wheel's top-level packages that are typed, and all its modules."""
    with zipfile.ZipFile(wheel) as archive:
        paths = [PurePosixPath(name) for name in archive.namelist()]
    typed = {path.parts[0] for path in paths if path.name == "py.typed"}
    names = {
        ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)
        for path in paths
        if path.suffix == ".py" and path.name != "__main__.py"
    }
    return typed, names


def faults(wheel: Path) -> list[str]:
    """Import one wheel's modules, and return what is wrong, one line each."""
    typed, names = modules(wheel)
    found = [f"{name} has no py.typed" for name in {name.split(".")[0] for name in names} - typed]
    if not names:
        found.append("there is no module in it")
    for name in sorted(names):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in HOSTS:
                found.append(f"import {name}: {type(error).__name__}: {error}")
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the module cannot be imported
            found.append(f"import {name}: {type(error).__name__}: {error}")
            continue
        if not Path(module.__file__ or "").is_relative_to(sys.prefix):
            found.append(f"{name} was imported from {module.__file__}, not from the wheel")
    print(f"{wheel.name}: {len(names)} modules")
    return [f"{wheel.name}: {fault}" for fault in found]


def main() -> int:
    """Check all wheels; return the exit status."""
    found = [fault for name in sys.argv[1:] for fault in faults(Path(name))]
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
