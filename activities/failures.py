"""How a failure crosses Temporal: `RolloutError` becomes an `ApplicationError` of the cause's name, and is read back from it."""

from collections.abc import Iterator
from contextlib import contextmanager

from temporalio.exceptions import ApplicationError

from contracts.failures import Cause, RolloutError, boundary


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
