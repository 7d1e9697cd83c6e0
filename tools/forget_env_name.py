"""Make tox forget which environment built a directory, so that another may use it as it is.

tox 4 rebuilds an environment's directory if it was built under another name. tox.ini lets several
environments with the same dependencies share one directory, and runs this after each of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(env_dir: Path) -> None:
    """Remove the name from tox's record; what was installed stays recorded, and compared."""
    record = env_dir / ".tox-info.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    content.pop("ToxEnv", None)
    record.write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
