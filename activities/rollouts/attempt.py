"""The activities of one attempt: provision, run the harness, score, clean up.

Each finds the session and the sandbox by the attempt's identity, so each can be repeated by any worker at any time. The session's
key is asked of the proxy where it is needed and goes into the sandbox alone; no message here has a field for it.
"""

import asyncio
import time
from pathlib import Path

from temporalio import activity

from activities.failures import failing_as
from activities.harnesses import get_harness
from activities.harnesses.base import Harness, HarnessContext
from activities.heartbeats import beating
from activities.rewards import verify
from activities.sandboxes import open_backend
from activities.sandboxes.base import ProcessStatus, SandboxBackend, SandboxSpec
from activities.sessions import ProxyClient
from activities.tasks import Task, load_task, prepare
from contracts.failures import Cause, Limit, RolloutError
from contracts.rollouts import Attempt, HarnessEnd, Provisioned, Score
from contracts.runs import Activity
from contracts.sessions import OpenSession, SessionOpened, SessionStatus
from infra.settings import settings

PROCESS = "harness"
LOG_TAIL = 4000
GRACE = 600.0  # seconds beyond the harness's own time that a sandbox may live: to score, to wait for a worker


@activity.defn(name=Activity.PROVISION)
async def provision(attempt: Attempt) -> Provisioned:
    """Open the session, create the sandbox, carry out the task's environment, put the harness in."""
    started = time.monotonic()
    with failing_as(Cause.SANDBOX_UNSCHEDULABLE, "provision the sandbox"):
        async with beating():
            spec = attempt.spec
            task, harness = await _task(attempt), get_harness(spec.harness)
            session = await _open_session(attempt, task)
            backend = open_backend(spec.sandbox.backend, settings())
            await backend.create(
                SandboxSpec(
                    id=attempt.sandbox_id,
                    owner={"run": spec.rollout.run, "rollout": str(spec.rollout), "attempt": str(attempt.number)},
                    image=task.image.base,
                    cpus=min(filter(None, (task.cpus, spec.sandbox.cpus))),
                    memory_mb=min(filter(None, (task.memory_mb, spec.sandbox.memory_mb))),
                    pids=spec.sandbox.pids,
                    file_size_mb=spec.sandbox.file_size_mb,
                    deadline=time.time() + _harness_seconds(attempt, task) + task.verifier_timeout + GRACE,
                    workdir=task.image.workdir,
                    env=task.image.env,
                    read_only=harness.read_only(),
                )
            )
            await prepare(backend, attempt.sandbox_id, task)
            await backend.put(attempt.sandbox_id, harness.files(_context(attempt, task, session)))
    return Provisioned(
        session_id=session.session_id,
        sandbox_id=attempt.sandbox_id,
        harness_version=harness.version(),
        seconds=time.monotonic() - started,
    )


@activity.defn(name=Activity.RUN_HARNESS)
async def run_harness(attempt: Attempt) -> HarnessEnd:
    """Start the harness, or find it running, and watch it to its end; then end everything it started."""
    with failing_as(Cause.INTERNAL, "run the harness"):
        async with beating():
            task, harness = await _task(attempt), get_harness(attempt.spec.harness)
            session = await _open_session(attempt, task)
            context = _context(attempt, task, session)
            backend = open_backend(attempt.spec.sandbox.backend, settings())
            seconds = _harness_seconds(attempt, task)
            env = {**context.env, **harness.env(context)}
            await backend.start(attempt.sandbox_id, PROCESS, harness.command(context), env=env, cwd=context.workdir, timeout=seconds)
            status = await backend.wait(attempt.sandbox_id, PROCESS, seconds + 60)
            await backend.kill(attempt.sandbox_id, PROCESS)
            if status.state == "running":
                status = await backend.status(attempt.sandbox_id, PROCESS)
            return await _end(attempt, harness, session, backend, status)


async def _end(attempt: Attempt, harness: Harness, session: SessionOpened, backend: SandboxBackend, status: ProcessStatus) -> HarnessEnd:
    """Decide what the end of the harness means. The proxy's record counts for more than the exit code."""
    logs = await backend.logs(attempt.sandbox_id, PROCESS, LOG_TAIL)
    async with ProxyClient(settings()) as proxy:
        recorded = await proxy.status(session.session_id)
    limit = _limit(status, recorded)
    if limit is None or (limit is Limit.WALL_CLOCK and recorded.calls == 0):
        _raise_if_broken(harness, status, recorded)
    if limit is None:
        harness.check_end(status, logs)
    key = session.api_key.get_secret_value()
    return HarnessEnd(
        exit_code=status.exit_code,
        limit=limit,
        seconds=status.seconds,
        cpu_seconds=status.cpu_seconds,
        peak_memory_mb=status.peak_memory_mb,
        log_tail=(logs.stdout[-1500:] + logs.stderr[-500:]).decode(errors="replace").replace(key, "[key]"),
    )


def _limit(status: ProcessStatus, recorded: SessionStatus) -> Limit | None:
    if recorded.limit_reached:
        return recorded.limit_reached
    if status.timed_out:
        return Limit.WALL_CLOCK
    return Limit.MEMORY if status.out_of_memory else None


def _raise_if_broken(harness: Harness, status: ProcessStatus, recorded: SessionStatus) -> None:
    """Failures that the exit code would hide or blame on the wrong party."""
    if status.state == "absent":
        raise RolloutError(Cause.SANDBOX_LOST, f"the {harness.name} process is gone without a trace")
    if recorded.engine_failures and (status.exit_code != 0 or recorded.calls == 0):
        raise RolloutError(Cause.ENGINE_UNAVAILABLE, f"the engine failed {recorded.engine_failures} calls of this rollout")
    if harness.uses_model and recorded.calls == 0:
        raise RolloutError(Cause.NO_MODEL_CALLS, f"{harness.name} ended with {status.exit_code} and never called the model")


@activity.defn(name=Activity.SCORE)
async def score(attempt: Attempt) -> Score:
    """Run the task's verifier on what the agent left."""
    with failing_as(Cause.INTERNAL, "score the rollout"):
        async with beating():
            return await verify(open_backend(attempt.spec.sandbox.backend, settings()), attempt.sandbox_id, await _task(attempt))


@activity.defn(name=Activity.CLEAN_UP)
async def clean_up(attempt: Attempt) -> None:
    """Seal the session and remove the sandbox. Retried until it has succeeded: nothing is left behind."""
    async with beating():
        await open_backend(attempt.spec.sandbox.backend, settings()).destroy(attempt.sandbox_id)
        try:
            task = await _task(attempt)
            session = await _open_session(attempt, task)
        except RolloutError as error:
            if error.cause is Cause.SANDBOX_IMAGE:  # the task cannot be read: no session was opened for it
                return
            raise
        async with ProxyClient(settings()) as proxy:
            await proxy.close(session.session_id)


async def _task(attempt: Attempt) -> Task:
    try:
        return await asyncio.to_thread(load_task, Path(attempt.spec.task.path))
    except ValueError as error:
        raise RolloutError(Cause.SANDBOX_IMAGE, str(error)) from error


async def _open_session(attempt: Attempt, task: Task) -> SessionOpened:
    """Open the attempt's session, or find it: the same request gives the same session and key."""
    spec = attempt.spec
    request = OpenSession(
        rollout=spec.rollout,
        attempt=attempt.number,
        engine=spec.engine,
        policy=spec.policy,
        sampling=spec.sampling,
        limits=spec.limits,
        deadline=time.time() + _harness_seconds(attempt, task),
        labels={"task": spec.task.name, "harness": spec.harness.name},
    )
    async with ProxyClient(settings()) as proxy:
        return await proxy.open(request)


def _harness_seconds(attempt: Attempt, task: Task) -> float:
    """The shorter of what the run and what the task allow."""
    return min(filter(None, (attempt.spec.limits.seconds, task.agent_timeout)))


def _context(attempt: Attempt, task: Task, session: SessionOpened) -> HarnessContext:
    return HarnessContext(
        instruction=task.instruction,
        workdir=task.image.workdir,
        api_key=session.api_key,
        max_context=attempt.spec.max_context,
        solution=task.solution,
        env=task.image.env,
    )
