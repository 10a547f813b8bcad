"""`POST /start_profile`, `POST /stop_profile`: what the engine process's threads and the devices do meanwhile, as a trace on
the disk.

The trace is that of `jax.profiler`: TensorBoard and XProf open the folder.
"""

import pathlib
import tempfile
import threading

from dcpjax.server.errors import ApiError


class Profiler:
    """One trace at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._running: str | None = None  # the folder of the trace that is being taken
        self._turn = threading.Lock()

    def start(self, folder: str | None) -> str:
        """Begins a trace; the folder it will lie in. folder: where all of them go, each below its time; None: a new temporary
        folder each. Raises `ApiError`: 409 if one is being taken, 500 if it cannot be."""
        with self._turn:
            if self._running is not None:
                raise ApiError(409, f"A profile is being taken into {self._running}; POST /stop_profile ends it.")
            self._running = _begin(folder)
            return self._running

    def stop(self) -> str:
        """Ends the trace and writes it; its folder. Raises `ApiError` (400) if none is being taken."""
        with self._turn:
            if self._running is None:
                raise ApiError(400, "No profile is being taken; POST /start_profile begins one.")
            import jax

            folder, self._running = self._running, None
            jax.profiler.stop_trace()
            return folder


def _begin(folder: str | None) -> str:
    import jax  # the server itself works without it

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python would be an event: the trace would be of the tracing
    try:
        made = tempfile.mkdtemp(prefix="dcpjax-profile-") if folder is None else folder
        pathlib.Path(made).mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(made, profiler_options=options)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ApiError(500, f"The profile cannot be taken: {str(reason)[:200]}; see --profile-dir.") from None
    return made
