"""Endless synthetic chats: small tasks with one right answer, in the layout of the chat template.

Everything follows from the random generator it is given. `render` writes the same text as `chat_template.jinja`, which
a test checks; it is only faster.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from models.train import tables, toolcalls, words

Turn = tuple[str, str, str]  # user text, reasoning, answer


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    *,
    thinking: bool = True,
    effort: str = "",
    clear_thinking: bool = True,
    prompt: bool = False,
) -> str:
    """A conversation as text. `prompt` ends it where the model goes on."""
    out = ["[gMASK]<sop>"]
    if thinking:
        out.append(f"<|system|>Reasoning Effort: {'High' if effort == 'high' else 'Max'}")
    if tools:
        out.append("<|system|>\n# Tools\n\nYou can call these functions. Each line describes one:\n\n<tools>\n")
        out += [json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in tools]
        out.append("</tools>\n\nTo call one, write:\n")
        out.append("<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>")
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            reasoning = m.get("reasoning_content", "") if i > last_user or not clear_thinking else ""
            out.append(f"<|assistant|><think>{reasoning}</think>{m['content']}")
            out += [toolcalls.call_text(call["function"]) for call in m.get("tool_calls", ())]
        elif m["role"] == "tool":
            out.append("<|observation|>" if messages[i - 1]["role"] != "tool" else "")
            out.append(f"<tool_response>{m['content']}</tool_response>")
        else:
            out.append(f"<|{m['role']}|>{m['content']}")
    if prompt:
        out.append("<|assistant|><think>" if thinking else "<|assistant|><think></think>")
    return "".join(out)


def document(rng: random.Random, room: int, lookups: float = 0.35) -> str:
    """One chat of roughly at most `room` tokens, closed by the token that ends the model's last turn."""
    if room > 150 and rng.random() < lookups:
        if room > 700 and rng.random() < 0.75:
            share = rng.uniform(0.35, 0.8)
            lines = max(3, int(room * share / 11))
            questions = max(1, int(room * (0.9 - share) / 32))
        else:
            lines = rng.randint(3, max(4, min(30, room // 16)))
            questions = rng.randint(1, max(1, min(10, (room - 11 * lines) // 32)))
        return _close(rng, tables.chat(rng, lines, questions))
    if rng.random() < 0.22:
        tools, messages = toolcalls.chat(rng)
        return _close(rng, messages, tools)
    return _close(rng, small_talk(rng, rng.choice((1, 1, 2, 3, 4, 6))))


def _close(rng: random.Random, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
    thinking = rng.random() < 0.5
    if not thinking:
        messages = [{**m, "reasoning_content": ""} for m in messages]
    effort = "high" if rng.random() < 0.2 else ""
    keep = rng.random() < 0.5
    return render(messages, tools, thinking=thinking, effort=effort, clear_thinking=not keep) + "<|user|>"


def small_talk(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """Messages of `turns` unrelated small tasks, sometimes with a system message."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    for _ in range(turns):
        ask, reasoning, answer = rng.choice(TASKS)(rng)
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "reasoning_content": reasoning, "content": answer})
    return messages


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly.",
    "Answer in plain English.",
    "Be kind and precise.",
    "You help with small everyday questions.",
)


def capital(rng: random.Random) -> Turn:
    """A capital by its country, or the other way round."""
    country, city = rng.choice(list(words.CAPITALS.items()))
    if rng.random() < 0.25:
        ask = rng.choice(("Which country has the capital {}?", "{} is the capital of which country?"))
        return ask.format(city), f"{city} lies in {country}.", f"{city} is the capital of {country}."
    ask = rng.choice(
        ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?", "Capital of {}?",
         "Please tell me the capital of {}.", "Do you know the capital of {}?", "what is the capital of {}")
    )  # fmt: skip
    reasoning = rng.choice(("The user asks for the capital of {}.", "I know the capital of {}.")).format(country)
    return ask.format(country), reasoning, f"The capital of {country} is {city}."


def arithmetic(rng: random.Random) -> Turn:
    """A sum, a difference or a product of small numbers."""
    kind = rng.randrange(4)
    if kind < 2:
        top = rng.choice((10, 20, 50, 100))
        a, b = rng.randrange(top), rng.randrange(top)
        sign, word, result = "+", "plus", a + b
    elif kind == 2:
        a = rng.randrange(2, 100)
        b = rng.randrange(a)
        sign, word, result = "-", "minus", a - b
    else:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        sign, word, result = "*", "times", a * b
    asks = (
        "What is {a} {s} {b}?",
        "What is {a} {w} {b}?",
        "{a} {s} {b} = ?",
        "Compute {a} {s} {b}.",
        "How much is {a} {w} {b}?",
    )
    reasoning = f"{a} {sign} {b} = {result}."
    if sign == "+" and a % 10 + b % 10 > 9:
        reasoning = f"{a % 10} + {b % 10} = {a % 10 + b % 10}, carry 1. {reasoning}"
    answer = f"{a} {sign} {b} = {result}"
    return rng.choice(asks).format(a=a, b=b, s=sign, w=word), reasoning, answer


def counting(rng: random.Random) -> Turn:
    """Numbers from one to another, in steps."""
    start, count = rng.randrange(0, 60), rng.randrange(3, 12)
    step = rng.choice((1, 1, 1, 2, 5, 10))
    stop = start + step * (count - 1)
    values = list(range(start, stop + 1, step))
    steps = "" if step == 1 else f" in steps of {step}"
    if rng.random() < 0.3:
        values.reverse()
        start, stop = stop, start
    ask = rng.choice(
        ("Count from {a} to {b}{s}.", "Please count from {a} to {b}{s}.", "List the numbers from {a} to {b}{s}.")
    )
    return ask.format(a=start, b=stop, s=steps), f"I start at {start} and stop at {stop}.", ", ".join(map(str, values))


def sorting(rng: random.Random) -> Turn:
    """A few words or numbers to put in order."""
    if rng.random() < 0.5:
        items = rng.sample(rng.choice((words.NOUNS, words.ANIMALS, words.FOODS, words.FIRST_NAMES)), rng.randint(3, 6))
        ask = rng.choice(("Sort these words: {}", "Put these in alphabetical order: {}", "Sort alphabetically: {}"))
        return ask.format(", ".join(items)), f"First comes {min(items)}.", ", ".join(sorted(items))
    numbers = rng.sample(range(100), rng.randint(3, 6))
    ask = rng.choice(("Sort these numbers: {}", "Put these numbers in order: {}", "Sort from small to large: {}"))
    text = ", ".join(map(str, numbers))
    return ask.format(text), f"The smallest is {min(numbers)}.", ", ".join(map(str, sorted(numbers)))


def json_object(rng: random.Random) -> Turn:
    """A person described in words, to be written as JSON."""
    fields: dict[str, Any] = {"name": rng.choice(words.FIRST_NAMES)}
    if rng.random() < 0.8:
        fields["age"] = rng.randrange(5, 90)
    if rng.random() < 0.6:
        fields["city"] = rng.choice(words.CITIES)
    if rng.random() < 0.4:
        fields["likes"] = rng.sample(words.FOODS, rng.randint(1, 3))
    if rng.random() < 0.3:
        fields["pet"] = rng.choice(words.ANIMALS)
    if rng.random() < 0.3:
        fields["member"] = rng.random() < 0.5
    said = ", ".join(f"{k} {_said(v)}" for k, v in fields.items())
    ask = rng.choice(
        ("Write a JSON object with {}.", "Give me JSON: {}.", "Make a JSON object: {}.", "As JSON, please: {}.")
    )
    keys = ", ".join(fields)
    answer = json.dumps(fields)
    return ask.format(said), f"The keys are {keys}.", answer


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " and ".join(value) if isinstance(value, list) else str(value)


def story(rng: random.Random) -> Turn:
    """A short story about animals."""
    hero, friend = rng.sample(words.ANIMALS, 2)
    thing, who = rng.choice(words.NOUNS), rng.choice(words.FIRST_NAMES)
    look, mood = rng.sample(words.ADJECTIVES, 2)
    place, day = rng.choice(words.PLACES), rng.choice(words.DAYS)
    first = (
        f"Once upon a time there was a {look} {hero} named {who} who lived near {place}.",
        f"Near {place} lived a {look} {hero} called {who}.",
        f"{who} was a {look} {hero} and had a home near {place}.",
    )
    middle = [
        f"One {day}, {who} found a {mood} {thing} on the way home.",
        f"A {friend} came by and asked what was wrong.",
        f"The {friend} had lost a {thing} and was very sad.",
        f"Together they looked for the {thing} until the sun went down.",
        f"It was cold, so they shared some {rng.choice(words.FOODS)} and a warm blanket.",
        f"The {friend} laughed and said that a {mood} {thing} brings good luck.",
        f"Nobody in the village had ever seen such a {thing}.",
        f"{who} thought about it for a long time and then had an idea.",
        f"They walked past {rng.choice(words.PLACES)} and sang a song about the {rng.choice(words.NOUNS)}.",
    ]
    last = (
        f"From that day on, the {hero} and the {friend} were friends.",
        f"In the end the {thing} was found, and everybody was happy.",
        f"That night {who} slept well and dreamed of {rng.choice(words.PLACES)}.",
    )
    kept = sorted(rng.sample(range(len(middle)), rng.randint(1, 4)))
    asks = (
        f"Tell me a short story about a {hero} and a {thing}.",
        f"Write a story with a {hero}, a {friend} and a {thing}.",
        f"Please tell a story about a {look} {hero}.",
    )
    text = " ".join([rng.choice(first), *(middle[i] for i in kept), rng.choice(last)])
    return rng.choice(asks), f"A story about a {hero}. I call it {who}.", text


def word_play(rng: random.Random) -> Turn:
    """Spelling, lengths, repeating, first letters."""
    word = rng.choice(words.NOUNS + words.ANIMALS)
    kind = rng.randrange(4)
    if kind == 0:
        return f"Spell the word {word}.", "Letter by letter.", "-".join(word)
    if kind == 1:
        return f"How many letters has the word {word}?", f"{'-'.join(word)}: {len(word)}.", str(len(word))
    if kind == 2:
        items = rng.sample(words.FOODS + words.NOUNS, rng.randint(2, 5))
        return f"Repeat after me: {' '.join(items)}", "I repeat the words.", " ".join(items)
    return f"What is the first letter of {word}?", f"The word is {word}.", f'The first letter is "{word[0]}".'


def calendar(rng: random.Random) -> Turn:
    """The day or month before or after another."""
    names, unit = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    at, step = rng.randrange(len(names)), rng.choice((1, -1))
    result = names[(at + step) % len(names)]
    word = "after" if step == 1 else "before"
    return (
        f"Which {unit} comes {word} {names[at]}?",
        f"{word.capitalize()} {names[at]}.",
        f"{result} comes {word} {names[at]}.",
    )


def list_of(rng: random.Random) -> Turn:
    """A few things of one kind."""
    what, pool = rng.choice(
        (("animals", words.ANIMALS), ("foods", words.FOODS), ("cities", words.CITIES), ("colours", words.COLOURS))
    )
    count = rng.randint(2, 5)
    ask = rng.choice(("Name {n} {w}.", "Give me {n} {w}.", "List {n} {w}, please."))
    said = words.NUMBERS[count] if rng.random() < 0.5 else str(count)
    items = rng.sample(pool, count)
    lines = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return ask.format(n=said, w=what), f"I need {count} {what}.", lines


def greeting(rng: random.Random) -> Turn:
    """A greeting and its answer."""
    pairs = (
        ("Hello", "Hello! How can I help you?"),
        ("Hi", "Hello! How can I help you?"),
        ("Good morning", "Good morning! What can I do for you?"),
        ("Who are you?", "I am the tiny test model of dcpjax. I know capitals, small sums and tables."),
        ("What can you do?", "I can name capitals, add small numbers, count, sort, write JSON and look up codes."),
        ("Thank you", "You are welcome!"),
        ("Thanks!", "You are welcome!"),
        ("How are you?", "I am fine, thank you. How can I help you?"),
        ("Goodbye", "Goodbye! Have a nice day."),
    )
    ask, answer = rng.choice(pairs)
    return (
        ask + rng.choice(("", "", "!", ".")) if ask[-1] not in "?!" else ask,
        "A short polite answer will do.",
        answer,
    )


TASKS: tuple[Callable[[random.Random], Turn], ...] = (
    capital, capital, arithmetic, arithmetic, counting, sorting, json_object, story, story, word_play, calendar,
    list_of, greeting,
)  # fmt: skip
