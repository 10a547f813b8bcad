"""A checkpoint's chat template: messages in, the prompt as text out."""

import datetime
import json
from typing import Any

import jinja2
import jinja2.sandbox

from dcpjax.errors import ConfigError, RequestError

# Attributes of dicts: in templates they hide keys of the same name.
_DICT_NAMES = frozenset(dir(dict))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which finds keys of dicts without a search for attributes that would be unsafe."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What `obj.attribute` is in a template."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)


class ChatTemplate:
    """A Jinja template from a checkpoint, rendered in a sandbox that cannot change what it is given."""

    def __init__(self, source: str, named_tokens: dict[str, str] | None = None):
        """Raises `ConfigError` when `source` is not a template."""
        env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
            self._template.globals = dict(self._template.globals)  # every rendering copies them, and they are a chain
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}; give another with --chat-template") from None
        self._source = source
        self._named_tokens = named_tokens or {}

    def __reduce__(self):
        return ChatTemplate, (self._source, self._named_tokens)

    def render(self, **values: Any) -> str:
        """The prompt as text. Raises `RequestError` when the template refuses the values or fails on them."""
        context = self._template.new_context({**self._named_tokens, **values})
        try:
            return "".join(self._template.root_render_func(context))
        except Exception as error:  # noqa: BLE001 - a template is a program: it can fail in any way on odd messages
            raise RequestError(f"messages: the chat template cannot render them: {error}") from None
        finally:
            context.vars.clear()  # macros, which know the context: it would keep the messages until the collector looks


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML and sorts keys; a prompt must hold what was sent, in its order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
