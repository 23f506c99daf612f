"""The routes: a table, with no logic of their own. Two applications share one state.

`public` has the session API and the model routes and is served on TCP; `model_routes` has the model routes alone and is served
on the unix socket that sandboxes are given.
"""

import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from contracts.sessions import OpenSession, SessionCalls, SessionOpened, SessionStatus
from proxy.body import read_object
from proxy.canonical import Question
from proxy.dialects import DIALECTS
from proxy.dialects.base import Dialect, Reply, openai_error
from proxy.engine import EnginePool
from proxy.errors import ProxyError
from proxy.generation import Generation, Pending, check_engine
from proxy.journal import Journal
from proxy.metrics import REGISTRY, REQUESTS, UNAUTHORIZED
from proxy.sessions import Session, SessionConflictError, Sessions

KEEP_ALIVE_SECONDS = 5.0  # Codex gives up on a stream after `stream_idle_timeout_ms` without an event


class Proxy:
    """What the routes work on."""

    def __init__(self, sessions: Sessions, generation: Generation, journal: Journal, pools: dict[str, EnginePool]) -> None:
        self.sessions = sessions
        self.generation = generation
        self.journal = journal
        self.pools = pools

    async def seal(self, session: Session) -> None:
        """Close a session, and end its calls in flight."""
        await self.sessions.close(session)
        await self.generation.cancel(session)


def public(proxy: Proxy) -> FastAPI:
    """Session API, model routes, health and metrics."""
    app = _application("OpenForgeRL proxy")
    app.include_router(_session_routes(proxy))
    app.include_router(_model_routes(proxy))
    app.include_router(_health_routes(proxy))
    return app


def model_routes(proxy: Proxy) -> FastAPI:
    """The model routes alone."""
    app = _application("OpenForgeRL model routes")
    app.include_router(_model_routes(proxy))
    return app


def _application(title: str) -> FastAPI:
    app = FastAPI(title=title, openapi_url=None)

    @app.exception_handler(ProxyError)
    async def refuse(_: Request, error: ProxyError) -> JSONResponse:
        return JSONResponse(openai_error(error), error.status)

    return app


def _session_routes(proxy: Proxy) -> APIRouter:
    def admin(request: Request) -> None:
        if not proxy.sessions.is_admin(_bearer(request)):
            UNAUTHORIZED.labels("admin").inc()
            raise HTTPException(401, "the session API needs the admin token as a bearer token")

    async def find(session_id: str) -> Session:
        if session := await proxy.sessions.get(session_id):
            return session
        raise HTTPException(404, f"there is no session {session_id!r}")

    routes = APIRouter(prefix="/sessions", dependencies=[Depends(admin)])
    found = Depends(find)

    @routes.post("")
    async def open_session(body: OpenSession, request: Request) -> JSONResponse:
        check_engine(proxy.pools, body.engine)
        try:
            session = await proxy.sessions.open(body, proxy.seal)
        except SessionConflictError as error:
            raise HTTPException(409, str(error)) from error
        key = proxy.sessions.key(session.session_id)
        opened = SessionOpened(session_id=session.session_id, api_key=key, base_url=str(request.base_url).rstrip("/"))
        return JSONResponse({**opened.model_dump(mode="json"), "api_key": key.get_secret_value()})

    @routes.get("/{session_id}")
    async def status(session: Annotated[Session, found]) -> SessionStatus:
        return session.status

    @routes.get("/{session_id}/calls")
    async def calls(session: Annotated[Session, found]) -> SessionCalls:
        return SessionCalls(session_id=session.session_id, calls=session.records)

    @routes.post("/{session_id}/close")
    async def close(session: Annotated[Session, found]) -> SessionStatus:
        await proxy.seal(session)
        return session.status

    return routes


def _model_routes(proxy: Proxy) -> APIRouter:
    routes = APIRouter()
    for prefix in ("", "/s/{api_key}"):
        for dialect in DIALECTS:
            for path, reply in dialect.paths.items():
                routes.add_api_route(prefix + path, _route(dialect, reply, proxy), methods=["POST"])
        routes.add_api_route(f"{prefix}/v1/models", _models(proxy), methods=["GET"])
    return routes


def _models(proxy: Proxy) -> Callable[..., Any]:
    async def models(request: Request) -> dict[str, Any]:
        session = _authenticate(proxy, request)
        return {
            "object": "list",
            "data": [{"id": session.opened.engine, "object": "model", "created": 0, "owned_by": "openforge"}],
        }

    return models


def _route(dialect: Dialect, reply: Reply, proxy: Proxy) -> Callable[..., Any]:
    async def answer(request: Request) -> Response:
        status = 500
        try:
            session = _authenticate(proxy, request)
            body = await read_object(request)
            if "model" in request.path_params:  # where model and streaming are in the path
                body |= {"model": request.path_params["model"], "stream": reply == "stream"}
            question = dialect.parse(body, request.headers)
            if reply == "count":
                status = 200
                return JSONResponse(dialect.count(proxy.generation.count(session, question)))
            pending = await proxy.generation.ask(session, question)
            status = 200
            if question.stream:
                headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
                return StreamingResponse(_events(dialect, question, pending), media_type="text/event-stream", headers=headers)
            return JSONResponse(dialect.encode(question, await pending.result()))
        except ProxyError as error:
            status = error.status
            return JSONResponse(dialect.error(error), status)
        finally:
            REQUESTS.labels(dialect.name, status).inc()

    return answer


async def _events(dialect: Dialect, question: Question, pending: Pending) -> AsyncIterator[bytes]:
    stream = dialect.stream(question, pending.identity, pending.created)
    if first := stream.start():
        yield first
    last = time.monotonic()
    async for _ in pending.watch(KEEP_ALIVE_SECONDS):
        if parts := stream.show(pending.message):
            yield parts
            last = time.monotonic()
        elif time.monotonic() - last >= KEEP_ALIVE_SECONDS:
            yield stream.keep_alive()
            last = time.monotonic()
    if pending.answer:
        yield stream.end(pending.answer)
    elif pending.error:
        yield stream.fail(pending.error)


def _health_routes(proxy: Proxy) -> APIRouter:
    routes = APIRouter()

    @routes.get("/healthz")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz")
    async def ready(response: Response) -> dict[str, Any]:
        """Ready means that sessions can be opened and calls recorded. Engines may come and go: calls wait for them."""
        journal = await proxy.journal.check()
        response.status_code = 200 if journal else 503
        engines = {name: {engine.url: engine.label for engine in pool.engines} for name, pool in proxy.pools.items()}
        return {"journal": journal, "engines": engines}

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return routes


def _authenticate(proxy: Proxy, request: Request) -> Session:
    headers = request.headers
    key = request.path_params.get("api_key") or _bearer(request) or headers.get("x-api-key") or headers.get("x-goog-api-key", "")
    try:
        return proxy.sessions.authenticate(key)
    except ProxyError:
        UNAUTHORIZED.labels("session").inc()
        raise


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
