"""What `linker_extra_config` may say; what it may not is named as it was typed."""

from __future__ import annotations

import json

import attrs
import pytest

from radixlink_contracts import MAX_TIMEOUT_S
from radixlink_linker import StoreLinkerSettings
from radixlink_sglang._config import LinkerConfig
from radixlink_sglang.errors import LinkerConfigError

DEFAULTS = attrs.asdict(LinkerConfig())
TIMES = [name for name in DEFAULTS if name.endswith("_s")]


def test_each_field_is_taken_as_it_is_given() -> None:
    given = {
        name: value + "x" if isinstance(value, str) else value * 2
        for name, value in DEFAULTS.items()
    }
    assert attrs.asdict(LinkerConfig.of_json(json.loads(json.dumps(given)))) == given


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("text", ["Infinity", "1e12", "1000001", "NaN", "-1", "0"])
def test_what_no_wait_takes_is_no_time(name: str, text: str) -> None:
    value = json.loads(f'{{"{name}": {text}}}')
    with pytest.raises(LinkerConfigError, match=f"expected {name} (of at most 1e\\+06 s|above 0)"):
        LinkerConfig.of_json(value)


def test_the_longest_time_is_one_for_the_linker_too() -> None:
    config = LinkerConfig.of_json(dict.fromkeys(TIMES, MAX_TIMEOUT_S))
    settings = StoreLinkerSettings(
        lease_s=config.lease_s,
        copy_timeout_s=config.copy_timeout_s,
        layer_timeout_s=config.load_timeout_s,
        quiesce_timeout_s=config.quiesce_timeout_s,
        hang_s=config.load_timeout_s,
    )
    assert settings.hang_s == settings.copy_timeout_s == MAX_TIMEOUT_S


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_offloads": 1.0}, "expected max_offloads to be an int, got 1.0"),
        ({"max_offloads": True}, "expected max_offloads to be an int, got True"),
        ({"miss_s": "30"}, "expected miss_s to be a number, got '30'"),
        ({"store": 1}, "expected store to be a string, got 1"),
        ({"colour": 1}, r"expected some of \[.*\], got \['colour'\] too"),
        ([1], r"expected an object, got \[1\]"),
        ("file", "expected an object, got 'file'"),
        (None, "expected an object, got None"),
    ],
)
def test_what_is_of_another_type_is_refused(value: object, message: str) -> None:
    with pytest.raises(LinkerConfigError, match=f"linker_extra_config: {message}"):
        LinkerConfig.of_json(value)
