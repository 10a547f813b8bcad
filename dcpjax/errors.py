"""Errors a user can act on: what was given, what is allowed, what to change."""


class DcpjaxError(Exception):
    """Base of every error raised on purpose by dcpjax and models."""


class ConfigError(DcpjaxError, ValueError):
    """A configuration that cannot run; raised before weights are loaded."""


class MemoryLimitError(ConfigError):
    """What was asked for is supported, but does not fit the memory there is."""


class CheckpointError(DcpjaxError, ValueError):
    """A checkpoint that cannot be read; the message names the file and the tensor."""


class RequestError(DcpjaxError, ValueError):
    """A request that cannot be served; the message names the field."""


class NeverFitsError(RequestError):
    """More cache than there is: the request is fine, this engine is too small for it."""


class CacheFullError(DcpjaxError, RuntimeError):
    """No free pages are left for work that cannot wait."""
