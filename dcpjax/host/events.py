"""What happens to the prefix cache, told to whoever routes requests by it.

Applied in order to an empty set of keys, the events give at each moment the keys that a lookup finds.
"""

import dataclasses

from dcpjax.host.keys import decode


@dataclasses.dataclass(frozen=True)
class Stored:
    """Pages that can be hit from now on, one after the other in one sequence.

    keys: theirs. parent: key of the page before them; None: they begin a sequence. contents: tokens of each as bytes.
    page_tokens: tokens of a page. adapter, salt: what a request must have to hit them. group: cache group.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    contents: tuple[bytes, ...]
    page_tokens: int
    adapter: str | None = None
    salt: str | None = None
    group: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of all pages, in order."""
        return decode(b"".join(self.contents))


@dataclasses.dataclass(frozen=True)
class Removed:
    """Pages that cannot be hit any more: the last copy of each was taken for something else."""

    keys: tuple[bytes, ...]
    group: int = 0


@dataclasses.dataclass(frozen=True)
class Cleared:
    """Nothing can be hit: the cache was reset."""


Event = Stored | Removed | Cleared


class EventLog:
    """Events in order, until somebody takes them. Whoever makes one must take from it, or it grows for ever."""

    def __init__(self):
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """Tells of one more thing that happened."""
        self._events.append(event)

    def drain(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
