"""Every error that moe_lab raises on purpose.

Each message is one sentence that holds the numbers or names that conflict and says what to change. The command line
prints the message alone and ends with ``exit_status``; a traceback means a bug in moe_lab, not in the input.
"""

from __future__ import annotations


class MoeLabError(Exception):
    """Base of all errors below; ``exit_status`` is what the command line ends with."""

    exit_status = 1


class ConfigError(MoeLabError):
    """A configuration value, parameter or combination of them that cannot be used. Raised before anything starts."""

    exit_status = 2


class DataError(MoeLabError):
    """Text, token or checkpoint files that are missing, damaged or not what they claim to be."""

    exit_status = 2


class RoutingError(MoeLabError):
    """Routing tensors that contradict themselves or the buffers they are written to (indices, counts, capacity)."""

    exit_status = 2


class LaunchError(MoeLabError):
    """Ranks that could not be started, or an agent that went away."""


class RankError(LaunchError):
    """A rank raised or died. The message names the rank, the reason, and the tail of its log.

    ``rank``: the rank that failed first; ``exit_code``: its exit code, negative for a signal; ``log``: path of its log.
    """

    def __init__(
        self, message: str, *, rank: int, exit_code: int | None = None, log: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.log = log


class RankTimeout(LaunchError):
    """The call's deadline passed. ``silent``: the ranks that had not reported for longest."""

    exit_status = 124

    def __init__(self, message: str, *, silent: list[int]) -> None:
        super().__init__(message)
        self.silent = silent
