"""The activity `update_policy` against a real trainer service: what it returns, and which of its errors Temporal retries."""

from collections.abc import Iterator
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.policy import update_policy
from contracts.config import TrainingConfig
from contracts.updates import UpdateRequest, UpdateResult
from infra.settings import settings
from tests.support.processes import free_port
from tests.trainer.conftest import TOKEN, Trainer
from tests.trainer.synthetic import seal
from tests.trainer.test_trainer import RL, rollouts

pytestmark = [pytest.mark.trainer, pytest.mark.slow]


@pytest.fixture
def environment(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("OPENFORGE_TRAINER_URL", trainer.server.url)
    monkeypatch.setenv("OPENFORGE_TRAINER_TOKEN", TOKEN)
    settings.cache_clear()
    yield monkeypatch
    settings.cache_clear()


async def update(trainer: Trainer, run: str, manifest: str) -> tuple[UpdateResult, list[tuple[Any, ...]]]:
    """The result, and the heartbeats."""
    beats: list[tuple[Any, ...]] = []
    worker = ActivityEnvironment()
    worker.on_heartbeat = lambda *details: beats.append(details)
    method = TrainingConfig(**RL)
    request = UpdateRequest(run=run, iteration=0, manifest=manifest, base_model=str(trainer.model), max_context=256, method=method)
    return await worker.run(update_policy, request), beats


@pytest.mark.usefixtures("environment")
async def test_it_returns_what_the_trainer_made_and_says_how_far_it_is(trainer: Trainer) -> None:
    result, beats = await update(trainer, "activity", seal(trainer.storage, "activity", 0, rollouts(trainer.model)))
    assert (result.version, result.rows) == (1, 8)
    assert beats
    assert {phase for phase, _, _ in beats} <= {"waiting", "load", "logprobs", "update", "save"}


@pytest.mark.usefixtures("environment")
async def test_a_batch_that_can_never_be_trained_on_is_not_retried(trainer: Trainer) -> None:
    with pytest.raises(ApplicationError, match="not sealed") as caught:
        await update(trainer, "activity-bad", "runs/activity-bad/iteration=000000/manifest.json")
    assert (caught.value.type, caught.value.non_retryable) == ("update_failed", True)


async def test_a_wrong_token_is_not_retried(trainer: Trainer, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENFORGE_TRAINER_TOKEN", "wrong")
    with pytest.raises(ApplicationError, match="answered 401") as caught:
        await update(trainer, "activity-token", "m")
    assert (caught.value.type, caught.value.non_retryable) == ("trainer_refused", True)


async def test_a_trainer_that_is_away_is_asked_again(trainer: Trainer, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENFORGE_TRAINER_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ApplicationError, match="does not answer") as caught:
        await update(trainer, "activity-away", "m")
    assert (caught.value.type, caught.value.non_retryable) == ("trainer_unavailable", False)
