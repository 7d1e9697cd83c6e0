"""The only place of this package that knows environment variables.

Nothing here runs at import: the command calls it for the process that it owns, before the first
import of transformers, which reads its variables once.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

__all__ = ["default_cache_dir", "force_offline"]

_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_QUIET: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """The directory for prepared models is named; it need not exist.

    Args:
        environment: Usually `os.environ`.

    Returns:
        `$XDG_CACHE_HOME/radixlink`, or `~/.cache/radixlink` where that is unset or not absolute.

    Source: XDG Base Directory Specification 0.8: a relative path is invalid and must be ignored.
    """
    configured = Path(environment.get("XDG_CACHE_HOME", ""))
    root = configured if configured.is_absolute() else Path.home() / ".cache"
    return root / "radixlink"


def force_offline(environment: MutableMapping[str, str]) -> None:
    """Transformers, imported later in this process, asks no network and draws no progress bars.

    Args:
        environment: Usually `os.environ`. What silences output is left as it is where it is set.

    Mutates: `environment`.
    """
    environment.update(_OFFLINE)
    for name, value in _QUIET.items():
        environment.setdefault(name, value)
