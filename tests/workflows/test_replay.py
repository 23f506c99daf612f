"""Recorded histories replay: a change of the workflows' code does not break runs that are in flight."""

from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workflows.evaluation import Evaluation
from workflows.rollout import Rollout
from workflows.training_run import TrainingRun

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))


def test_there_are_histories_of_every_workflow() -> None:
    recorded = "".join(file.read_text()[:2000] for file in HISTORIES)
    assert all(f'"{name}"' in recorded for name in ("TrainingRun", "Rollout", "Evaluation"))


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.stem)
async def test_a_recorded_history_replays(file: Path) -> None:
    runner = SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules("contracts", "pydantic", "workflows")
    )
    replayer = Replayer(workflows=[TrainingRun, Rollout, Evaluation], workflow_runner=runner, data_converter=pydantic_data_converter)
    history = WorkflowHistory.from_json(file.stem, file.read_text())
    result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
    assert result.replay_failure is None, result.replay_failure
