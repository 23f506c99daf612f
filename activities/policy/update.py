"""`update_policy`: have the trainer make the next version. Idempotent by (run, iteration), so a repeat finds the work or its result."""

import asyncio

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.runs import Activity
from contracts.updates import UpdateRequest, UpdateResult, UpdateStatus
from infra.settings import settings

POLL_SECONDS = 0.25


@activity.defn(name=Activity.UPDATE_POLICY)
async def update_policy(request: UpdateRequest) -> UpdateResult:
    """Start the update at the trainer, or find it, and wait for its end; heartbeats say phase and step.

    Raises ApplicationError, not retryable for a batch or a config that can never be trained; a trainer that is away, or was
    started again and has forgotten the update, is retried.
    """
    url = f"{settings().trainer_url}/updates/{request.run}/{request.iteration}"
    headers = {"authorization": f"Bearer {settings().trainer_token.get_secret_value()}"}
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:
        status = await _ask(client, "PUT", url, request)
        while status.state == "running":
            activity.heartbeat(status.phase, status.step, status.steps)
            await asyncio.sleep(POLL_SECONDS)
            status = await _ask(client, "GET", url)
    if status.state == "finished" and status.result is not None:
        return status.result
    if status.state == "absent":
        raise ApplicationError("the trainer was started again in the middle of the update", type="trainer_unavailable")
    raise ApplicationError(status.error, type="update_failed", non_retryable=not status.retryable)


async def _ask(client: httpx.AsyncClient, method: str, url: str, body: UpdateRequest | None = None) -> UpdateStatus:
    try:
        response = await client.request(method, url, json=None if body is None else body.model_dump(mode="json"))
    except httpx.HTTPError as error:
        raise ApplicationError(f"the trainer does not answer: {type(error).__name__}", type="trainer_unavailable") from error
    if response.status_code >= 400:
        refused = response.status_code < 500
        raise ApplicationError(
            f"the trainer answered {response.status_code}: {response.text[:500]}", type="trainer_refused", non_retryable=refused
        )
    return UpdateStatus.model_validate_json(response.content)
