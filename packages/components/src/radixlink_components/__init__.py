"""Components: how each kind of attention state takes part in external caching.

The tree holds their slots; these say which of them a transfer moves, and take what a load needs.

* `FullComponent`: full attention.
* `SWAComponent`: sliding-window attention.
* `MambaComponent`: recurrent states.
"""

from radixlink_components._full import FullComponent
from radixlink_components._mamba import MambaComponent
from radixlink_components._swa import SWAComponent

__all__ = ["FullComponent", "MambaComponent", "SWAComponent"]
