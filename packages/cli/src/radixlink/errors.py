"""The errors that end the command `radixlink`, each with the exit code that the shell sees.

A leaf module: every other module of the package may import it, it imports none of them. `radixlink.models.errors` has
those of preparing a model (3 to 6).
"""

__all__ = ["CommandError", "LaunchError", "ReplicaError", "StoreError"]


class CommandError(Exception):
    """The command cannot do what was asked; its message is written for the person who typed it.

    The command prints the message without a traceback and exits with `exit_code`.
    """

    #: What the process exits with; a subclass sets its own, 0 is never used.
    exit_code: int = 1


class StoreError(CommandError):
    """The store is not installed, cannot be opened, or is another model's."""

    exit_code = 7


class LaunchError(CommandError):
    """Processes could not be started, for example because MPI has too few slots."""

    exit_code = 8


class ReplicaError(CommandError):
    """A replica failed, ended, or did not answer in time."""

    exit_code = 9
