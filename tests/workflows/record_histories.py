"""Record the histories that `test_replay.py` replays: `python -m tests.workflows.record_histories`.

Record again when a workflow is changed on purpose; a change that breaks the replay of an old history breaks runs in flight.
"""

import asyncio
import re
from pathlib import Path

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from contracts.config import RunConfig
from contracts.failures import Cause
from contracts.runs import QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE, TrainingRunInput, Workflow
from infra.temporal import ensure_search_attributes
from tests.support.processes import BASE_PYTHON, ROOT
from tests.workflows.stubs import CONFIG, StubActivities
from workflows.evaluation import Evaluation
from workflows.rollout import Rollout
from workflows.training_run import TrainingRun

HISTORIES = Path(__file__).parent / "histories"


async def record() -> None:
    """A run with a warm start, an evaluation and an attempt that fails, and every child of it."""
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(BASE_PYTHON.parent / "temporal"), data_converter=pydantic_data_converter
    )
    async with environment:
        client = environment.client
        await ensure_search_attributes(client)
        stubs = StubActivities(fail=lambda attempt: Cause.SANDBOX_LOST if attempt.number == 1 and attempt.spec.rollout.member else None)
        runner = SandboxedWorkflowRunner(
            restrictions=SandboxRestrictions.default.with_passthrough_modules("contracts", "pydantic", "workflows")
        )
        workflows = [TrainingRun, Rollout, Evaluation]
        async with (
            Worker(client, task_queue=QUEUE, workflows=workflows, workflow_runner=runner, activities=stubs.all),
            Worker(client, task_queue=SANDBOX_QUEUE, activities=stubs.all),
            Worker(client, task_queue=TRAINER_QUEUE, activities=stubs.all),
        ):
            config = RunConfig.model_validate({**CONFIG, "warm_start": {"tasks": "/demonstrations"}})
            await client.execute_workflow(Workflow.TRAINING_RUN, TrainingRunInput(config=config), id=config.name, task_queue=QUEUE)
            for workflow_id in (config.name, f"{config.name}/evaluation=000001", f"{config.name}/iteration=000001/group=0000/member=001"):
                await _save(client, workflow_id)


async def _save(client: Client, workflow_id: str) -> None:
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    HISTORIES.mkdir(exist_ok=True)
    text = re.sub(r"\d+@[\w.-]+", "worker", history.to_json()).replace(f"{ROOT}/", "")  # nothing of the machine
    (HISTORIES / f"{workflow_id.replace('/', '_').replace('=', '-')}.json").write_text(text + "\n")


if __name__ == "__main__":
    asyncio.run(record())
