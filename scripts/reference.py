"""Writes the API reference, from docstrings, as HTML: `make docs`, or `python scripts/reference.py FOLDER`.

Docstrings say `name: what it is` of parameters and fields in running text. Here each such sentence becomes an item of a
list, and a comment behind a field what is said of it.
"""

import pathlib
import re
import sys
from collections.abc import Collection, Iterator

import pdoc.doc
import pdoc.render

ROOT = pathlib.Path(__file__).resolve().parent.parent
# How the tiny model was trained is a program, and nothing that others call.
LEFT_OUT = ("models/train",)
# Where a list of names ends.
OTHER = re.compile(r"(?<=[.;] )(?=(?:Raises|Returns|Source:|Where|With) )")


def modules() -> list[str]:
    """Every module with something to say, but for the package itself, whose names are those of `dcpjax.llm` and others."""
    paths = (path.relative_to(ROOT) for top in ("dcpjax", "models") for path in sorted((ROOT / top).rglob("*.py")))
    return [
        ".".join(path.with_suffix("").parts)
        for path in paths
        if not path.name.startswith("__") and not path.as_posix().startswith(LEFT_OUT)
    ]


def listed(text: str, names: Collection[str]) -> str:
    """Markdown of a docstring in which sentences that begin with `names` are items of a list.

    >>> listed("Sizes. rows, columns: of a tile. tokens `[T]` int32. Raises `KeyError`.", ("rows", "columns", "tokens"))
    'Sizes.\\n\\n* **rows**, **columns**: of a tile.\\n* **tokens** `[T]` int32.\\n\\nRaises `KeyError`.'
    """
    text = text.replace("::\n\n", ":\n\n")  # before code, for readers of other formats
    return "\n\n".join(_listed(part, names) for part in re.split(r"\n\n+", text))


def _listed(paragraph: str, names: Collection[str]) -> str:
    if paragraph.startswith((" ", "* ", "1. ", "- ", ">>>")) or not names:
        return paragraph
    name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    begin = re.compile(rf"(?:\A|(?<=[.;:)] )|(?<=\n))`?((?:{name})(?:, (?:{name}))*)`?(?=:? )(?=:| (?:`\[|and `\[))")
    line = re.sub(r"\n *", " ", paragraph)
    found = list(begin.finditer(line))
    if not found:
        return paragraph
    parts = [line[: found[0].start()].strip()]
    for here, after in zip(found, [*found[1:], None], strict=True):
        rest = line[here.end() : None if after is None else after.start()].strip()
        said, *more = OTHER.split(rest)
        bold = ", ".join(f"**{word}**" for word in here[1].split(", "))
        item = f"* {bold}{'' if said.startswith(':') else ' '}{said.strip()}"
        parts.append(("" if parts[-1].lstrip().startswith("* ") else "\n") + item)
        parts += ["\n" + " ".join(more)] if more else []
    return "\n".join(parts).strip().replace("\n\n\n", "\n\n")


def comments(cls: pdoc.doc.Class) -> Iterator[tuple[str, str]]:
    """Fields, and what is said behind them."""
    for line in cls.source.splitlines():
        field = re.match(r"    (\w+): [^#]*  # (.*)", line)
        if field is not None:
            yield field[1], field[2]


def prepare(namespace: pdoc.doc.Namespace) -> None:
    """Replaces the docstrings of it and its members by what is to be shown."""
    vars(namespace)["docstring"] = listed(namespace.docstring, ())
    for member in namespace.own_members:
        names: set[str] = set()
        if isinstance(member, pdoc.doc.Class):
            names = {item.name for item in member.own_members if isinstance(item, pdoc.doc.Variable)}
            for field, words in comments(member):
                if field in member.members:
                    vars(member.members[field])["docstring"] = words
            made = member.members.get("__init__")
            names |= set(made.signature.parameters) if isinstance(made, pdoc.doc.Function) else set()
            prepare(member)
        elif isinstance(member, pdoc.doc.Function):
            names = set(member.signature.parameters)
        vars(member)["docstring"] = listed(member.docstring, names - {"self", "cls"})


def main() -> int:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    pdoc.render.configure(template_directory=ROOT / "scripts" / "reference", logo="", footer_text="")
    found = {name: pdoc.doc.Module.from_name(name) for name in modules()}
    for module in found.values():
        prepare(module)
    for name, module in found.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, found), encoding="utf-8")
    (folder / "index.html").write_text(pdoc.render.html_index(found), encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(found), encoding="utf-8")
    print(folder / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
