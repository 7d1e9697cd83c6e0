"""The phases in which a component takes part in external caching."""

from __future__ import annotations

import enum


class LinkerTransferPhase(enum.StrEnum):
    """What a transfer is built for."""

    #: Ask the store which pages of the missing tail it holds. Keys only; nothing is allocated.
    LOOKUP = "lookup"
    #: Allocate slots and fetch pages into them.
    LOAD = "load"
    #: Store the pages of one node.
    OFFLOAD = "offload"


class ExternalLinkerLoadPhase(enum.StrEnum):
    """What becomes of the slots that a LOAD transfer allocated."""

    #: All components have allocated and the load was accepted.
    PREPARE = "prepare"
    #: Every rank said done: the slots were inserted; what the tree took is kept.
    COMMIT = "commit"
    #: It is given up: the component takes its slots back.
    ABORT = "abort"
