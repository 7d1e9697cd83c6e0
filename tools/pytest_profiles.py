"""A pytest plugin: Hypothesis' profiles; HYPOTHESIS_PROFILE names the one to use.

`quick`, the default, is for every run; `long` is what `tox -e property` uses. Neither has a
deadline: on a machine with few cores a slow example says more about the neighbours than the code.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("quick", deadline=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
