"""Streams of events: pings while nothing comes, which neither lose updates nor hide how a stream ends."""

import asyncio

import pytest

from dcpjax.server.errors import ApiError, ClientGone
from dcpjax.server.stream import EventStream, Frames, TextFrame, frame
from dcpjax.server.ticket import Prediction, Ticket, TicketLimits, Update

FRAMES = Frames(
    event=lambda event: f"{event['text']};".encode(),
    error=lambda error, number: f"error {error.status} after {number};".encode(),
    end=b"end",
    ping={"text": "ping"},
    ping_seconds=0.05,
)


def update(text: str, finish: str | None = None) -> Update:
    return Update(0, text, [1], [], 0, Prediction(), finish)


class Engine:
    """What a ticket needs of the engine's client."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.aborted = False

    def abort(self, ticket: Ticket) -> None:
        self.aborted = True

    def cut_ticket(self, ticket: Ticket) -> None: ...


class Texts:
    """An answer that is its updates' texts. fails: what is raised at its end."""

    def __init__(self, fails: Exception | None = None):
        self.fails = fails

    def begin(self):
        return [{"text": "begin"}]

    def take(self, update):
        return [{"text": text} for text in update.text]

    def end(self):
        if self.fails is not None:
            raise self.fails
        return [{"text": "over"}]


def stream(*items, frames: Frames = FRAMES, answer: Texts | None = None) -> tuple[list[str], bool]:
    """Bodies that are sent while `items` come, each after so many seconds: updates, exceptions, or "gone" when the client
    goes; and whether the jobs were aborted."""

    async def run():
        engine, bodies, gone = Engine(), [], asyncio.Event()
        ticket = Ticket(engine, 1, 1, "", TicketLimits())
        ticket.settle(None)

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body":
                bodies.append(message["body"].decode())

        async def bring():
            for seconds, item in items:
                await asyncio.sleep(seconds)
                if item == "gone":
                    gone.set()
                elif isinstance(item, Exception):
                    ticket.fail(item)
                else:
                    ticket.deliver(item)

        response = EventStream(ticket, answer or Texts(), frames)
        bringing = asyncio.ensure_future(bring())
        await asyncio.wait_for(response({"type": "http", "path": "/"}, receive, send), 20)
        await bringing
        return bodies, engine.aborted

    return asyncio.run(run())


def test_pings_come_between_updates():
    bodies, aborted = stream((0, update("a")), (0.13, update("b")), (0, update("c", "stop")))
    assert "".join(body for body in bodies if body != "ping;") == "begin;a;b;c;over;end" and not aborted
    assert bodies[:2] == ["begin;", "a;"] and 1 <= bodies.count("ping;") <= 2 and bodies[-1] == "over;end"


def test_no_pings_where_the_protocol_has_none():
    bodies, _ = stream((0.13, update("a", "stop")), frames=Frames(event=FRAMES.event, end=b"end"))
    assert bodies == ["begin;", "a;", "over;end"]


def test_what_comes_at_once_is_written_at_once():
    bodies, _ = stream((0, update("a")), (0, update("bc")), (0, update("d", "stop")))
    assert "".join(bodies) == "begin;a;b;c;d;over;end"
    assert any(len(body.split(";")) > 2 for body in bodies[1:-1])


def test_the_engine_dies():
    bodies, aborted = stream((0, update("a")), (0.06, ApiError(500, "dead")))
    assert [body for body in bodies if body != "ping;"] == [
        "begin;",
        "a;",
        "error 500 after 2;end",
    ] and aborted


def test_updates_before_a_death_are_sent():
    bodies, _ = stream((0, update("a")), (0, ApiError(500, "dead")))
    assert "".join(bodies) == "begin;a;error 500 after 2;end"


@pytest.mark.parametrize("error, status", [(ApiError(503, "ending"), 503), (ValueError("odd"), 500)])
def test_an_end_that_fails(error, status):
    bodies, _ = stream((0, update("a", "stop")), answer=Texts(error))
    assert "".join(bodies) == f"begin;a;error {status} after 2;end"


def test_a_client_that_goes():
    bodies, aborted = stream((0, update("a")), (0.06, "gone"))
    assert [body for body in bodies if body != "ping;"] == ["begin;", "a;"] and aborted


def test_a_reader_that_is_cancelled_loses_nothing():
    async def run():
        ticket = Ticket(Engine(), 1, 1, "", TicketLimits())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket.news(), 0.01)
        ticket.deliver(update("a"))
        found = await ticket.news(5)
        ticket.fail(ClientGone())
        with pytest.raises(ClientGone):
            await ticket.news()
        return found

    assert asyncio.run(run()) == [update("a")]


def test_what_nobody_reads_is_merged_into_few():
    """Else a slow reader's text would be copied with every token of it."""

    async def run():
        ticket, most = Ticket(Engine(), 1, 1, "", TicketLimits()), 0
        for number in range(1000):
            ticket.deliver(update(f"{number},"))
            most = max(most, len(ticket._updates[0]))
        ticket.deliver(update("end", "stop"))
        (merged,) = await ticket.news()
        assert merged.text == "".join(f"{number}," for number in range(1000)) + "end"
        assert len(merged.token_ids) == 1001 and merged.finish_reason == "stop" and ticket.over
        assert most <= 10

    asyncio.run(run())


def test_frames_that_differ_in_a_text():
    def event(text: str) -> dict:
        return {"id": "x", "delta": {"reasoning": text, "reasoning_content": text}, "more": [None, 1]}

    ready = TextFrame(event)
    for text in ("", "plain", 'a "quoted"\nline', "naïve 🙂", "\ufdd0", "\\ufdd0"):
        assert ready.of(text) == frame(event(text))
