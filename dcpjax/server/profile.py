"""`POST /start_profile`, `POST /stop_profile`: what the host's threads and the devices do meanwhile, as a trace on the disk.

The trace is that of `jax.profiler`: TensorBoard and XProf open the folder.
"""

import asyncio
import pathlib
import tempfile

from dcpjax.server.errors import ApiError


class Profiler:
    """One trace at a time. folder: where all of them go, each below its time; None: a new temporary folder each."""

    def __init__(self, folder: str | None):
        self._folder = folder
        self._running: str | None = None  # the folder of the trace that is being taken
        self._turn = asyncio.Lock()

    async def start(self) -> str:
        """Begins a trace; the folder it will lie in. Raises `ApiError`: 409 if one is being taken, 500 if it cannot be."""
        async with self._turn:
            if self._running is not None:
                raise ApiError(409, f"A profile is being taken into {self._running}; POST /stop_profile ends it.")
            self._running = await asyncio.to_thread(self._begin)
            return self._running

    async def stop(self) -> str:
        """Ends the trace and writes it; its folder. Raises `ApiError` (400) if none is being taken."""
        async with self._turn:
            if self._running is None:
                raise ApiError(400, "No profile is being taken; POST /start_profile begins one.")
            folder, self._running = self._running, None
            await asyncio.to_thread(_end)
            return folder

    def _begin(self) -> str:
        import jax  # the server itself works without it

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would be an event: the trace would be of the tracing
        try:
            folder = tempfile.mkdtemp(prefix="dcpjax-profile-") if self._folder is None else self._folder
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(folder, profiler_options=options)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ApiError(500, f"The profile cannot be taken: {str(reason)[:200]}; see --profile-dir.") from None
        return folder


def _end() -> None:
    import jax

    jax.profiler.stop_trace()
