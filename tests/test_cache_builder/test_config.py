"""No value of any setting makes anything but a configuration or one line of refusal."""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.config import BuildConfig
from cache_builder.devices import require_devices
from shared.config import build, to_dict
from shared.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "cache": {"path": "cache"},
    "target": {"path": "target"},
    "data": {"sources": ["data"], "max_length": 16},
}
SECTIONS = typing.get_type_hints(BuildConfig)
KEYS = [
    f"{section}.{field.name}"
    for section, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
]
EXTREMES = [
    None,
    True,
    "",
    " ",
    "\0",
    "x" * 5000,
    "foo",
    "nan",
    "inf",
    0,
    -1,
    2**31,
    2**63,
    10**5000,
    1e308,
    -1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    [],
    [""],
    ["foo"],
    ["\0"],
    [-1],
    [3, 3],
    [10**30],
    [[]],
    [None],
    {},
    {"path": ""},
    [{"path": ""}],
    {"messages": "x"},
    {"a": math.inf},
]


def changed(key: str, value: Any) -> dict[str, Any]:
    section, name = key.split(".")
    return {**SMALLEST, section: {**SMALLEST.get(section, {}), name: value}}


@pytest.mark.parametrize("key", KEYS)
def test_extreme_values_are_used_or_refused_in_one_line(key: str) -> None:
    for value in EXTREMES:
        try:
            config = build(BuildConfig, changed(key, value))
        except ConfigError as error:
            message = str(error)
            assert message.startswith(key.partition(".")[0])
            assert len(message) < 600
            assert "\n" not in message
        else:
            assert config.cache.min_free_bytes >= 0
            assert config.data.tagged_sources
            assert 1 <= config.plan.shard_mib * 2**20 + 1 < 2**63
            assert build(BuildConfig, to_dict(config)) == config


@given(st.sampled_from(KEYS), st.integers() | st.floats() | st.text() | st.lists(st.text()))
def test_any_value_is_used_or_refused(key: str, value: Any) -> None:
    try:
        config = build(BuildConfig, changed(key, value))
    except ConfigError as error:
        message = str(error)
        assert message.startswith(key.partition(".")[0])
    else:
        assert config.workers.num_workers <= 1024


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("workers.devices", [], 'workers: devices must name at least one, or be "auto"'),
        (
            "workers.devices",
            ["foo"],
            'workers: devices must be "cpu" or "cuda:N" each, got \'foo\'',
        ),
        ("workers.devices", ["cuda:-1"], "workers: devices must be"),
        ("workers.num_workers", 10**9, "workers: num_workers must be in [0, 1024]"),
        ("cache.min_free_gb", math.inf, "cache.min_free_gb: expected float, got inf"),
        ("cache.min_free_gb", 1e300, "cache: min_free_gb must be in [0, 1e9], got 1e+300"),
        ("plan.shard_mib", 1e300, "plan: shard_mib must be in (0, 2**24], got 1e+300"),
        ("capture.batch_tokens", 2**40, "capture: batch_tokens must be in [1, 2**24]"),
        ("capture.target_layer_ids", [3, 1], "capture: target_layer_ids must ascend"),
        ("capture.max_quarantined_fraction", 1.5, "capture: max_quarantined_fraction must be"),
        ("data.max_length", 2**31, "data: max_length must be in [2, 2**31)"),
        ("data.sources", [""], "data: sources must be a path of 1 to 4095"),
        ("target.path", "", "target: path must be a path of 1 to"),
        ("workers.devices_per_worker", 0, "workers: devices_per_worker must be in [1, 64]"),
    ],
)
def test_a_refusal_names_the_setting_and_its_range(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(BuildConfig, changed(key, value))
    assert str(caught.value).startswith(message)


def test_ray_gives_out_devices_itself() -> None:
    tree = changed("workers.devices", ["cuda:0"])
    tree["workers"]["launcher"] = "ray"
    with pytest.raises(ConfigError, match='devices must be "auto" or "cpu" with launcher "ray"'):
        build(BuildConfig, tree)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = build(BuildConfig, changed("workers.devices", ["cuda:1", "cuda:2"]))
    with pytest.raises(ConfigError, match=r"workers\.devices: cuda:2 is not there; torch sees 2"):
        require_devices(config.workers)
    config = build(BuildConfig, changed("workers.devices", ["cuda:1"]))
    assert require_devices(config.workers) == [("cuda:1",)]
    assert Path("cache") == config.cache.path
