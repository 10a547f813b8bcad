"""Chats with tools: what is offered, how it is called, what comes back."""

import json
import random
from typing import Any

from models.train import words

String, Number = {"type": "string"}, {"type": "number"}


def _tool(name: str, description: str, required: int = 99, **properties: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    parameters["required"] = list(properties)[:required]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool(
            "get_weather",
            "Weather in a city",
            1,
            city=String,
            unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        ),
        _tool("calculator", "Computes an expression", expression=String),
        _tool("get_time", "Time of day in a city", city=String),
        _tool("roll_dice", "Rolls one die"),
        _tool("search", "Searches the web", 1, query=String, limit={"type": "integer"}),
        _tool("send_mail", "Sends a mail", to=String, subject=String, body=String),
        _tool("set_timer", "Starts a timer", minutes={"type": "integer"}),
        _tool("play_music", "Plays a song", title=String),
        _tool("convert", "Converts between units", value=Number, source=String, target=String),
    )
}
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


def call_text(function: dict[str, Any]) -> str:
    """One call as the model writes it; strings stand as they are, other values as JSON."""
    args = "".join(
        f"<arg_key>{k}</arg_key><arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>"
        for k, v in function["arguments"].items()
    )
    return f"<tool_call>{function['name']}{args}</tool_call>"


def chat(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tools and messages: a request, its calls, their results, the answer; now and then one that needs no tool."""
    ask, calls, results, answer = rng.choice(_CASES)(rng)
    offered = {c[0] for c in calls} | set(rng.sample(sorted(TOOLS), rng.randint(0, 3)))
    tools = [TOOLS[name] for name in sorted(offered, key=lambda _: rng.random())]
    messages: list[dict[str, Any]] = [{"role": "user", "content": ask}]
    if calls:
        names = " and ".join(dict.fromkeys(c[0] for c in calls))
        made = [{"function": {"name": n, "arguments": a}} for n, a in calls]
        messages.append(
            {"role": "assistant", "reasoning_content": f"I call {names}.", "content": "", "tool_calls": made}
        )
        messages += [{"role": "tool", "content": r} for r in results]
    reasoning = "I have the result." if calls else "No tool is needed."
    messages.append({"role": "assistant", "reasoning_content": reasoning, "content": answer})
    return tools, messages


def _weather(rng):
    cities = rng.sample(words.CITIES, rng.choice((1, 1, 2)))
    unit = rng.choice((None, None, "celsius", "fahrenheit"))
    found = [(rng.randrange(-5, 35), rng.choice(_SKIES)) for _ in cities]
    where = " and ".join(cities)
    ask = rng.choice(("What is the weather in {}?", "How is the weather in {}?", "Tell me the weather in {}."))
    ask = ask.format(where) + (f" Use {unit}." if unit else "")
    calls = [("get_weather", {"city": c} | ({"unit": unit} if unit else {})) for c in cities]
    results = [json.dumps({"temperature": t, "sky": s}) for t, s in found]
    answer = " ".join(f"In {c} it is {s} with {t} degrees." for c, (t, s) in zip(cities, found))
    return ask, calls, results, answer


def _calculator(rng):
    a, b, sign = rng.randrange(100, 10_000), rng.randrange(100, 10_000), rng.choice("+-*")
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    ask = rng.choice(("What is {}?", "Use the calculator for {}.", "Compute {} for me.")).format(f"{a} {sign} {b}")
    return ask, [("calculator", {"expression": f"{a} {sign} {b}"})], [str(result)], f"The result is {result}."


def _time(rng):
    cities = rng.sample(words.CITIES, rng.choice((1, 1, 2)))
    times = [f"{rng.randrange(24):02}:{rng.randrange(60):02}" for _ in cities]
    ask = rng.choice(("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?"))
    answer = " ".join(f"In {c} it is {t}." for c, t in zip(cities, times))
    return ask.format(" and ".join(cities)), [("get_time", {"city": c}) for c in cities], times, answer


def _dice(rng):
    value = rng.randint(1, 6)
    ask = rng.choice(("Roll a die.", "Roll the dice for me.", "Please throw a die."))
    return ask, [("roll_dice", {})], [str(value)], f"You rolled a {value}."


def _search(rng):
    query = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    limit = rng.choice((None, rng.randint(1, 9)))
    ask = f"Search for {query}." + (f" Show {limit} results." if limit else "")
    found = f"{query.capitalize()} of {rng.choice(words.CITIES)}"
    args = {"query": query} | ({"limit": limit} if limit else {})
    return ask, [("search", args)], [json.dumps([found])], f"I found this: {found}."


def _mail(rng):
    name, subject = rng.choice(words.FIRST_NAMES), rng.choice(words.NOUNS)
    body = f"The {subject} is {rng.choice(words.ADJECTIVES)}."
    args = {"to": name, "subject": subject, "body": body}
    return (
        f"Send {name} a mail about the {subject}: {body}",
        [("send_mail", args)],
        ["sent"],
        f"I sent the mail to {name}.",
    )


def _timer(rng):
    minutes = rng.randint(1, 90)
    ask = rng.choice(("Set a timer for {} minutes.", "Start a timer of {} minutes.")).format(minutes)
    return ask, [("set_timer", {"minutes": minutes})], ["ok"], f"The timer runs for {minutes} minutes."


def _music(rng):
    title = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    return f"Play the song {title}.", [("play_music", {"title": title})], ["playing"], f"Now playing {title}."


def _convert(rng):
    value, (source, target) = rng.randint(2, 500), rng.choice((("km", "miles"), ("kg", "pounds"), ("litres", "cups")))
    result = str(rng.randint(1, 900))
    args = {"value": value, "source": source, "target": target}
    return (
        f"Convert {value} {source} to {target}.",
        [("convert", args)],
        [result],
        f"{value} {source} are {result} {target}.",
    )


def _nothing(rng):
    country, city = rng.choice(list(words.CAPITALS.items()))
    return f"What is the capital of {country}?", [], [], f"The capital of {country} is {city}."


_CASES = (_weather, _weather, _calculator, _time, _dice, _search, _mail, _timer, _music, _convert, _nothing)
