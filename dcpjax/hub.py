"""Where a model lies: the embedded one, a folder, or a repository of the Hugging Face Hub that is fetched first."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

from dcpjax.errors import ConfigError, RequestError
from dcpjax.host.request import SamplingParams
from models.config import read_mapping

TINY = pathlib.Path(__file__).resolve().parent.parent / "models" / "tiny"

# Fields of a `generation_config.json` that stand in for those that a request leaves out.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# What an engine reads; repositories hold other forms of the same weights too.
_WANTED = ("*.json", "*.jinja", "*.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def find(model: str | pathlib.Path | None, fetch: Callable[..., str] | None = None) -> tuple[pathlib.Path, str]:
    """The folder of a model, and its short name. `model`: None for the tiny one, a folder, or "owner/name[@revision]".

    Raises `ConfigError` if it is none of these or cannot be fetched. `fetch`: instead of the Hub's own `snapshot_download`.
    """
    if model is None:
        return TINY, "tiny"
    folder = pathlib.Path(model)
    if str(model) and folder.is_dir():
        return folder, folder.resolve().name
    if str(model).startswith((".", "/", "~")) or not _HUB_ID.fullmatch(str(model)):
        raise ConfigError(
            f"model {str(model)!r} is not a folder; give a folder with config.json and safetensors, or a Hub id owner/name"
        )
    name, _, revision = str(model).partition("@")
    try:
        found = (fetch or _snapshot_download())(name, revision=revision or None, allow_patterns=list(_WANTED))
    except Exception as error:  # noqa: BLE001 - it talks to a network, which fails in many ways
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"model {str(model)!r} is not a folder, and the Hub does not give it: {reason}. Give a folder, or another id"
        ) from None
    return pathlib.Path(found), name.partition("/")[2]


def generation_defaults(folder: pathlib.Path) -> dict[str, Any]:
    """The model's `generation_config.json`, empty if there is none. Raises `ConfigError` for what is no JSON or no default."""
    path = folder / "generation_config.json"
    return checked_defaults(read_mapping(path), str(path)) if path.is_file() else {}


def checked_defaults(given: dict[str, Any], where: str) -> dict[str, Any]:
    """The same mapping, its nulls left out. Raises `ConfigError` if no request could have one of its values."""
    given = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(
            **{name: given[name] for name in SAMPLING_DEFAULTS if name in given}, max_tokens=given.get("max_new_tokens")
        )
    except RequestError as error:
        raise ConfigError(
            f"{where}: {str(error).replace('max_tokens', 'max_new_tokens')}; correct it or leave it out"
        ) from None
    return given


def _snapshot_download() -> Callable[..., str]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError("install huggingface_hub") from None
    return snapshot_download
