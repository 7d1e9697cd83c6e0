"""Prefixes that SGLang computed, forgot, and gets back from a store."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from packages.sglang.tests.sglang_engine import (
    STATE_GRID,
    Answer,
    Core,
    Kind,
    SglangEngine,
    linker_config,
)

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(range(100, 200))


def restorable(kind: Kind, page_size: int) -> int:
    """How much of the prompt a longer one gets back."""
    if kind.has_states and page_size > 1:
        return len(PROMPT) // STATE_GRID * STATE_GRID
    return len(PROMPT) // page_size * page_size


@pytest.mark.parametrize("core", Core)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_forgotten_prefix_comes_back_from_the_store(
    tmp_path: Path, kind: Kind, core: Core, page_size: int
) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    expected = restorable(kind, page_size)
    with SglangEngine(config, kind=kind, core=core, page_size=page_size) as engine:
        computed = Answer(on_device=0, restored=0, wrong_rows=0, aborted=False)
        assert engine.serve(PROMPT) == [computed]
        engine.forget()
        # So long that SGLang keeps another state behind the restored one.
        longer = [*PROMPT, *range(500, 580)]
        restored = Answer(on_device=0, restored=expected, wrong_rows=0, aborted=False)
        assert engine.serve(longer) == [restored]
        again = engine.serve([*longer, 1])
        assert again[0].on_device >= expected
        assert again[0].wrong_rows == 0
        engine.forget()


@pytest.mark.parametrize("kind", Kind)
def test_another_process_gets_the_prefix_too(tmp_path: Path, kind: Kind) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config, kind=kind) as first:
        first.serve(PROMPT)
        first.settle()
    with SglangEngine(config, kind=kind, core=Core.RUST) as second:
        assert second.serve([*PROMPT, 7]) == [
            Answer(on_device=0, restored=restorable(kind, 4), wrong_rows=0, aborted=False)
        ]


def test_a_store_may_be_named_by_its_import_path() -> None:
    with SglangEngine(linker_config("radixlink_testing:InMemoryStoreFactory", "")) as engine:
        engine.serve(PROMPT)
        engine.forget()
        assert engine.serve([*PROMPT, 7]) == [
            Answer(on_device=0, restored=100, wrong_rows=0, aborted=False)
        ]


def test_a_batch_restores_several_prefixes_at_once(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    prompts = [[start + token for token in range(40)] for start in (0, 1000, 2000)]
    with SglangEngine(config) as engine:
        engine.serve(*prompts)
        engine.forget()
        answers = engine.serve(*([*prompt, 7] for prompt in prompts))
        assert answers == [Answer(on_device=0, restored=40, wrong_rows=0, aborted=False)] * 3


def test_a_prefix_that_is_partly_on_the_device_is_completed(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config) as engine:
        engine.serve(PROMPT)
        engine.forget()
        engine.serve(PROMPT[:41])
        assert engine.serve([*PROMPT, 7]) == [
            Answer(on_device=40, restored=60, wrong_rows=0, aborted=False)
        ]


@pytest.mark.parametrize("core", Core)
@pytest.mark.parametrize("kind", [Kind.FULL, Kind.LATENT, Kind.WINDOWS])
def test_a_prompt_in_chunks_continues_a_restored_prefix(
    tmp_path: Path, kind: Kind, core: Core
) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    longer = [*PROMPT, *range(500, 700)]
    with SglangEngine(config, kind=kind, core=core) as engine:
        engine.serve(PROMPT)
        engine.forget()
        assert engine.serve(longer, chunk=48) == [
            Answer(on_device=0, restored=100, wrong_rows=0, aborted=False)
        ]
        engine.forget()
        assert engine.serve([*longer, 7]) == [
            Answer(on_device=0, restored=300, wrong_rows=0, aborted=False)
        ]


@pytest.mark.parametrize("core", Core)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("page_size", [1, 4])
def test_any_order_of_prompts_that_share_prefixes_is_answered_right(
    tmp_path: Path, kind: Kind, core: Core, page_size: int
) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    random = Random(20)
    documents = [[random.randrange(1 << 16) for _ in range(280)] for _ in range(3)]
    answers: list[Answer] = []
    with SglangEngine(config, kind=kind, core=core, page_size=page_size) as engine:
        for _ in range(24):
            prompts = [
                [*random.choice(documents)[: random.randrange(1, 280)], *range(random.randrange(9))]
                for _ in range(random.randrange(1, 3))
            ]
            answers += engine.serve(*prompts)
            if random.random() < 0.4:
                engine.forget()
        engine.forget()
    assert not any(answer.wrong_rows or answer.aborted for answer in answers)
    assert sum(answer.restored for answer in answers) > 200
    assert sum(answer.on_device for answer in answers) > 0


def test_a_request_of_another_namespace_gets_nothing(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config) as engine:
        engine.serve(PROMPT)
        engine.forget()
        answers = engine.serve([*PROMPT, 7], extra_key="adapter")
        assert answers == [Answer(on_device=0, restored=0, wrong_rows=0, aborted=False)]
        engine.forget()
        answers = engine.serve([*PROMPT, 7], extra_key="adapter")
        assert answers == [Answer(on_device=0, restored=100, wrong_rows=0, aborted=False)]


def test_restored_pages_are_not_copied_to_the_store_again(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config) as engine:
        engine.serve(PROMPT)
        engine.settle()
        stored = engine.counters.pages_stored
        engine.forget()
        engine.serve([*PROMPT, 1, 2, 3, 4])
        engine.settle()
        assert (engine.counters.pages_loaded, engine.counters.pages_stored - stored) == (25, 1)
