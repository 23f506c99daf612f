"""Pause, resume, stop and the size of the window: the messages that a run and an evaluation both take.

What fails for good pauses too, and is tried again on resume: nothing that a person can mend ends a run.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.failures import Blame, Outcome, blame
    from contracts.rollouts import RolloutResult
    from contracts.runs import ConcurrencyRequest, PauseRequest, StopRequest


Result = TypeVar("Result")


class StoppedError(Exception):
    """A person has stopped the run while a step that it needs was failing."""


class Control:
    """What a person has asked for, and what a streak of failures has asked for in his place."""

    def __init__(self, concurrency: int, pause_after_failures: int, *, paused: bool = False, reason: str = "") -> None:
        self.concurrency = concurrency
        self.paused = paused
        self.pause_reason = reason
        self.paused_by_failures = False
        self.stopping = False
        self.stop_now = False
        self._pause_after = pause_after_failures
        self._streak = 0

    def note(self, result: RolloutResult) -> None:
        """Count failures of the infrastructure in a row: an outage must not burn through a batch."""
        cause = result.ending.cause
        if result.ending.outcome is not Outcome.FAILED or cause is None or blame(cause) is not Blame.INFRASTRUCTURE:
            self._streak = 0
            return
        self._streak += 1
        if self._streak >= self._pause_after:
            self._give_up(f"{self._streak} rollouts in a row failed, the last one by {cause.value}: {result.ending.message[:200]}")

    def _give_up(self, reason: str) -> None:
        self.paused_by_failures = True
        self.pause(reason)

    def pause(self, reason: str) -> None:
        self.paused, self.pause_reason = True, reason

    def resume(self) -> None:
        self.paused, self.pause_reason, self.paused_by_failures, self._streak = False, "", False, 0

    def stop(self, now: bool) -> None:
        self.stopping = True
        self.stop_now = self.stop_now or now

    async def insist(self, what: str, step: Callable[[], Coroutine[Any, Any, Result]], changed: Callable[[], None]) -> Result:
        """Carry out a step without which the run cannot go on.

        Where its activity fails for good (what is merely away it outlasts itself), the run pauses and says why: a person mends it and
        resumes, and the step is asked for again; a failed run could not go on. Raises StoppedError if the answer is `stop now`.
        """
        while True:
            try:
                return await step()
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                self._give_up(f"{what} failed: {error.__cause__ or error}")
            changed()
            await workflow.wait_condition(lambda: not self.paused or self.stop_now)
            if self.stop_now:
                raise StoppedError


class Controlled:
    """The handlers. A workflow that inherits them sets `control` in its `__init__` (from its input: `@workflow.init`)."""

    control: Control

    async def pass_on(self, signal: str, *requests: object) -> None:
        """Tell a child what a person has told this workflow."""

    def show(self) -> None:
        """Bring the workflow's details in the UI up to date."""

    @workflow.signal(description="No new rollout starts; those in flight go on.")
    async def pause(self, request: PauseRequest) -> None:
        self.control.pause(request.reason)
        self.show()
        await self.pass_on("pause", request)

    @workflow.signal(description="Go on after a pause.")
    async def resume(self) -> None:
        self.control.resume()
        self.show()
        await self.pass_on("resume")

    @workflow.signal(description="Finish the iteration in hand, evaluate and stop; with now: cancel the rollouts in flight.")
    async def stop(self, request: StopRequest) -> None:
        self.control.stop(request.now)
        self.show()
        if request.now:
            await self.pass_on("stop", request)

    @workflow.update(description="How many rollouts run at once.")
    async def set_concurrency(self, request: ConcurrencyRequest) -> int:
        self.control.concurrency = request.rollouts
        await self.pass_on("follow_concurrency", request)
        return request.rollouts

    @workflow.signal(description="What a run passes on to its evaluation: how many rollouts run at once.")
    def follow_concurrency(self, request: ConcurrencyRequest) -> None:
        self.control.concurrency = request.rollouts
