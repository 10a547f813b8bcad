"""Pings while nothing comes: they neither lose updates nor hide how a stream ends."""

import asyncio

import pytest

from dcpjax.server.errors import ClientGone
from dcpjax.server.stream import with_pings


class Updates:
    """Brings `items`, each after so many seconds; an exception is raised. `closed` once nobody listens."""

    def __init__(self, *items):
        self.items, self.closed = items, False

    async def __aiter__(self):
        try:
            for seconds, item in self.items:
                await asyncio.sleep(seconds)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def collect(updates: Updates) -> list:
    return [found async for found in with_pings(updates, 0.05)]


def test_pings_come_between_updates():
    updates = Updates((0, [1]), (0.13, [2]), (0, [3]))
    found = asyncio.run(collect(updates))
    assert [each for each in found if each is not None] == [[1], [2], [3]]
    assert found[0] == [1] and 1 <= found.count(None) <= 2 and found[-1] == [3] and updates.closed


def test_errors_pass():
    updates = Updates((0, [1]), (0.06, ClientGone()))
    with pytest.raises(ClientGone):
        asyncio.run(collect(updates))
    assert updates.closed


def test_who_stops_listening_stops_waiting():
    async def run() -> Updates:
        updates = Updates((0, [1]), (3600, [2]))
        pinged = with_pings(updates, 0.05)
        assert await anext(pinged) == [1] and await anext(pinged) is None
        await pinged.aclose()
        return updates

    assert asyncio.run(run()).closed
