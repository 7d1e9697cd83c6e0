"""The command `radixlink`: the demonstration, and what looks after stores.

Importing it imports neither torch nor transformers.
"""

from radixlink._main import main

__all__ = ["main"]
