"""Real text for training, from whatever is at hand on this machine, and a note of what was found.

Python's standard library is in every installation. Manual pages, Python's documentation and Debian policy are read
where a distribution has put them, the plain-text plays and poems where the source archive of the package
`shakespeare` was unpacked. Nothing is downloaded and nothing of it is kept but weights.
"""

import dataclasses
import gzip
import pathlib
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator

# Share of each source among the real-text tokens (the chats are drawn apart from it).
SHARES = {"python": 0.45, "prose": 0.37, "manuals": 0.18}
_LIMIT = 12_000_000


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents of one kind; the held-out ones are never trained on."""

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    note: str


def sources(extra: Iterable[pathlib.Path] = (), limit: int = _LIMIT) -> list[Source]:
    """What is at hand, at most `limit` characters of each kind. `extra` are roots like `/` to look below as well."""
    roots = [pathlib.Path("/"), *extra]
    found = {
        "python": _python(),
        "prose": (t for root in roots for t in _plain(root, "*data/texts/*.txt", root != roots[0])),
        "manuals": (t for root in roots for t in _manuals(root)),
    }
    return [s for name, texts in found.items() if (s := _source(name, texts, limit)).train]


def _source(name: str, texts: Iterable[str], limit: int) -> Source:
    kept, size = [], 0
    for text in texts:
        if len(text) < 400:
            continue
        kept.append(text[:200_000])
        size += len(kept[-1])
        if size > limit:
            break
    random.Random(name).shuffle(kept)
    held = max(1, len(kept) // 50) if len(kept) > 1 else 0
    note = f"{name}: {len(kept)} documents, {size / 1e6:.1f} M characters, {held} held out"
    return Source(name, tuple(kept[held:]), tuple(kept[:held]), note)


def _python() -> Iterator[str]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        # tests are half of it and repeat themselves; encodings are tables of numbers
        if not {"site-packages", "test", "tests", "encodings", "idlelib", "lib2to3"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def _plain(root: pathlib.Path, pattern: str, deep: bool) -> Iterator[str]:
    for path in sorted(root.rglob(pattern)) if deep else ():
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
        # long works are cut so that some of each can be held out
        yield from (text[i : i + 60_000] for i in range(0, len(text), 60_000))


def _manuals(root: pathlib.Path) -> Iterator[str]:
    share = root / "usr" / "share"
    docs = sorted(share.glob("doc/python3*/html/**/*.txt")) + sorted(share.glob("doc/debian-policy/*.txt.gz"))
    pages = sorted(share.glob("man/man[158]/*.gz"))
    random.Random(0).shuffle(pages)
    for path in docs + pages:
        text = _read(path)
        if path.parts[-2].startswith("man"):
            text = _unroff(text)
        yield text


def _read(path: pathlib.Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except OSError:
            return ""
    return data.decode("utf-8", errors="ignore")


def _unroff(text: str) -> str:
    """Plain words of a manual page: macros and font changes go, their text stays."""
    lines = []
    for line in text.splitlines():
        if re.match(r"[.'](\\\"|de|ds|if|ie|el|nr|tr|so|hy|ad|nh|\.|\s*$)", line):
            continue
        heading = re.match(r"\.S[HS]\s+(.*)", line)
        line = "\n" + heading[1].strip('"') if heading else re.sub(r"^[.'][A-Za-z]{1,2}\s*", "", line)
        line = re.sub(r"\\f(\(..|\[[^]]*\]|.)|\\s[+-]?\d|\\[&|^]", "", line)
        lines.append(line.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\").strip('"'))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
