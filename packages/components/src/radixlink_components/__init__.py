"""Components: how each kind of attention state takes part in external caching.

* `FullComponent`: full attention. The tree holds its slots; this says which of them a transfer
  moves.
* `JoinedPageKeys`: keys of pages that are not neighbours, as one run.
"""

from radixlink_components._full import FullComponent
from radixlink_components._joined_keys import JoinedPageKeys

__all__ = ["FullComponent", "JoinedPageKeys"]
