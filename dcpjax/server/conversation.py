"""From a chat body to running jobs, whatever protocol the body came in; and the turns that read what they bring."""

import dataclasses

from dcpjax.server import wishes
from dcpjax.server.answers import off_loop
from dcpjax.server.argument_values import ToolSchemas
from dcpjax.server.errors import ApiError
from dcpjax.server.prompts import check_tool_choice, render_chat, text_size
from dcpjax.server.protocol import ChatBody
from dcpjax.server.service import Served, ServerOptions
from dcpjax.server.structure import rules_of
from dcpjax.server.ticket import Ticket
from dcpjax.server.tool_calls import ToolCalls
from dcpjax.server.turn import Turn, TurnRules

_UNSUPPORTED = ("audio", "web_search_options", "functions")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat whose jobs run: one a choice. turns: what reads the updates of choice i."""

    prompt: list[int]
    ticket: Ticket
    turns: list[Turn]


async def begin(body: ChatBody, served: Served, options: ServerOptions, name: str, whole: bool) -> Conversation:
    """Submits a chat. name, whole: of the ticket. Raises `ApiError` or `RequestError` for what is refused."""
    served.check_model(body.model)
    _refuse(body, options)
    logprobs = _logprobs(body, options)
    wishes.check_prompt_logprobs(body, options.max_logprobs)
    max_tokens = body.max_completion_tokens or body.max_tokens
    prompt = await off_loop(text_size(body), render_chat, body, served, options)
    ids = wishes.truncate(prompt.token_ids, body)
    wishes.check_prompt(ids, max_tokens, served, "messages")
    if max_tokens is None:
        max_tokens = wishes.default_max_tokens(served)
    params = wishes.sampling_params(body, served, max_tokens=max_tokens, logprobs=logprobs)
    rules = await rules_of(body, served, prompt.thinking)
    ticket = served.engine.submit(wishes.jobs(ids, params, body, rules), name, whole)
    await ticket.accepted()
    form = TurnRules(
        thinking=prompt.thinking,
        separate=options.parse_reasoning and body.separate_reasoning is not False,
        shown=body.include_reasoning is not False,
    )
    turns = [Turn(form, _calls(body, options), served.model.tokenizer) for _ in range(params.n)]
    return Conversation(ids, ticket, turns)


def _calls(body: ChatBody, options: ServerOptions) -> ToolCalls | None:
    """What parses calls, None if they are not to be parsed."""
    choice = body.tool_choice or "auto"
    wanted = options.parse_tools and (options.auto_tools or choice != "auto")
    if body.tools is None or choice == "none" or not wanted:
        return None
    return ToolCalls(ToolSchemas(body.tools), 1 if body.parallel_tool_calls is False else None)


def _refuse(body: ChatBody, options: ServerOptions) -> None:
    wishes.refuse_unsupported(body, options)
    for field in _UNSUPPORTED:
        if getattr(body, field) is not None:
            raise ApiError(400, f"{field}: not supported; leave it out", field)
    if body.modalities is not None and any(kind != "text" for kind in body.modalities):
        raise ApiError(400, "modalities: this model gives text only", "modalities")
    check_tool_choice(body)


def _logprobs(body: ChatBody, options: ServerOptions) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs: only allowed with logprobs = true", "top_logprobs")
        return None
    wanted = body.top_logprobs or 0
    wishes.check_logprobs(wanted, options.max_logprobs, "top_logprobs")
    return wanted
