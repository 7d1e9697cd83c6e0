"""Check that every package is known to every tool, and says the same thing to each of them.

What no other tool can see: a package that `.importlinter`, `mypy.ini` or `tox.ini` forgets is
simply not checked by them. One line for each finding; the exit status is 1 if there is any.

    python tools/check_packages.py [ROOT]
"""

from __future__ import annotations

import configparser
import dataclasses
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = "radixlink"
LINTERS = (".importlinter", ".importlinter-runtime")
# What a test environment may install beside what its package declares.
TEST_TOOLS = {"hypothesis", "pytest", "pytest-timeout", "pytest-xdist"}


@dataclasses.dataclass(frozen=True)
class Package:
    """One directory below `packages/`, and what its pyproject.toml says."""

    path: Path
    name: str
    version: str
    dependencies: tuple[str, ...]
    extras: tuple[str, ...]
    #: The dependency group `test`: what its tests need and it does not.
    tests: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Package:
        """Read a package's pyproject.toml."""
        pyproject = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))
        project = pyproject["project"]
        extras = project.get("optional-dependencies", {})
        return cls(
            path=path,
            name=project["name"],
            version=project["version"],
            dependencies=tuple(project.get("dependencies", ())),
            extras=tuple(dependency for extra in extras.values() for dependency in extra),
            tests=tuple(pyproject.get("dependency-groups", {}).get("test", ())),
        )

    @property
    def module(self) -> str:
        """What one writes to import it."""
        return module_of(self.name)

    @property
    def siblings(self) -> set[str]:
        """The names of the packages it depends on, with its extras and in its tests."""
        return self.needed | {name for name in map(name_of, self.extras) if is_ours(name)} - {
            self.name
        }

    @property
    def needed(self) -> set[str]:
        """The names of the packages that it and its tests cannot do without: no extras."""
        names = {name_of(line) for line in (*self.dependencies, *self.tests)}
        return {name for name in names if is_ours(name)} - {self.name}


class Tox:
    """What tox.ini says, with references to other sections filled in."""

    def __init__(self, path: Path) -> None:
        self._parser = read_ini(path)

    def section(self, env: str) -> str | None:
        """Return the section that defines an environment; its name may list several in braces."""
        for section in self._parser.sections():
            if section.startswith("testenv:"):
                names = section.removeprefix("testenv:").strip("{}").split(",")
                if env in names:
                    return section
        return None

    def lines(self, section: str, option: str) -> list[str]:
        """Return an option's lines without comments, following `{[section]option}`."""
        lines = []
        for line in self._parser.get(section, option, fallback="").splitlines():
            if reference := re.fullmatch(r"\{\[([^]]+)\](\w+)\}", line.strip()):
                lines += self.lines(*reference.groups())
            elif line.strip():
                lines.append(line.strip())
        return lines

    def env_list(self) -> set[str]:
        """Return the environments that plain `tox` runs."""
        return set(re.split(r"[\s,]+", " ".join(self.lines("tox", "env_list"))))


def name_of(requirement: str) -> str:
    """Return the distribution that a requirement asks for, without extras and versions."""
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]


def module_of(name: str) -> str:
    """What one writes to import one of this repository's distributions."""
    return name.replace("-", "_")


def is_ours(name: str) -> bool:
    """Tell whether a distribution is one of this repository's."""
    return name == PROJECT or name.startswith(f"{PROJECT}-")


def has_on_path(package: Package, set_env: list[str]) -> bool:
    """Tell whether an environment's PYTHONPATH has a package's sources."""
    source = f"packages/{package.path.name}/src"
    return any(line.startswith("PYTHONPATH") and source in line for line in set_env)


def read_ini(path: Path) -> configparser.ConfigParser:
    """Read an INI file as it is written, without interpolation."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.read_string(path.read_text(encoding="utf-8"), source=path.name)
    return parser


def check_files(package: Package, root: Path) -> Iterator[str]:
    """A package's own files are there."""
    licence = package.path / "LICENSE"
    # A copy: a link would be broken in an sdist, and an sdist without it may not be passed on.
    if not licence.is_file() or licence.read_bytes() != (root / "LICENSE").read_bytes():
        yield "has no copy of LICENSE"
    for name in ("README.md", f"src/{package.module}/py.typed"):
        if not (package.path / name).is_file():
            yield f"has no {name}"
    if not any((package.path / "tests").glob("**/test_*.py")):
        yield "has no tests/**/test_*.py"


def check_imports(package: Package) -> Iterator[str]:
    """The package imports each sibling without which it cannot be installed."""
    if package.name == PROJECT:
        return  # the command: it brings what it does not import, too
    sources = [path.read_text(encoding="utf-8") for path in package.path.glob("src/**/*.py")]
    for name in sorted(filter(is_ours, map(name_of, package.dependencies))):
        statement = re.compile(rf"^ *(?:from|import) {module_of(name)}\b", re.MULTILINE)
        if not any(map(statement.search, sources)):
            yield f"pyproject.toml: declares {name}, which nothing in src imports"


def check_pins(package: Package, packages: dict[str, Package]) -> Iterator[str]:
    """All packages have one version, and name each other in it."""
    versions = sorted({other.version for other in packages.values()})
    if len(versions) > 1:
        yield f"pyproject.toml: version {package.version}; the packages have {', '.join(versions)}"
    for requirement in (*package.dependencies, *package.extras, *package.tests):
        name = name_of(requirement)
        if not is_ours(name) or name == package.name:
            continue
        if name not in packages:
            yield f"pyproject.toml: {requirement} is not a package here"
        elif not requirement.endswith(f"=={packages[name].version}"):
            yield f"pyproject.toml: {requirement} is not pinned to =={packages[name].version}"


def check_config(package: Package, root: Path) -> Iterator[str]:
    """import-linter and mypy look at the package."""
    for linter in LINTERS:
        roots = read_ini(root / linter).get("importlinter", "root_packages").split()
        if package.module not in roots:
            yield f"{linter}: root_packages lacks {package.module}"
    mypy_path = read_ini(root / "mypy.ini").get("mypy", "mypy_path")
    source = f"$MYPY_CONFIG_FILE_DIR/packages/{package.path.name}/src"
    if source not in re.split(r"[\s,]+", mypy_path):
        yield f"mypy.ini: mypy_path lacks {source}"


def check_tox(package: Package, packages: dict[str, Package], tox: Tox) -> Iterator[str]:
    """The package's test environment installs what the package declares, and nothing else."""
    env = package.path.name
    section = tox.section(env)
    if section is None:
        yield f"tox.ini: there is no [testenv:{env}]"
        return
    if env not in tox.env_list():
        yield f"tox.ini: env_list lacks {env}"

    deps = tox.lines(section, "deps")
    directories = {
        re.sub(r"\[.*", "", dep.removeprefix("-e packages/"))
        for dep in deps
        if dep.startswith("-e packages/")
    }
    by_directory = {other.path.name: other.name for other in packages.values()}
    for directory in sorted(directories - by_directory.keys()):
        yield f"tox.ini: [{section}] installs packages/{directory}, which is not there"
    installed = {by_directory[name] for name in directories & by_directory.keys()}
    set_env = tox.lines(section, "set_env")
    # A sibling that is only needed for tests may be there by its sources alone.
    installed |= {
        other.name
        for other in packages.values()
        if other != package and has_on_path(other, set_env)
    }

    for name in sorted(package.needed - installed):
        yield f"tox.ini: [{section}] does not install {name}, which pyproject.toml declares"
    if deps == tox.lines("full", "deps"):
        return  # the command: its extras are everything there is
    for name in sorted(installed - package.siblings - {package.name}):
        yield f"tox.ini: [{section}] installs {name}, which pyproject.toml does not declare"

    # pip installs the third parties of what it installs; all others must be listed.
    listed = {name_of(dep) for dep in deps if not dep.startswith("-")} - TEST_TOOLS
    unlisted = package.tests
    if package.name not in installed:
        unlisted += package.dependencies
        own = [line.replace("{env_name}", env) for line in set_env]
        if not has_on_path(package, own):
            yield f"tox.ini: [{section}] neither installs {package.name} nor has it on PYTHONPATH"
    third_parties = {name for name in map(name_of, unlisted) if not is_ours(name)}
    for name in sorted(third_parties - listed):
        yield f"tox.ini: [{section}] does not install {name}, which pyproject.toml declares"
    for name in sorted(listed - third_parties):
        yield f"tox.ini: [{section}] installs {name}, which pyproject.toml does not declare"


def check_strangers(root: Path, packages: dict[str, Package]) -> Iterator[str]:
    """No tool is told of a package that is not there."""
    for path in sorted((root / "packages").iterdir()):
        if path.is_dir() and not (path / "pyproject.toml").is_file():
            yield f"packages/{path.name}: has no pyproject.toml"
    modules = {package.module for package in packages.values()}
    for linter in LINTERS:
        roots = read_ini(root / linter).get("importlinter", "root_packages").split()
        for name in sorted(set(roots) - modules):
            yield f"{linter}: root_packages has {name}, which is not a package here"


def check(root: Path) -> Iterator[str]:
    """Yield each finding as one line."""
    paths = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    packages = {package.name: package for package in map(Package.read, paths)}
    tox = Tox(root / "tox.ini")
    yield from check_strangers(root, packages)
    for package in packages.values():
        findings = [
            *check_files(package, root),
            *check_imports(package),
            *check_pins(package, packages),
            *check_config(package, root),
            *check_tox(package, packages, tox),
        ]
        for finding in findings:
            yield f"packages/{package.path.name}: {finding}"


def main(arguments: list[str]) -> int:
    """Print all findings; return the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    findings = list(check(root))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
