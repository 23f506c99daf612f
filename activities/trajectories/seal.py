"""`seal_batch`: write the batch's manifest, after which the batch is what it is."""

import asyncio
import statistics
from collections import Counter

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.failures import outlasting
from activities.heartbeats import beating
from contracts.batches import BatchSummary, Ledger, Manifest, SealBatch
from contracts.failures import Outcome
from contracts.identity import manifest_path
from contracts.runs import Activity
from infra.settings import settings
from infra.storage import Storage


@activity.defn(name=Activity.SEAL_BATCH)
async def seal_batch(request: SealBatch) -> BatchSummary:
    """Check that every rollout that was started has ended in the ledger and that its file is there; then write the manifest.

    Raises ApplicationError, not retryable if the ledger does not balance; retried while storage is away.
    """
    try:
        ledger = Ledger.of(request.results, request.started)
    except ValueError as error:
        raise ApplicationError(f"batch {request.batch}: {error}", type="ledger", non_retryable=True) from error
    manifest = Manifest(
        run=request.run, batch=request.batch, version=request.version, ledger=ledger, seconds=request.seconds, results=request.results
    )
    path = manifest_path(request.run, request.batch)
    async with beating():
        with outlasting():
            storage = Storage.of(settings())
            for result in request.results:
                if result.trajectory and not await asyncio.to_thread(storage.exists, result.trajectory.path):
                    raise ApplicationError(f"{storage.url(result.trajectory.path)} is not there", type="file_missing", non_retryable=True)
            await asyncio.to_thread(storage.write, path, manifest.model_dump_json().encode())
    return summarise(manifest, path)


def summarise(manifest: Manifest, path: str) -> BatchSummary:
    """What the run keeps of a batch."""
    results, ledger = manifest.results, manifest.ledger
    rewards = [result.reward for result in results if result.reward is not None]
    spread = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else None
    phases: Counter[str] = Counter()
    for result in results:
        phases.update(result.phases)
    return BatchSummary(
        batch=manifest.batch,
        version=manifest.version,
        manifest=path,
        started=ledger.started,
        completed=ledger.completed,
        truncated=sum(ledger.truncated.values()),
        failed=ledger.failed,
        cancelled=sum(result.ending.outcome is Outcome.CANCELLED for result in results),
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_se=spread,
        response_tokens=sum(result.trajectory.response_tokens for result in results if result.trajectory),
        calls=sum(result.trajectory.calls for result in results if result.trajectory),
        attempts=sum(result.attempts for result in results),
        seconds=manifest.seconds,
        phases={phase: round(seconds / len(results), 4) for phase, seconds in sorted(phases.items())} if results else {},
    )
