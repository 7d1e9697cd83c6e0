"""Trees with pools beside them; every test ends with the invariants of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import pytest

from radixlink_tree import EvictionPolicy, StateRules, _structure

from .rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@attrs.frozen
class Shape:
    """What a tree is made of: tokens of a page, tokens of a window, whether there are states."""

    page_size: int
    window: int = 0
    states: bool = False

    @property
    def name(self) -> str:
        window = f"-window{self.window}" if self.window else ""
        return f"page{self.page_size}{window}{'-states' if self.states else ''}"


FULL = [Shape(page_size) for page_size in (1, 4, 16, 64, 128)]
WINDOWS = [
    Shape(page_size, window)
    for page_size, window in (
        *((1, 4), (4, 4), (4, 2), (16, 16), (64, 64), (128, 128)),
        *((128, 4), (1, 128)),
    )
]
STATES = [Shape(page_size, states=True) for page_size in (1, 4, 64, 128)]
BOTH = [Shape(1, 128, states=True), Shape(64, 64, states=True)]


class MakeRig(Protocol):
    """Makes a tree with its pools; see `Rig`."""

    def __call__(
        self,
        page_size: int,
        num_pages: int = 64,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_pages: int = 0,
        *,
        window: int = 0,
        states: StateRules | None = None,
    ) -> Rig: ...


@pytest.fixture(params=[False, True], ids=["", "in place"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Keys are copied whole for a walk, as short ones are; or piece by piece and not where runs are long."""
    in_place = bool(request.param)
    if in_place:
        monkeypatch.setattr(_structure, "_COPY_BYTES", 40)
        monkeypatch.setattr(_structure, "_LONG_RUN_BYTES", 33)
    return in_place


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(
        page_size: int,
        num_pages: int = 64,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_pages: int = 0,
        *,
        window: int = 0,
        states: StateRules | None = None,
    ) -> Rig:
        rigs.append(Rig(page_size, num_pages, policy, tail_pages, window=window, states=states))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.check()


@pytest.fixture(params=[1, 4, 16, 64], ids=lambda page_size: f"page{page_size}")
def rig(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    """Full attention alone."""
    page_size: int = request.param
    return make_rig(page_size)


def of_shape(make_rig: MakeRig, shape: Shape) -> Rig:
    """A tree of that shape, with more pages where a window is many of them."""
    return make_rig(
        shape.page_size,
        max(64, 3 * shape.window // shape.page_size),
        window=shape.window,
        states=StateRules() if shape.states else None,
    )


def rig_of(shapes: list[Shape]) -> Callable[[MakeRig, pytest.FixtureRequest], Rig]:
    """A fixture that makes a tree of each of these shapes."""

    @pytest.fixture(params=shapes, ids=lambda shape: shape.name)
    def make(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
        shape: Shape = request.param
        return of_shape(make_rig, shape)

    return make


#: All trees, one of each kind, and all that have what the name says.
any_rig = rig_of([*FULL, *WINDOWS, *STATES, *BOTH])
one_rig = rig_of([FULL[1], WINDOWS[2], STATES[1], Shape(4, 8, states=True)])
swa_rig = rig_of([*WINDOWS, *BOTH])
mamba_rig = rig_of([*STATES, *BOTH])
