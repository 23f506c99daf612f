"""`plan_tasks` and `preflight`: what a run works on, and whether it can."""

import asyncio
import random
from pathlib import Path

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.harnesses import get_harness
from activities.heartbeats import beating
from activities.sandboxes import open_backend
from activities.tasks import TaskError, list_tasks, load_task
from contracts.config import RunConfig
from contracts.failures import RolloutError
from contracts.rollouts import PlannedTasks, TaskPlan, TaskRef
from contracts.runs import Activity
from infra.settings import Settings, settings
from infra.storage import Storage, StorageError


def order_of(count: int, seed: int, epoch: int) -> list[int]:
    """The permutation of `count` tasks for one epoch: a pure function of its arguments."""
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def positions(count: int, seed: int, cursor: int, groups: int) -> list[int]:
    """Places in the list of tasks for `groups` groups from position `cursor` of the endless sequence of epochs."""
    return [order_of(count, seed, place // count)[place % count] for place in range(cursor, cursor + groups)]


@activity.defn(name=Activity.PLAN_TASKS)
async def plan_tasks(plan: TaskPlan) -> PlannedTasks:
    """Pick the tasks of a batch. Raises ApplicationError (not retryable) for a directory or task that cannot be used."""
    async with beating():
        return await asyncio.to_thread(_plan, plan)


def _plan(plan: TaskPlan) -> PlannedTasks:
    try:
        directories = list_tasks(Path(plan.tasks))
        chosen = range(len(directories))
        picked = chosen if plan.groups is None else positions(len(directories), plan.seed, plan.cursor, plan.groups)
        tasks = [load_task(directories[place]) for place in picked]
    except TaskError as error:
        raise ApplicationError(str(error), type="bad_task", non_retryable=True) from error
    return PlannedTasks(
        tasks=[TaskRef(name=task.name, path=str(task.path), digest=task.digest()) for task in tasks],
        epoch=plan.cursor // len(directories),
        available=len(directories),
    )


@activity.defn(name=Activity.PREFLIGHT)
async def preflight(config: RunConfig) -> str:
    """Check everything that can be checked before the first rollout; returns the harness's version.

    Raises ApplicationError, not retryable, with all problems in one message, each naming its key.
    """
    async with beating():
        problems = await asyncio.to_thread(_local_problems, config) + await _service_problems(config, settings())
    if problems:
        raise ApplicationError("; ".join(problems), type="preflight", non_retryable=True)
    return get_harness(config.harness).version()


def _local_problems(config: RunConfig) -> list[str]:
    problems = []
    directories = {"tasks": config.tasks, **{f"evaluation.splits.{name}": path for name, path in config.evaluation.splits.items()}}
    if config.warm_start:
        directories["warm_start.tasks"] = config.warm_start.tasks
    for key, path in directories.items():
        try:
            load_task(list_tasks(Path(path))[0])
        except TaskError as error:
            problems.append(f"{key}: {error}")
    if not (Path(config.policy.model) / "config.json").is_file():
        problems.append(f"policy.model: {config.policy.model} holds no config.json; it must be a model in Hugging Face format")
    try:
        harness = get_harness(config.harness)
        harness.version()
        harness.read_only()
    except (ValueError, RolloutError) as error:
        problems.append(f"harness: {error}")
    try:
        open_backend(config.sandbox.backend, settings())
    except ValueError as error:
        problems.append(f"sandbox.backend: {error}")
    try:
        Storage.of(settings()).check_writable()
    except StorageError as error:
        problems.append(f"storage: {error}")
    return problems


async def _service_problems(config: RunConfig, where: Settings) -> list[str]:
    pools = {"policy"} | ({config.warm_start.engine} if config.warm_start else set())
    problems = [f"engine pool {pool!r} is not among {', '.join(sorted(where.engines))}" for pool in sorted(pools - set(where.engines))]
    services = {"the proxy": f"{where.proxy_url}/readyz", "the trainer": f"{where.trainer_url}/healthz"}
    for pool in sorted(pools & set(where.engines)):
        services |= {f"engine {url}": f"{url}/health" for url in where.engines[pool]}
    async with httpx.AsyncClient(timeout=10) as client:
        for name, url in services.items():
            try:
                response = await client.get(url)
            except httpx.HTTPError as error:
                problems.append(f"{name} does not answer at {url}: {type(error).__name__}")
            else:
                if response.status_code != 200:
                    problems.append(f"{name} is not ready: {url} answered {response.status_code}")
    return problems
