"""The trainer's API: start or find an update, see where it stands. Updates run one after another in a thread of their own.

The service owns nothing that must survive: a trainer that starts again answers `absent` for what it was doing, and the next `PUT` of
the same request does it from the previous version, or finds it finished.
"""

import hmac
import logging
import threading
from pathlib import Path
from queue import Queue

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from contracts.updates import UpdateRequest, UpdateStatus
from infra.settings import Settings
from infra.storage import Storage
from trainer.batches import BatchError
from trainer.export import find_version
from trainer.updates import Updater

log = logging.getLogger(__name__)


class Updates:
    """The queue of updates and where each stands."""

    def __init__(self, storage: Storage, work: Path) -> None:
        self.storage = storage
        self._updater = Updater(storage, work)
        self._status: dict[tuple[str, int], UpdateStatus] = {}
        self._queue: Queue[UpdateRequest] = Queue()
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self._finished = Counter("trainer_updates_total", "Updates by how they ended", ["state"], registry=self.registry)
        self._running = Gauge("trainer_updates_running", "Updates that run or wait", registry=self.registry)
        threading.Thread(target=self._work, name="updates", daemon=True).start()

    def put(self, request: UpdateRequest) -> UpdateStatus:
        """Start the update, unless it runs. One that failed starts again; one that has finished is found by the `Updater`."""
        key = (request.run, request.iteration)
        with self._lock:
            status = self._status.get(key)
            if status is None or status.state == "failed":
                self._status[key] = status = UpdateStatus(state="running", phase="waiting")
                self._queue.put(request)
                self._running.inc()
        return status

    def get(self, run: str, iteration: int) -> UpdateStatus:
        """Where it stands; a finished version counts whoever made it."""
        with self._lock:
            status = self._status.get((run, iteration))
        if status is None:
            version = find_version(self.storage, run, iteration + 1)
            if version is not None and version.result is not None:
                return UpdateStatus(state="finished", result=version.result)
        return status or UpdateStatus(state="absent")

    def _work(self) -> None:
        while True:
            request = self._queue.get()
            status = self._carry_out(request)
            with self._lock:
                if status.state == "finished":  # the version in storage says so, and nothing else
                    del self._status[(request.run, request.iteration)]
                else:
                    self._status[(request.run, request.iteration)] = status
            self._finished.labels(status.state).inc()
            self._running.dec()

    def _carry_out(self, request: UpdateRequest) -> UpdateStatus:
        key = (request.run, request.iteration)

        def report(phase: str, step: int, steps: int) -> None:
            with self._lock:
                self._status[key] = UpdateStatus(state="running", phase=phase, step=step, steps=steps)

        try:
            return UpdateStatus(state="finished", result=self._updater.run(request, report))
        except BatchError as error:
            return UpdateStatus(state="failed", error=str(error), retryable=False)
        except Exception as error:
            log.exception("update %s of run %s failed", request.iteration, request.run)
            return UpdateStatus(state="failed", error=f"{type(error).__name__}: {error}", retryable=True)


def create_app(settings: Settings, work: Path) -> FastAPI:
    """The service over the deployment's storage; `work` is scratch space on this machine."""
    updates = Updates(Storage.of(settings), work)
    token = settings.trainer_token.get_secret_value()

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "a bearer token is needed")

    app = FastAPI(title="OpenForgeRL trainer", openapi_url=None)

    @app.put("/updates/{run}/{iteration}", dependencies=[Depends(authorised)])
    def put(run: str, iteration: int, request: UpdateRequest) -> UpdateStatus:
        if (run, iteration) != (request.run, request.iteration):
            raise HTTPException(422, f"the path says {run}/{iteration}, the body {request.run}/{request.iteration}")
        return updates.put(request)

    @app.get("/updates/{run}/{iteration}", dependencies=[Depends(authorised)])
    def get(run: str, iteration: int) -> UpdateStatus:
        return updates.get(run, iteration)

    @app.get("/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(updates.registry), media_type="text/plain; version=0.0.4")

    return app
