"""A client's connection, which leaves nothing behind once it is lost."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """uvicorn's. That one keeps the timer of an idle connection that its client resets, and by it the connection and its
    last request with its body, for as long as an idle connection may stay open."""

    def connection_lost(self, exc: Exception | None) -> None:
        """exc: why, None if it was closed in an orderly way."""
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
