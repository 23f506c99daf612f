"""`Rollout`: one try at one task by one harness, over as many attempts as infrastructure failures make necessary.

Invariants:
1. It returns exactly one ending, whatever happened; it fails only by a bug.
2. Every attempt that began is cleaned up before the next begins and before the workflow ends, also when it is cancelled, and not
   before what it was doing has ended: a sandbox that is still being created would outlive its removal.
3. An ending is on file: the last attempt's trajectory is recorded whatever its outcome.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.failures import Blame, Cause, Limit, Outcome, blame
    from contracts.rollouts import (
        Attempt,
        Ending,
        HarnessEnd,
        Provisioned,
        RecordTrajectory,
        RolloutResult,
        RolloutSpec,
        Score,
        TrajectoryRef,
    )
    from contracts.runs import SearchAttribute, Workflow
    from workflows import calls

Result = TypeVar("Result")
OUTCOME = SearchAttributeKey.for_keyword(SearchAttribute.OUTCOME)
REWARD = SearchAttributeKey.for_float(SearchAttribute.REWARD)


@workflow.defn(name=Workflow.ROLLOUT)
class Rollout:
    """See the module."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._provisioned: Provisioned | None = None
        self._harness: HarnessEnd | None = None
        self._score: Score | None = None

    @workflow.run
    async def run(self, spec: RolloutSpec) -> RolloutResult:
        number = 0
        while True:
            number += 1
            attempt = Attempt(spec=spec, number=number)
            self._provisioned = self._harness = self._score = None
            workflow.set_current_details(f"attempt {number}: {spec.harness.name} on {spec.task.name}")
            ending = await self._ending(attempt)
            last = not _worth_another(ending) or number >= spec.max_attempts
            trajectory = None
            if last:
                ending, trajectory = await self._record(attempt, ending)
            await self._timed("clean_up", _to_the_end(calls.clean_up(attempt)))
            if last:
                break
        reward = self._score.reward if self._score else None
        self._show(ending, reward, number)
        return RolloutResult(
            rollout=spec.rollout,
            task=spec.task.name,
            ending=ending,
            attempts=number,
            reward=reward,
            trajectory=trajectory,
            phases={phase: round(seconds, 4) for phase, seconds in self._phases.items()},
        )

    async def _ending(self, attempt: Attempt) -> Ending:
        """Carry the attempt out. Never raises."""
        try:
            _check_cancelled()
            self._provisioned = await self._timed("provision", calls.provision(attempt))
            _check_cancelled()
            self._harness = await self._timed("harness", calls.run_harness(attempt))
            _check_cancelled()
            self._score = await self._timed("score", calls.score(attempt))
        except (ActivityError, asyncio.CancelledError) as error:
            if is_cancelled_exception(error):
                return Ending(outcome=Outcome.CANCELLED, message="cancelled")
            return _failure(error)
        limit: Limit | None = self._harness.limit
        return Ending(outcome=Outcome.TRUNCATED if limit else Outcome.COMPLETED, limit=limit)

    async def _record(self, attempt: Attempt, ending: Ending) -> tuple[Ending, TrajectoryRef | None]:
        request = RecordTrajectory(
            attempt=attempt,
            session_id=self._provisioned.session_id if self._provisioned else "",
            ending=ending,
            harness_version=self._provisioned.harness_version if self._provisioned else "",
            harness=self._harness,
            score=self._score,
            phases=self._phases,
        )
        try:
            return ending, await self._timed("record", _to_the_end(calls.record_trajectory(request)))
        except ActivityError as error:
            return (_failure(error) if ending.outcome is not Outcome.FAILED else ending), None

    async def _timed(self, phase: str, work: Coroutine[Any, Any, Result]) -> Result:
        started = workflow.now()
        try:
            return await work
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + (workflow.now() - started).total_seconds()

    def _show(self, ending: Ending, reward: float | None, attempts: int) -> None:
        """In the UI's list and on the workflow's page."""
        why = ending.cause or ending.limit
        text = (
            f"{ending.outcome.value}{f' ({why})' if why else ''}, reward {reward if reward is not None else 'none'}, {attempts} attempt(s)"
        )
        workflow.set_current_details(f"{text}\n\n{ending.message}")
        updates = [OUTCOME.value_set(ending.outcome.value)]
        workflow.upsert_search_attributes([*updates, *([REWARD.value_set(reward)] if reward is not None else [])])


def _check_cancelled() -> None:
    """Raise CancelledError if the workflow was asked to cancel: an activity that finished all the same swallows the exception."""
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` whether or not the workflow is cancelled meanwhile; a workflow is cancelled once."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        return await task


def _failure(error: BaseException) -> Ending:
    """The cause that an activity's error names; anything else is ours."""
    cause = error.__cause__
    if isinstance(cause, ApplicationError) and cause.type in set(Cause):
        return Ending(outcome=Outcome.FAILED, cause=Cause(cause.type), message=cause.message[:1000])
    return Ending(outcome=Outcome.FAILED, cause=Cause.INTERNAL, message=str(cause or error)[:1000])


def _worth_another(ending: Ending) -> bool:
    return ending.cause is not None and blame(ending.cause) is Blame.INFRASTRUCTURE
