"""Client of the proxy's session API."""

import ssl
from functools import lru_cache
from types import TracebackType
from typing import Self

import httpx

from contracts.failures import Cause, RolloutError
from contracts.sessions import OpenSession, SessionCalls, SessionOpened, SessionStatus
from infra.settings import Settings


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Made once: loading the certificates takes longer than a call."""
    return httpx.create_ssl_context()


class ProxyClient:
    """Opens, reads and seals sessions. Raises RolloutError: PROXY_UNAVAILABLE if the proxy cannot do it now."""

    def __init__(self, settings: Settings) -> None:
        headers = {"authorization": f"Bearer {settings.proxy_admin_token.get_secret_value()}"}
        transport = httpx.AsyncHTTPTransport(retries=2, verify=_tls())
        self._client = httpx.AsyncClient(base_url=settings.proxy_url, headers=headers, timeout=30, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.aclose()

    async def open(self, request: OpenSession) -> SessionOpened:
        """Open the session, or find the one of this (rollout, attempt). One that replays an earlier attempt's seals that one."""
        return SessionOpened.model_validate_json(await self._ask("POST", "/sessions", request.model_dump_json()))

    async def status(self, session_id: str) -> SessionStatus:
        return SessionStatus.model_validate_json(await self._ask("GET", f"/sessions/{session_id}"))

    async def calls(self, session_id: str) -> SessionCalls:
        return SessionCalls.model_validate_json(await self._ask("GET", f"/sessions/{session_id}/calls"))

    async def close(self, session_id: str) -> SessionStatus:
        """Seal the session: its key opens nothing any more."""
        return SessionStatus.model_validate_json(await self._ask("POST", f"/sessions/{session_id}/close"))

    async def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        headers = {"content-type": "application/json"} if body else None
        try:
            response = await self._client.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise RolloutError(Cause.PROXY_UNAVAILABLE, f"the proxy does not answer: {type(error).__name__}") from error
        if response.status_code >= 400:
            cause = Cause.PROXY_UNAVAILABLE if response.status_code >= 500 else Cause.INTERNAL  # the latter: asked wrongly, by us
            raise RolloutError(cause, f"the proxy answered {response.status_code} to {method} {path}: {response.text[:300]}")
        return response.content
