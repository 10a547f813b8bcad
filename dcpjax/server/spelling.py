"""How flags may be written: with underscores, with dots for keys of JSON, and in a YAML file.

Turns all of it into words that `argparse` reads.
"""

import difflib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dcpjax.errors import ConfigError
from dcpjax.server.flags import JSON_FLAGS


def dashes(word: str) -> str:
    """`--flag_name=x_y` → `--flag-name=x_y`; keys after a dot are kept."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flag, dot, key = name.partition(".")
    return f"{flag.replace('_', '-')}{dot}{key}{equals}{value}"


def fold_dotted(argv: Sequence[str], below: Mapping[str, dict[str, Any]]) -> list[str]:
    """`--flag.key value` → one `--flag JSON`, laid over the `--flag JSON` that is also given, or over `below`'s.

    Raises `ConfigError`.
    """
    rest: list[str] = []
    keys: dict[str, dict[str, Any]] = {flag: {} for flag in JSON_FLAGS if any(w.startswith(f"{flag}.") for w in argv)}
    whole = {flag: dict(below.get(flag) or {}) for flag in keys}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        flag, dot, key = name.partition(".")
        if flag not in keys:
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:
            raise ConfigError(f"{name} needs a value")
        if not dot:
            whole[flag] = _object(flag, value)
            continue
        held = keys[flag]
        *path, last = key.split(".")
        for part in path:
            held = held.setdefault(part, {})
        held[last] = _value(value)
    for flag, value in keys.items():
        rest += [flag, json.dumps({**whole[flag], **value})]
    return rest


def file_words(given: str) -> list[str]:
    """A YAML file's keys and values as words of a command line. Raises `ConfigError`."""
    try:
        values = yaml.safe_load(pathlib.Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--config {given[:200]!r} cannot be read") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {given[:200]!r} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if values is None:
        return []
    if not isinstance(values, dict):
        raise ConfigError(f"--config {given[:200]!r} must map names of flags to values")
    words: list[str] = []
    for key, value in values.items():
        name = dashes(f"--{key}")
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, list) and name in ("--served-model-name", "--api-key"):
            words += [name, *map(str, value)]
        elif isinstance(value, dict | list):
            words.append(f"{name}={json.dumps(value)}")
        elif value is not None:
            words.append(f"{name}={value}")
    return words


def unknown(word: str, known: Sequence[str]) -> str:
    """What to say of a flag that there is not."""
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}?" if near and name.startswith("-") else ""
    return f"unknown argument {name[:200]!r}{hint}"


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text[:200]!r} is not valid JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: {text[:200]!r} is not a JSON object")
    return value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
