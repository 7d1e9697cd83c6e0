"""What all tests of the connector are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.connector.world import World

from radixlink_contracts import LoadMode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for engine in world.engines:
        engine.close()


@pytest.fixture(params=list(LoadMode), ids=lambda mode: mode.name.lower())
def mode(request: pytest.FixtureRequest) -> LoadMode:
    found: LoadMode = request.param
    return found
