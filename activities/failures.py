"""How a failure crosses Temporal: `RolloutError` becomes an `ApplicationError` of the cause's name, and is read back from it."""

from collections.abc import Iterator
from contextlib import contextmanager

from temporalio.exceptions import ApplicationError

from contracts.failures import Cause, RolloutError, boundary
from infra.storage import StorageError


@contextmanager
def failing_as(cause: Cause, doing: str) -> Iterator[None]:
    """`contracts.failures.boundary`, for an activity: what leaves it is an ApplicationError whose type is the cause.

    It is not retried as an activity: the workflow decides whether the rollout gets another attempt.
    """
    try:
        with boundary(cause, doing):
            yield
    except RolloutError as error:
        raise ApplicationError(str(error)[:4000], type=error.cause.value, non_retryable=True) from error


@contextmanager
def outlasting() -> Iterator[None]:
    """For work that nothing is lost by asking for again: storage or the proxy being away is retried as an activity, until they are back."""
    try:
        yield
    except StorageError as error:
        raise ApplicationError(str(error), type=Cause.STORAGE_UNAVAILABLE) from error
    except RolloutError as error:
        away = error.cause is Cause.PROXY_UNAVAILABLE
        raise ApplicationError(str(error), type=error.cause.value, non_retryable=not away) from error
