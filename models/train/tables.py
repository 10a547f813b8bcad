"""Tables of names and codes with questions about them: what makes attention over a long context checkable.

An answer is right only if exactly one line far back was found, so the share of right answers at a given length says
whether selection, cache and merge work on a whole. Names, formats and phrasings vary so that only looking helps.
"""

import dataclasses
import random

from models.train import words

_INTROS = (
    "Here is a list of codes:",
    "Table of codes.",
    "The register holds these entries:",
    "Please read this table:",
    "Each line gives a name and its code.",
    "These are today's codes:",
    "Keep this list in mind:",
    "I will ask you about these lines.",
)
_FORMATS = (
    "{n}: {c}",
    "{n}: {c}",
    "{n} = {c}",
    "{n} - {c}",
    "| {n} | {c} |",
    "{n} {c}",
    "- {n}: {c}",
    "{n} has code {c}",
)
# Question → its answer, so that there is one right answer.
QUESTIONS = (
    ("Which code belongs to {n}?", "{c}"),
    ("What is the code of {n}?", "The code of {n} is {c}."),
    ("Give me the code for {n}.", "{c}"),
    ("Please look up {n}.", "{n}: {c}"),
    ("Find {n} in the table and tell me its code.", "The code is {c}."),
    ("{n}?", "{c}"),
    ("And {n}?", "{c}"),
    ("I need the code of {n}.", "It is {c}."),
)
_REASONS = ("I look for {n} in the table.", "The line of {n} says {c}.", "Look up {n}.")


@dataclasses.dataclass(frozen=True)
class Table:
    """Text of a table and its entries."""

    text: str
    entries: tuple[tuple[str, str], ...]


def invented(rng: random.Random) -> str:
    """A name that is in no list."""
    parts = [rng.choice(words.ONSETS) + rng.choice(words.VOWELS) + rng.choice(words.CODAS) for _ in range(2)]
    return "".join(parts).capitalize()


def name(rng: random.Random, kind: int) -> str:
    """A name of one of seven kinds, for an entry of a table."""
    if kind == 0:
        return rng.choice(words.FIRST_NAMES)
    if kind == 1:
        return invented(rng)
    if kind == 2:
        return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    if kind == 3:
        return f"{rng.choice(words.FIRST_NAMES)} {invented(rng)}"
    if kind == 4:
        return rng.choice(words.NOUNS)
    if kind == 5:
        return rng.choice(words.CITIES)
    return f"{rng.choice(words.COLOURS)} {rng.choice(words.ANIMALS)}"


_KINDS = (0, 1, 2, 3, 4, 5, 6)


def code(rng: random.Random, digits: int) -> str:
    """A number of `digits` digits, as text."""
    return "".join(rng.choice("0123456789") for _ in range(digits))


def table(rng: random.Random, lines: int, digits: int | None = None) -> Table:
    """A table of `lines` entries with different names; `digits` fixes the length of the codes."""
    digits = digits or rng.choice((4, 4, 4, 4, 3, 5))
    few = [k for k in _KINDS if lines < 60 or k not in (0, 4, 5)]
    kinds = rng.sample(few, 1) if rng.random() < 0.5 else rng.sample(_KINDS, 3) + [1, 2]
    entries: dict[str, str] = {}
    while len(entries) < lines:
        entries[name(rng, rng.choice(kinds))] = code(rng, digits)
    form = rng.choice(_FORMATS)
    body = "\n".join(form.format(n=n, c=c) for n, c in entries.items())
    return Table(f"{rng.choice(_INTROS)}\n{body}", tuple(entries.items()))


def question(rng: random.Random, found: Table) -> tuple[str, str, str]:
    """Question, reasoning and answer about one entry."""
    n, c = rng.choice(found.entries)
    ask, answer = rng.choice(QUESTIONS)
    return ask.format(n=n), rng.choice(_REASONS).format(n=n, c=c), answer.format(n=n, c=c)


def chat(rng: random.Random, lines: int, questions: int) -> list[dict[str, str]]:
    """Messages: a table, then questions in turns of their own. The table is a system message now and then."""
    found = table(rng, lines)
    messages: list[dict[str, str]] = []
    for i in range(questions):
        ask, reasoning, answer = question(rng, found)
        if i == 0:
            style = rng.random()
            if style < 0.2:
                messages.append({"role": "system", "content": found.text})
            elif style < 0.3:
                ask = f"{ask}\n\n{found.text}"
            else:
                ask = f"{found.text}\n\n{ask}"
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "reasoning_content": reasoning, "content": answer})
    return messages
