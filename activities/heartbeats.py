"""Heartbeats beside an activity's work, so that a worker that died is noticed in seconds whatever the activity was waiting for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity

SECONDS = 2.0


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Send a heartbeat every two seconds while the block runs."""

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(SECONDS)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
