"""A small engine on Hugging Face transformers models, with its KV cache behind radixlink.

* `load_model` reads a saved model, `build_engine` makes a `TransformersEngine` of it.
* `TransformersEngine.generate` answers a prompt, `submit` and `iterate` several at once;
  `RequestFigures` say what was restored and what was computed.
* `generate_without_cache` is the yardstick: the same model without radixlink.
* `KVGeometry`, `PagedKVPool`, `restore_prefix` and `save_pages` are the bridge between pages and a
  `DynamicCache`, for engines of your own.

It runs models of full attention (Llama, Qwen2, Qwen3, SmolLM2, ...) or windows (Mistral), of both
(Gemma 3, GPT-OSS), and of full attention beside recurrent states (Qwen3-Next, Falcon-H1, Bamba), on a
CPU; others are refused.
"""

from radixlink_transformers._assembly import build_engine, default_linker_settings
from radixlink_transformers._bridge import restore_prefix, save_pages
from radixlink_transformers._engine import TransformersEngine
from radixlink_transformers._geometry import KVGeometry, cache_identity
from radixlink_transformers._hugging_face import CausalModel, KVCache
from radixlink_transformers._kinds import ModelKind
from radixlink_transformers._loading import load_model
from radixlink_transformers._pending import PendingGeneration
from radixlink_transformers._poison import PoisoningAllocator
from radixlink_transformers._pool import LayerKV, PagedKVPool
from radixlink_transformers._reference import ReferenceGeneration, generate_without_cache
from radixlink_transformers._values import (
    EngineSettings,
    FirstToken,
    Generation,
    LoadStarted,
    LookupStarted,
    PrefillStarted,
    Progress,
    RequestFigures,
    TokenGenerated,
)

__all__ = [
    "CausalModel",
    "EngineSettings",
    "FirstToken",
    "Generation",
    "KVCache",
    "KVGeometry",
    "LayerKV",
    "LoadStarted",
    "LookupStarted",
    "ModelKind",
    "PagedKVPool",
    "PendingGeneration",
    "PoisoningAllocator",
    "PrefillStarted",
    "Progress",
    "ReferenceGeneration",
    "RequestFigures",
    "TokenGenerated",
    "TransformersEngine",
    "build_engine",
    "cache_identity",
    "default_linker_settings",
    "generate_without_cache",
    "load_model",
    "restore_prefix",
    "save_pages",
]
