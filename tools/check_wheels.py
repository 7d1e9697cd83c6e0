"""Build every package, install only the wheels, and import every module that is in them.

An editable install hides what a wheel forgets: a data file, `py.typed`, a package's own metadata.
So each package is built as a release would be (an sdist, and the wheel from it), the wheel is
compared with the sources, and all wheels are installed into a fresh virtual environment.

That environment takes third parties (torch alone is a gigabyte) from the one that runs this, by
a path file. Python reads no path files of a directory added that way, so the packages that are
installed there as editable stay invisible.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(package: Path, out: Path) -> Path:
    """Build one package's sdist and its wheel, and return the wheel's path."""
    out.mkdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(package))
    (wheel,) = out.glob("*.whl")
    return wheel


def missing_files(package: Path, wheel: Path) -> list[str]:
    """Return what a package has below `src` and its wheel has not, and a licence not shipped."""
    source = package / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    missing = sorted(wanted - shipped)
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in shipped):
        missing.append("LICENSE")
    return missing


def install(wheels: list[Path], where: Path) -> Path:
    """Install wheels into a new virtual environment, and return its Python."""
    venv.create(where, symlinks=True)
    scheme = {"base": str(where), "platbase": str(where)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    (site_packages / "third_parties.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", "venv", scheme)) / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    options = ["--quiet", "--no-index", "--no-deps", "--ignore-installed"]
    run(*pip, "install", *options, *map(str, wheels))
    run(*pip, "check")
    return python


def run(*command: str) -> None:
    """Run a command, and end with its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout.decode()}")


def main() -> int:
    """Check all packages; return the exit status."""
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheels = {package: build(package, scratch / package.name) for package in packages}
        failed = False
        for package, wheel in wheels.items():
            for path in missing_files(package, wheel):
                print(f"packages/{package.name}: {path} is not in the wheel", flush=True)
                failed = True
        python = install(list(wheels.values()), scratch / "venv")
        smoke = ROOT / "tests" / "packaging" / "smoke_imports.py"
        # -I: no PYTHONPATH and no current directory, which could lend what a wheel lacks.
        # A path file lends no shared libraries, and mpi4py looks for one; importing it starts MPI,
        # whose shared memory then goes with the scratch directory.
        mpi = {
            "LD_LIBRARY_PATH": str(Path(sys.prefix) / "lib"),
            "OMPI_MCA_btl_sm_backing_directory": str(scratch),
        }
        done = subprocess.run(
            [str(python), "-I", str(smoke), *map(str, wheels.values())],
            cwd=scratch,
            env=os.environ | mpi,
            check=False,
        )
        return int(failed) or done.returncode


if __name__ == "__main__":
    sys.exit(main())
