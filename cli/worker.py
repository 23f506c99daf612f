"""The worker: the one place where workflows and activities meet. `python -m cli.worker [--queues …]`.

It owns nothing. Any number may run; one that is killed loses no rollout, because harnesses run detached from it.
"""

import argparse
import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities import policy, rollouts, trajectories
from activities.sandboxes import open_backend, sweep
from contracts.runs import QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE
from infra.settings import settings
from infra.temporal import connect, ensure_search_attributes
from workflows.evaluation import Evaluation
from workflows.rollout import Rollout
from workflows.training_run import TrainingRun

log = logging.getLogger(__name__)
SWEEP_SECONDS = 60.0
QUEUES = (QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE)
WORKFLOWS = (TrainingRun, Rollout, Evaluation)
# Time to finish what is quick when it is asked to stop; harnesses go on without it.
GRACE = timedelta(seconds=2)
# A cancel reaches an activity with the answer to a heartbeat; so late at most.
CANCEL_NOTICED = timedelta(seconds=4)


def workers(client: Client, queues: Sequence[str], concurrency: int) -> list[Worker]:
    """A worker a queue. `concurrency` bounds the sandboxes' activities on this machine."""
    found: list[Worker] = []
    common: dict[str, Any] = {"graceful_shutdown_timeout": GRACE, "max_heartbeat_throttle_interval": CANCEL_NOTICED}
    if QUEUE in queues:
        runner = SandboxedWorkflowRunner(
            restrictions=SandboxRestrictions.default.with_passthrough_modules("contracts", "pydantic", "workflows")
        )
        found.append(
            Worker(
                client,
                task_queue=QUEUE,
                workflows=WORKFLOWS,
                workflow_runner=runner,
                activities=[rollouts.preflight, rollouts.plan_tasks, trajectories.seal_batch, policy.publish_policy],
                **common,
            )
        )
    if SANDBOX_QUEUE in queues:
        activities: list[Callable[..., Any]] = [
            rollouts.provision,
            rollouts.run_harness,
            rollouts.score,
            trajectories.record_trajectory,
            rollouts.clean_up,
        ]
        found.append(Worker(client, task_queue=SANDBOX_QUEUE, activities=activities, max_concurrent_activities=concurrency, **common))
    if TRAINER_QUEUE in queues:
        found.append(Worker(client, task_queue=TRAINER_QUEUE, activities=[policy.update_policy], **common))
    return found


async def serve(queues: Sequence[str], concurrency: int) -> None:
    """Work until asked to stop."""
    client = await connect(settings())
    await ensure_search_attributes(client)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = workers(client, queues, concurrency)
    async with asyncio.TaskGroup() as group:
        for worker in running:
            group.create_task(worker.run())
        janitor = group.create_task(keep_swept()) if SANDBOX_QUEUE in queues else None
        log.info("working on %s", ", ".join(queues))
        await stop.wait()
        if janitor:
            janitor.cancel()
        for worker in running:
            group.create_task(worker.shutdown())


async def keep_swept() -> None:
    """The janitor: once a minute, sandboxes that are past their deadline go, whoever left them."""
    backend = open_backend("bubblewrap", settings())
    while True:
        try:
            for sandbox in await sweep(backend):
                log.warning("sandbox %s was past its deadline and has been removed", sandbox)
        except OSError as error:
            log.warning("the janitor could not list the sandboxes: %s", error)
        await asyncio.sleep(SWEEP_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker", description="Carry out workflows and activities.")
    parser.add_argument("--queues", default=",".join(QUEUES), help="task queues, separated by commas (default: all)")
    parser.add_argument("--concurrency", type=int, default=64, help="activities on sandboxes at once")
    arguments = parser.parse_args()
    queues = [queue for queue in arguments.queues.split(",") if queue]
    if unknown := sorted(set(queues) - set(QUEUES)):
        parser.error(f"unknown queue {', '.join(unknown)}; known: {', '.join(QUEUES)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(serve(queues, arguments.concurrency))


if __name__ == "__main__":
    main()
