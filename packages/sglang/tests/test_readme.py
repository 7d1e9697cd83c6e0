"""The flags of the README are what SGLang parses, and what the linker takes."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from packages.sglang.tests.sglang_import import part

from radixlink_sglang import LinkerConfig

README = Path(__file__).parents[1] / "README.md"


def test_sglang_parses_the_flags_of_the_readme() -> None:
    (command,) = re.findall(r"```\n(python -m sglang.*?)```", README.read_text(), re.DOTALL)
    arguments = shlex.split(command.replace("\\\n", " "))[3:]
    parser = argparse.ArgumentParser()
    part("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    assert parsed.enable_unified_cache_external_linker
    assert parsed.unified_cache_external_linker_backend == "dynamic"
    kinds = part("sglang.srt.mem_cache.unified_cache.linker_config")
    config = kinds.UnifiedCacheLinkerConfig.from_dict(parsed.unified_cache_external_linker_config)
    linker = getattr(part(config.linker_module_path), config.linker)
    base = part("sglang.srt.mem_cache.unified_cache.unified_cache_linker").UnifiedCacheLinker
    assert issubclass(linker, base)
    assert not linker.__abstractmethods__
    assert LinkerConfig.of_json(config.linker_extra_config).capacity_bytes == 16 << 30


def test_the_readme_has_each_field_of_the_configuration() -> None:
    fields = {field.name for field in LinkerConfig.__attrs_attrs__}
    table = README.read_text().split("## `linker_extra_config`")[1].split("\n\n")[1]
    first = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert set(re.findall(r"`(\w+)`", " ".join(first))) == fields
