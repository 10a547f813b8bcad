"""The `quantization_config` of a `config.json`: which published quantisation it announces, and what is refused.

It says what to expect. What a tensor is, its own dtype says (`models/stored.py`).
"""

from collections.abc import Mapping
from typing import Any

from dcpjax.errors import ConfigError

_READ = (
    "quant_method 'fp8' (e4m3 in blocks of 128 × 128), 'modelopt' with quant_algo 'NVFP4', and 'compressed-tensors' with "
    "format 'nvfp4-pack-quantized' can be read"
)


def quantization_of(raw: Mapping[str, Any]) -> str | None:
    """ "fp8", "nvfp4", or None for a checkpoint that announces none. Raises `ConfigError` for any other."""
    given = raw.get("quantization_config")
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json: quantization_config = {given!r} must be a mapping; {_READ}")
    method = given.get("quant_method")
    if method == "fp8":
        return _fp8(given)
    if method in ("modelopt", "modelopt_fp4"):
        # Two spellings: everything in one mapping, or what concerns weights in a mapping of its own.
        inner = given.get("quantization", given)
        return _nvfp4("quant_algo", "NVFP4", inner if isinstance(inner, Mapping) else {})
    if method == "compressed-tensors":
        return _nvfp4("format", "nvfp4-pack-quantized", given)
    raise ConfigError(f"config.json: quantization_config: quant_method {method!r} is not known; {_READ}")


def _fp8(given: Mapping[str, Any]) -> str:
    for key, default, wanted in (("fmt", "e4m3", "e4m3"), ("weight_block_size", None, [128, 128])):
        if given.get(key, default) != wanted:
            raise ConfigError(
                f"config.json: quantization_config: {key} {given.get(key)!r} must be {wanted!r} with quant_method 'fp8'"
            )
    return "fp8"


def _nvfp4(key: str, wanted: str, given: Mapping[str, Any]) -> str:
    if given.get(key) != wanted:
        raise ConfigError(f"config.json: quantization_config: {key} {given.get(key)!r} cannot be read; {_READ}")
    if given.get("group_size", 16) != 16:
        raise ConfigError(f"config.json: quantization_config: group_size {given['group_size']!r} must be 16 with NVFP4")
    return "nvfp4"
