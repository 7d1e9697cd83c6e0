"""A linker for SGLang 0.5.23: its prefix cache behind any radixlink store.

SGLang imports `radixlink_sglang.linker` itself, when it is started with

    --enable-unified-cache-external-linker
    --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "RadixlinkLinker",
        "linker_module_path": "radixlink_sglang.linker",
        "linker_extra_config": {"store": "file", "location": "/dev/shm/kv", "revision": "1"}}'

`LinkerConfig` says what `linker_extra_config` may have. Everything but `radixlink_sglang.linker`
imports without SGLang.
"""

from radixlink_sglang._config import LinkerConfig

__all__ = ["LinkerConfig"]
