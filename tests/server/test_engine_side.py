"""The engine's side of the two processes: nobody waits for another's form, and the client notices an engine that is silent."""

import array
import asyncio
import concurrent.futures
import socket
import threading

from dcpjax.host.request import SamplingParams
from dcpjax.server.engine_client import EngineClient
from dcpjax.server.engine_side import EngineSide
from dcpjax.server.rules import RulesWish
from dcpjax.server.ticket import TicketLimits
from dcpjax.server.wire import Add, Cut, Drop, Job

PLAIN = Job(array.array("i", [1, 2]), SamplingParams())


class Side(EngineSide):
    """Without an engine: what its loop is told is written down. Rules are made once `may_make` is set."""

    def __init__(self):
        self.log, self.may_make = [], threading.Event()
        self.rules = self.llm = self._loop = self
        self.engine_keys = []
        self._threads = {"forms": concurrent.futures.ThreadPoolExecutor(1)}
        self._lock, self._late = threading.Lock(), {}

    def make(self, wishes):
        assert self.may_make.wait(10)
        return [None for _ in wishes]

    @property
    def engine(self):
        return self

    def page_keys(self, prompt, salt):
        return []

    def call(self, command):
        command()

    def add(self, ticket, made, whole):
        self.log.append(("add", ticket, len(made)))

    def drop(self, ticket):
        self.log.append(("drop", ticket))

    def cut(self, ticket):
        self.log.append(("cut", ticket))


def test_nobody_waits_for_a_form_and_its_own_ticket_keeps_its_order():
    side, wish = Side(), RulesWish(None, None, [[1]])
    shaped = Job(PLAIN.prompt, PLAIN.params, rules=wish)
    side.hear(Add(1, [shaped, shaped], False))
    for message in (Add(2, [PLAIN], False), Drop(1), Cut(None), Drop(2)):
        side.hear(message)
    assert side.log == [("add", 2, 1), ("cut", None), ("drop", 2)]
    side.may_make.set()
    side._threads["forms"].shutdown()
    assert side.log[3:] == [("add", 1, 2), ("drop", 1), ("cut", 1)] and not side._late
    side.hear(Drop(1))
    assert side.log[-1] == ("drop", 1)


def test_an_engine_that_says_nothing_of_what_it_was_given_is_stalled():
    """Also if it was idle before, and says nothing at all."""

    class Process:
        def __init__(self, end):
            self.end = end

        def ended(self, seconds):
            return True

        def fate(self):
            return "gone"

    async def run():
        ours, theirs = socket.socketpair()
        client = EngineClient(Process(ours), TicketLimits(), lambda: None)
        loading = asyncio.ensure_future(client.loaded())
        await asyncio.sleep(0.1)
        assert not client.stalled(0.05)  # there is nothing to do
        ticket = client.submit([PLAIN])
        assert not client.stalled(0.05)
        await asyncio.sleep(0.1)
        assert client.stalled(0.05)
        ticket.close()
        loading.cancel()
        theirs.close()
        await client.close(1)

    asyncio.run(run())
