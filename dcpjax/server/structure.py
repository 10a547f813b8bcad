"""What a body demands of the form of its answer, as rules for the engine: schemas, patterns, choices, forced tool calls."""

import asyncio

from dcpjax.server.engine_side import EngineSide
from dcpjax.server.errors import ApiError
from dcpjax.server.protocol import ChatBody, SamplingBody
from dcpjax.server.reasoning import CLOSE
from dcpjax.server.rules import Form, RulesWish
from dcpjax.server.service import Served

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OLD = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


async def rules_of(body: SamplingBody, served: Served, thinking: bool) -> RulesWish | None:
    """What a choice must look like, which the engine process has compiled by then; None: as it likes. thinking: whether the
    answer begins inside a think block, to which no form applies.

    Raises `ApiError` or `RequestError` for forms that contradict each other or cannot be compiled.
    """
    forms = [form for form in (_format(body), *_structured(body), *_forced(body)) if form is not None]
    if not forms and not body.bad_words:
        return None
    form = _only(forms, served)
    if form is not None:
        await served.engine.ask_aside(check_form, form, threads="forms")
    words = await asyncio.to_thread(_bad_words, body, served) if body.bad_words else []
    if form is not None:
        for field in ("min_tokens", "ignore_eos", "allowed_token_ids"):
            if getattr(body, field):
                raise ApiError(400, f"{field}: not possible together with a grammar; leave one of them out", field)
    return RulesWish(form, CLOSE if thinking else None, words) if form is not None or words else None


def check_form(side: EngineSide, form: Form) -> None:
    """To be asked of the engine process: large schemas take their time."""
    side.rules.check(form)


def _only(forms: list[Form], served: Served) -> Form | None:
    if not forms:
        return None
    if len(forms) > 1:
        names = " and ".join(dict.fromkeys(form.field for form in forms))
        raise ApiError(400, f"{forms[1].field}: only one form can be demanded, got {names}", forms[1].field)
    served.tokenizer(forms[0].field)
    return forms[0]


def _format(body: SamplingBody) -> Form | None:
    given = body.response_format or {"type": "text"}
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Form("response_format", kind, None)
    if kind != "json_schema":
        raise ApiError(
            400,
            f"response_format: type {kind!r:.200} is not supported; use text, json_object or json_schema",
            "response_format",
        )
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise ApiError(400, "response_format: json_schema needs {'schema': …}", "response_format")
    return Form("response_format", "json", inner["schema"])


def _structured(body: SamplingBody) -> list[Form]:
    forms = []
    given = {key: value for key, value in (body.structured_outputs or {}).items() if value is not None}
    for kind, value in given.items():
        if kind not in _KINDS:
            raise ApiError(
                400, f"structured_outputs: {kind[:100]!r} is not one of {', '.join(_KINDS)}", "structured_outputs"
            )
        forms.append(Form("structured_outputs", kind, value))
    if body.structured_outputs is not None and not given:
        raise ApiError(400, f"structured_outputs: give one of {', '.join(_KINDS)}", "structured_outputs")
    for field in _OLD:
        if getattr(body, field) is not None:
            forms.append(Form(field, field.removeprefix("guided_"), getattr(body, field)))
    return forms


def _forced(body: SamplingBody) -> list[Form]:
    """Tool calls that must be made."""
    if not isinstance(body, ChatBody) or body.tool_choice in (None, "auto", "none"):
        return []
    tools = body.tools
    if isinstance(body.tool_choice, dict):
        name = body.tool_choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    many = body.parallel_tool_calls is not False and body.tool_choice == "required"
    return [Form("tool_choice", "tools", (tools, many))]


def _bad_words(body: SamplingBody, served: Served) -> list[list[int]]:
    """Ids of every word, also as they are behind a blank."""
    if not body.bad_words:
        return []
    tokenizer = served.tokenizer("bad_words")
    if not all(body.bad_words):
        raise ApiError(400, "bad_words: an empty word forbids everything", "bad_words")
    texts = [form for word in body.bad_words for form in (word, " " + word.lstrip())]
    return [ids for text in dict.fromkeys(texts) if (ids := tokenizer.encode(text, add_special_tokens=False))]
