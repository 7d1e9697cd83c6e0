"""SGLang's own code on a CPU, without the gigabytes that it needs on a GPU.

`tools/fetch_sglang.py` unpacks SGLang's wheel without its dependencies. What its cache needs of them
is torch, numpy, msgspec and packaging; everything else that it imports is given a stand-in here,
which can be imported, subclassed, called and used as a decorator, and does nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Foreign: TypeAlias = Any
"""A value of SGLang, which has no types."""

ROOT: Final = Path(__file__).parents[3]
DEFAULT_DIRECTORY: Final = ROOT / "build" / "sglang"

# fmt: off
_STAND_INS: Final = frozenset([
    "IPython", "PIL", "aiohttp", "annotated_types", "anyio", "certifi", "cloudpickle",
    "compressed_tensors", "cuda", "deep_gemm", "dill", "einops", "fastapi", "flash_attn",
    "flashinfer", "gguf", "huggingface_hub", "idna", "interegular", "kernels", "llguidance",
    "numba", "openai", "orjson", "outlines", "partial_json_parser", "prometheus_client",
    "psutil", "pybase64", "pydantic", "pydantic_core", "pynvml", "regex", "requests",
    "safetensors", "scipy", "sentencepiece", "setproctitle", "sgl_kernel", "sniffio",
    "soundfile", "starlette", "tiktoken", "tilelang", "tokenizers", "torchaudio", "torchcodec",
    "torch_memory_saver", "torchvision", "tqdm", "transformers", "triton", "tvm_ffi",
    "typing_inspection", "urllib3", "uvicorn", "uvloop", "xgrammar", "zmq",
])
# fmt: on
"""Third parties; none of them takes part in what is tested."""

_EMPTY_PARTS: Final = (
    "sglang.srt.constrained",
    "sglang.srt.entrypoints",
    "sglang.srt.function_call",
    "sglang.srt.layers.deep_gemm_wrapper",
    "sglang.srt.parser",
    "sglang.srt.utils.hf_transformers",
    "sglang.srt.utils.hf_transformers_utils",
)
"""Parts of SGLang that only serve models, tokenizers and HTTP."""

_BARE_PACKAGES: Final = ("sglang", "sglang.srt.configs", "sglang.srt.layers.quantization")
"""Packages whose modules are wanted, but whose `__init__` imports every model."""


class StandIn:
    """Takes part in any expression, and comes to nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Anything may be asked of it."""

    def __getattr__(self, name: str) -> object:
        return _stand_in(name)

    def __call__(self, *arguments: object, **options: object) -> object:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]  # a decorator
        return self

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, item: object) -> StandIn:
        return self

    def __iter__(self) -> Iterator[StandIn]:
        return iter(())

    def __or__(self, other: object) -> StandIn:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False


class _Kind(type):
    """Classes that have every attribute, and no members."""

    def __getattr__(cls, name: str) -> object:
        return _stand_in(name)

    def __iter__(cls) -> Iterator[object]:
        return iter(())


class _StandInModule(ModuleType):
    @override
    def __getattr__(self, name: str) -> object:
        found = _stand_in(name)
        setattr(self, name, found)
        return found


def _stand_in(name: str) -> object:
    """What stands for a name: a class of its own, where it is written like one."""
    if name.startswith("__"):
        raise AttributeError(name)
    if not name[0].isupper():
        return StandIn()
    subscript = classmethod(lambda cls, _: cls)
    return _Kind(name, (), {"__init__": StandIn.__init__, "__class_getitem__": subscript})


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins, and bare packages below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _BARE_PACKAGES or self._is_stand_in(fullname):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandInModule(spec.name)
        if spec.name in _BARE_PACKAGES:
            place = self._directory.joinpath(*spec.name.split("."))
            spec.submodule_search_locations = [str(place)]
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"

    @staticmethod
    def _is_stand_in(name: str) -> bool:
        root = name.partition(".")[0]
        return root in _STAND_INS or any(
            name == part or name.startswith(f"{part}.") for part in _EMPTY_PARTS
        )


def directory() -> Path:
    """Where SGLang's wheel is unpacked; skips the test where it is not."""
    place = Path(os.environ.get("RADIXLINK_SGLANG", DEFAULT_DIRECTORY))
    if not (place / "sglang").is_dir():
        pytest.skip(f"no SGLang in {place}: run tools/fetch_sglang.py, or set RADIXLINK_SGLANG")
    return place


@cache
def install() -> None:
    """`import sglang` works from here on; skips the test where it cannot."""
    place = directory()
    # Its Rust core comes with the wheel; a compiler would be looked for otherwise.
    os.environ["SGLANG_RUST_BUILD_MODE"] = "never"
    sys.meta_path.insert(0, _Finder(place))
    sys.path.append(str(place))
    utils = _imported("sglang.srt.mem_cache.utils")
    utils.__dict__["get_native_hash"] = page_hashes


def part(name: str) -> ModuleType:
    """A module of SGLang. It has no types; whatever is taken from it is anything."""
    install()
    return _imported(name)


def _imported(name: str) -> ModuleType:
    with warnings.catch_warnings():
        # What SGLang and torch say of themselves while they are imported.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def page_hashes(
    key: Sequence[int], prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """SGLang's own hash of a key, without the compiler that its first call would start.

    Tokens below 2^32, no pairs: what the tests use. That it is the hash of SGLang's Rust core is
    seen where that core restores what this one stored.
    """
    tokens = list(key)
    digest = prior_digest
    digests = []
    step = page_size or max(len(tokens), 1)
    for start in range(0, len(tokens), step):
        page = tokens[start : start + step]
        data = b"".join(token.to_bytes(4, "little") for token in page)
        digest = hashlib.sha256((digest or b"") + data).digest()
        digests.append(digest.hex())
    return digests if page_size else digests[-1]
