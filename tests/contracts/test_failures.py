"""Outcomes, causes and blame: the closed enums that decide what may teach."""

import pytest

from contracts.failures import Blame, Cause, RolloutError, blame, boundary


def test_every_cause_has_a_blame() -> None:
    assert {blame(cause) for cause in Cause} <= set(Blame)


@pytest.mark.parametrize("cause", [Cause.SANDBOX_IMAGE, Cause.VERIFIER_ERROR, Cause.VERIFIER_TIMEOUT])
def test_a_broken_task_is_not_retried(cause: Cause) -> None:
    assert not RolloutError(cause, "broken").retryable


@pytest.mark.parametrize("cause", [Cause.ENGINE_UNAVAILABLE, Cause.SANDBOX_LOST, Cause.HARNESS_CRASH, Cause.INTERNAL])
def test_an_infrastructure_failure_is_retried(cause: Cause) -> None:
    assert RolloutError(cause, "away").retryable


def test_boundary_gives_its_cause_to_an_unclassified_error() -> None:
    with (
        pytest.raises(RolloutError, match=r"could not create the sandbox: OSError: disk full") as caught,
        boundary(Cause.SANDBOX_UNSCHEDULABLE, "create the sandbox"),
    ):
        raise OSError("disk full")
    assert caught.value.cause is Cause.SANDBOX_UNSCHEDULABLE


def test_boundary_leaves_a_classified_error_alone() -> None:
    with pytest.raises(RolloutError) as caught, boundary(Cause.INTERNAL, "score"):
        raise RolloutError(Cause.VERIFIER_ERROR, "no reward")
    assert caught.value.cause is Cause.VERIFIER_ERROR
