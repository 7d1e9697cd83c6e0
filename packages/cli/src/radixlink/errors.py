"""The errors that end the command `radixlink`, each with the exit code that the shell sees.

A leaf module: every other module of the package may import it, it imports none of them. All exit codes:

| code   | what it means                                                                       |
|--------|-------------------------------------------------------------------------------------|
| 0      | done, and everything was right                                                      |
| 1      | a check failed: the demonstration was held to its end and something is not as it    |
|        | should be, `store verify` found damage, or a file of a store cannot be read         |
| 2      | wrong arguments, or arguments that the model cannot do (`ArgumentsError`)           |
| 3 to 6 | the model: see `radixlink.models.errors`                                            |
| 7      | the store (`StoreError`)                                                            |
| 8      | processes could not be started (`LaunchError`)                                      |
| 9      | a replica failed (`ReplicaError`)                                                   |
| 10     | something else went wrong, for example a full disk or a closed output (`CommandError`) |
| 11     | the report cannot be written (`ReportError`)                                        |
| 130    | interrupted by Ctrl-C, SIGTERM or SIGHUP                                            |
"""

__all__ = [
    "ArgumentsError",
    "CommandError",
    "LaunchError",
    "ReplicaError",
    "ReportError",
    "StoreError",
]


class CommandError(Exception):
    """The command cannot do what was asked; its message is written for the person who typed it.

    The command prints the message without a traceback and exits with `exit_code`.
    """

    #: What the process exits with; a subclass sets its own. 0 is never used, 1 means a failed check.
    exit_code: int = 10


class ArgumentsError(CommandError):
    """The arguments ask for more than the model can do."""

    exit_code = 2


class StoreError(CommandError):
    """The store is not installed, cannot be opened, has no room, or is another model's."""

    exit_code = 7


class LaunchError(CommandError):
    """Processes could not be started, for example because MPI has too few slots."""

    exit_code = 8


class ReplicaError(CommandError):
    """A replica failed, ended, or did not answer in time."""

    exit_code = 9


class ReportError(CommandError):
    """The report cannot be written where it was asked for."""

    exit_code = 11
