"""What SGLang refuses to start with, and what it says then."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from packages.sglang.tests import hooked_store
from packages.sglang.tests.sglang_engine import Kind, SglangEngine, linker_config
from packages.sglang.tests.sglang_import import part

from radixlink_contracts import ComponentType, PoolName
from radixlink_contracts.errors import CapacityError, ContractError, IdentityError, StaleHandleError
from radixlink_sglang._pools import engine_pools
from radixlink_sglang.errors import LinkerConfigError, UnsupportedEngineError
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"colour": 1}, r"got \['colour'\] too"),
        ({"capacity_bytes": "1G"}, "expected capacity_bytes to be an int, got '1G'"),
        ({"capacity_bytes": True}, "expected capacity_bytes to be an int, got True"),
        ({"lease_s": 0}, "expected lease_s above 0, got 0"),
        ({"load_timeout_s": 2e6}, "expected load_timeout_s of at most 1e\\+06 s, got 2000000.0"),
        ({"revision": ""}, "expected revision"),
        ({"store": "punched-cards"}, "expected store to be one of the installed"),
        ({"store": "os:sep"}, "to name a callable in os, got '/'"),
    ],
)
def test_a_configuration_that_is_not_right_is_refused(
    tmp_path: Path, extra: dict[str, object], message: str
) -> None:
    config = dict(linker_config("file", str(tmp_path / "store"), **extra))
    with pytest.raises(LinkerConfigError, match=message):
        SglangEngine(config)


def test_a_store_whose_module_is_not_there_is_an_import_error(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        SglangEngine(linker_config("no_such_module:factory", str(tmp_path)))


def test_a_field_that_sglang_does_not_know_is_refused_by_sglang(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store")) | {"colour": "red"}
    with pytest.raises(ValueError, match=r"unknown fields: \['colour'\]"):
        SglangEngine(config)


def test_another_sglang_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part("radixlink_sglang.linker")
    monkeypatch.setattr("radixlink_sglang.linker.version", lambda name: "0.5.24")
    with pytest.raises(UnsupportedEngineError, match=r"expected sglang 0\.5\.23, got 0\.5\.24"):
        SglangEngine(linker_config("file", str(tmp_path / "store")))


def test_a_place_with_pages_of_other_weights_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    with SglangEngine(linker_config("file", place)) as engine:
        assert engine.linker.pools
    with pytest.raises(IdentityError, match="revision"):
        SglangEngine(linker_config("file", place, revision="2"))


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("pp_size", 2, "expected 1 pipeline stages, got 2"),
        ("attn_cp_size", 2, "expected 1 ranks of attention context parallelism, got 2"),
        ("sidecar_draft_device_pools", (object(),), "expected 0 pools of a draft model, got 1"),
    ],
)
def test_a_setting_that_a_restored_prefix_would_lack_something_in_is_refused(
    tmp_path: Path, what: str, value: object, message: str
) -> None:
    with SglangEngine(linker_config("file", str(tmp_path / "store"))) as engine:
        setattr(engine.params, what, value)
        with pytest.raises(UnsupportedEngineError, match=message):
            engine.make_linker()


def test_a_pool_of_a_subclass_is_refused_since_it_may_keep_more(tmp_path: Path) -> None:
    pools = part("sglang.srt.mem_cache.memory_pool")
    with SglangEngine(linker_config("file", str(tmp_path / "store"))) as engine:
        engine.kv.__class__ = type("SparseKVPool", (pools.MHATokenToKVPool,), {})
        with pytest.raises(UnsupportedEngineError, match="got SparseKVPool"):
            engine.make_linker()


def test_a_pool_that_is_not_whole_pages_is_refused(tmp_path: Path) -> None:
    with SglangEngine(linker_config("file", str(tmp_path / "store"))) as engine:
        for buffers in (engine.kv.k_buffer, engine.kv.v_buffer):
            buffers[:] = [tensor[:-1] for tensor in buffers]
        with pytest.raises(ContractError, match="expected whole pages"):
            engine.make_linker()


def test_a_store_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        SglangEngine(linker_config("file", str(tmp_path / "store"), capacity_bytes=64))


def test_keys_with_scales_are_refused(tmp_path: Path) -> None:
    with SglangEngine(linker_config("file", str(tmp_path / "store"))) as engine:
        engine.kv.k_scale_buffer, engine.kv.v_scale_buffer = (), ()
        with pytest.raises(UnsupportedEngineError, match="without scales"):
            engine.make_linker()


def test_states_that_the_tree_keeps_in_another_form_are_refused(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config, kind=Kind.STATES) as engine:
        engine.requests.mamba_ckpt_pool = object()
        with pytest.raises(UnsupportedEngineError, match="a pool of checkpoints"):
            engine.make_linker()
        engine.requests.mamba_ckpt_pool = None


def test_two_formats_of_one_width_have_different_identities(tmp_path: Path) -> None:
    pools = part("sglang.srt.mem_cache.memory_pool")
    with SglangEngine(linker_config("file", str(tmp_path / "store"))) as engine:
        identities = set()
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            kv = pools.MHATokenToKVPool(
                size=16,
                page_size=4,
                dtype=dtype,
                head_num=1,
                head_dim=8,
                layer_num=2,
                device="cpu",
                enable_memory_saver=False,
            )
            source = SimpleNamespace(get_kvcache=lambda kv=kv: kv)
            params = dataclasses.replace(engine.params, token_to_kv_pool_allocator=source)
            found = engine_pools(params, {ComponentType.FULL})
            assert found.group.pool(PoolName.KV).range_bytes == (32,) * 4
            identities.add(found.identity(model="m", revision="1", page_size=4))
        assert {identity.dtype for identity in identities} == {"float8_e4m3fn", "float8_e5m2"}


def test_a_linker_that_is_not_made_leaves_no_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(counter: object) -> None:
        message = "no counter is taken"
        raise RuntimeError(message)

    config = linker_config(hooked_store.NAME, str(tmp_path / "store"))
    with SglangEngine(config, kind=Kind.STATES) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(engine.requests, "register_layer_transfer_counter", refuse)
            with pytest.raises(RuntimeError, match="no counter is taken"):
                engine.make_linker()
        stores = hooked_store.opened()
        assert {store.layout.pool for store in stores} == {PoolName.KV, PoolName.MAMBA}
        for store in stores:
            with pytest.raises(StaleHandleError):
                store.contains(page_keys([1]))


def test_the_revision_may_be_sglangs_own(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"), revision="")
    with SglangEngine(config, revision="abc") as engine:
        assert engine.linker.pools
