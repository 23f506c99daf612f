"""How a rollout ends, and whose fault a failure is.

1. Every rollout that was started ends with exactly one `Outcome`. `FAILED` carries exactly one `Cause`, `TRUNCATED`
   exactly one `Limit`; the other outcomes carry neither.
2. `blame` is decided here and nowhere else. An infrastructure cause enters neither loss nor baseline and is retried; the
   agent's own failures are data and are never a cause at all: running out of time, calls, tokens, context or memory is
   `TRUNCATED`, and a wrong answer is `COMPLETED` with a low reward.
3. Whoever knows the cause raises `RolloutError(cause, message)`. `boundary` turns any other exception that crosses a
   border into the cause of that border, in one place; nobody else classifies.
4. The message of a `RolloutError` is written for the person who reads it in the Temporal UI, and never holds a credential.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Limit(StrEnum):
    """What cut a truncated rollout short."""

    WALL_CLOCK = "wall_clock"
    CALLS = "calls"
    TOKENS = "tokens"
    CONTEXT = "context"
    MEMORY = "memory"


class Blame(StrEnum):
    """Who is at fault: decides whether a failure is retried and whether it may teach."""

    INFRASTRUCTURE = "infrastructure"
    AGENT = "agent"
    TASK = "task"


class Cause(StrEnum):
    """Why a rollout failed."""

    SANDBOX_UNSCHEDULABLE = "sandbox_unschedulable"
    SANDBOX_IMAGE = "sandbox_image"
    SANDBOX_EVICTED = "sandbox_evicted"
    SANDBOX_LOST = "sandbox_lost"
    SANDBOX_OOM = "sandbox_oom"
    HARNESS_INSTALL = "harness_install"
    HARNESS_CRASH = "harness_crash"
    NO_MODEL_CALLS = "no_model_calls"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    PROXY_UNAVAILABLE = "proxy_unavailable"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    VERIFIER_ERROR = "verifier_error"
    VERIFIER_TIMEOUT = "verifier_timeout"
    INTERNAL = "internal"


_TASK_CAUSES: Final = frozenset({Cause.SANDBOX_IMAGE, Cause.VERIFIER_ERROR, Cause.VERIFIER_TIMEOUT})


def blame(cause: Cause) -> Blame:
    """Whose fault `cause` is. Task causes are not retried: the same task fails the same way again."""
    return Blame.TASK if cause in _TASK_CAUSES else Blame.INFRASTRUCTURE


class RolloutError(Exception):
    """A rollout cannot go on, for the stated cause."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def retryable(self) -> bool:
        """Whether another attempt of the same rollout may succeed."""
        return blame(self.cause) is Blame.INFRASTRUCTURE


@contextmanager
def boundary(cause: Cause, doing: str) -> Iterator[None]:
    """Turn an exception raised inside into `RolloutError(cause)`; a `RolloutError` passes unchanged.

    Args:
        cause: what a failure at this border means.
        doing: what was being done, for the message ("create the sandbox").
    """
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise RolloutError(cause, f"could not {doing}: {type(error).__name__}: {error}") from error
