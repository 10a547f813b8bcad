"""Keys of a `config.json`, read by type: each once, and what is no such value is refused by the key's name."""

from typing import Any

from dcpjax.errors import ConfigError

# Above any size that a network has; what is larger is no size.
_MOST = 1 << 24


class Reader:
    """Reads keys once and remembers which, so that what is left over can be refused."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever stands there; `default` for nothing and null."""
        self.seen.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Whatever stands there. Raises `ConfigError` for nothing and null."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"config.json has no {key!r}; a glm_moe_dsa checkpoint must state it")
        return value

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; without a default the key is needed. Raises `ConfigError`."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not least <= value <= _MOST:
            raise ConfigError(f"config.json: {key} = {value!r} must be a whole number from {least} to {_MOST}")
        return value

    def number(self, key: str, default: float) -> float:
        """See `number`. Raises `ConfigError`."""
        return number(key, self.get(key, default))

    def truth(self, key: str, default: bool) -> bool:
        """True or false. Raises `ConfigError`."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} = {value!r} must be true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping, empty by default. Raises `ConfigError`."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {key} = {value!r} must be a mapping")
        return value

    def words(self, key: str) -> list[str] | None:
        """A list of words, or one of them. Raises `ConfigError`."""
        value = self.get(key)
        if value is not None and not (isinstance(value, (list, str)) and all(isinstance(v, str) for v in value)):
            raise ConfigError(f"config.json: {key} = {value!r} must be a list of words")
        return value


def token_ids(file: str, key: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """A token id or a list of them, within the vocabulary. file: which errors name. Raises `ConfigError`."""
    ids = (value,) if type(value) is int else value
    if not isinstance(ids, (list, tuple)) or not all(type(v) is int and 0 <= v < vocab_size for v in ids):
        raise ConfigError(
            f"{file}: {key} = {value!r} must be a token id or a list of them, each at least 0 and below vocab_size {vocab_size}"
        )
    return tuple(ids)


def number(key: str, value: Any) -> float:
    """A number above 0: all of them are divisors, bases or factors. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise ConfigError(f"config.json: {key} = {value!r} must be a number above 0")
    return float(value)
