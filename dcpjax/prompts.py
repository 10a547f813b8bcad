"""Whatever a caller gives as prompts → lists of token ids or texts."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from dcpjax.errors import RequestError


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several → a list of prompts. Raises `RequestError` for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts: got {type(prompts).__name__}; give a text, a list of token ids, or a list of those"
        )
    prompts = list(prompts)
    flat = prompts and not isinstance(prompts[0], Iterable)
    return [prompts] if flat or _is_scalar(prompts) else prompts


def _is_scalar(prompts: list[Any]) -> bool:
    """Whether these are the 0-d elements of one array."""
    return bool(prompts) and isinstance(prompts[0], np.ndarray | jax.Array) and prompts[0].ndim == 0


def check_conversation(messages: Any) -> None:
    """Raises `RequestError` unless these are the messages of one conversation."""
    if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError(
            "messages: give one conversation, a list of messages such as {'role': 'user', 'content': 'Hello'}; for "
            "several conversations call chat for each"
        )


def as_ids(name: str, ids: Any) -> list[int]:
    """Token ids as Python ints. Anything that is not a list of whole numbers is refused, not rounded: `RequestError`
    names `name`."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(f"{name}: got {type(ids).__name__}; give a list of token ids")
    try:
        return [operator.index(token) for token in ids]
    except TypeError:
        raise RequestError(f"{name}: token ids must be whole numbers, got {list(ids)!r:.200}") from None
