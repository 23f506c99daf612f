"""Engine pools: tokens in, tokens out, over vLLM's `/inference/v1/generate` (docs/proxy.md has the format).

The weights that an engine holds are known from what it says: before a call from `/weight_info`, to send a session's call only to
its own policy's weights; after it from the spans in the answer, which are the record.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from contracts.updates import parse_weight_label

log = logging.getLogger(__name__)
_PROBE_SECONDS = 2.0
_WAITING_PROBE_SECONDS = 0.1
_AFFINITY_SLACK = 4  # requests more than the least loaded that a session's own replica may have
_UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class EngineFailedError(Exception):
    """The engine gave no whole answer; another try may."""


class EngineRefusedError(Exception):
    """The engine says that it will never answer this request."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of an answer. The last chunk has `finish_reason` and `spans`: (label, start, end) over the whole answer."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)


class Engine:
    """One replica. `confirmed` is the label that it last said it holds, and when it was asked (monotonic seconds)."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self.in_flight = 0
        self.label: str | None = None
        self.model = ""
        self.max_context = 0
        self.confirmed: tuple[str, float] | None = None
        self._client = client
        self._probed = 0.0

    @property
    def healthy(self) -> bool:
        return self.label is not None

    def holds(self, policy: str) -> bool:
        """Whether its weights are a version of `policy`."""
        return self.label is not None and policy_of(self.label) == policy

    async def probe(self, max_age: float) -> None:
        """Learn health, weights and context length, unless that was done less than `max_age` seconds ago."""
        if time.monotonic() - self._probed < max_age:
            return
        self._probed = asked = time.monotonic()
        try:
            if not self.model:
                served = (await self._get("/v1/models"))["data"][0]
                self.model, self.max_context = str(served["id"]), int(served["max_model_len"])
            label = str((await self._get("/weight_info"))["weight_version"])
        except (*_UNREACHABLE, KeyError, IndexError, TypeError, ValueError) as error:
            self.lost(f"{type(error).__name__}: {error}")
            return
        if label != self.label:
            log.info("engine %s holds %s", self.url, label)
        self.label = label
        self.confirmed = label, asked

    def lost(self, why: str) -> None:
        """Take the engine for dead until a probe succeeds."""
        if self.healthy:
            log.warning("engine %s is lost: %s", self.url, why)
        self.label, self.model = None, ""

    async def _get(self, path: str) -> Any:
        async with self._client.get(self.url + path, timeout=aiohttp.ClientTimeout(total=5)) as reply:
            if reply.status != 200:
                raise ValueError(f"{path} answers {reply.status}")
            return await reply.json()

    async def generate(self, prompt_ids: list[int], params: dict[str, Any], request_id: str) -> AsyncIterator[Chunk]:
        """Sample an answer. Raises EngineFailedError, also when the stream ends before a finish reason; or EngineRefusedError."""
        body = {
            "model": self.model,
            "token_ids": prompt_ids,
            "sampling_params": params,
            "stream": True,
            "request_id": request_id,
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self.in_flight += 1
        try:
            async with self._client.post(f"{self.url}/inference/v1/generate", json=body, timeout=timeout) as reply:
                if reply.status != 200:
                    raise _refusal(reply.status, (await reply.text())[:500])
                async for data in _events(reply.content):
                    chunk = _chunk(data)
                    yield chunk
                    if chunk.finish_reason:
                        return
            raise EngineFailedError("the stream was cut")
        except _UNREACHABLE as error:
            self.lost(f"{type(error).__name__}: {error}")
            raise EngineFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            self.in_flight -= 1


class EnginePool:
    """The replicas of one engine."""

    def __init__(self, name: str, urls: list[str], client: aiohttp.ClientSession) -> None:
        self.name = name
        self.engines = [Engine(url, client) for url in urls]

    @property
    def max_context(self) -> int | None:
        """Tokens that the replicas take, prompt and answer together; none while that is not known."""
        return min((engine.max_context for engine in self.engines if engine.max_context), default=None)

    async def watch(self) -> None:
        """Probe all replicas for as long as the proxy runs."""
        while True:
            await self.probe(_PROBE_SECONDS)
            await asyncio.sleep(_PROBE_SECONDS)

    async def probe(self, max_age: float) -> None:
        """Probe all replicas that were not probed within `max_age` seconds."""
        await asyncio.gather(*(engine.probe(max_age) for engine in self.engines))

    async def acquire(self, policy: str, session: str) -> Engine:
        """A replica that holds weights of `policy`: of those with the least load, the same for every call of `session`.

        A session's next prompt begins with its last one, which that replica has in its prefix cache. Waits for a replica, for as
        long as the caller lets it.
        """
        while True:
            if ready := [engine for engine in self.engines if engine.holds(policy)]:
                load = min(engine.in_flight for engine in ready)
                free = [engine for engine in ready if engine.in_flight <= load + max(_AFFINITY_SLACK, load // 4)]
                return max(free, key=lambda engine: hashlib.sha256(f"{session} {engine.url}".encode()).digest())  # rendezvous hashing
            await self.probe(_WAITING_PROBE_SECONDS)
            if not any(engine.holds(policy) for engine in self.engines):
                await asyncio.sleep(_WAITING_PROBE_SECONDS)


@asynccontextmanager
async def engine_pools(engines: dict[str, list[str]]) -> AsyncIterator[dict[str, EnginePool]]:
    """The pools by name, with their watchers."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as client:
        pools = {name: EnginePool(name, urls, client) for name, urls in engines.items()}
        watchers = [asyncio.create_task(pool.watch()) for pool in pools.values()]
        try:
            yield pools
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)


def policy_of(label: str) -> str | None:
    """Whose weights a label names; none for a fresh engine's."""
    parsed = parse_weight_label(label)
    return parsed[0] if parsed else None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line. Lines are split here because one line may be longer than the reader's own limit."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line.strip()
            if text.startswith(b"data:") and not text.endswith(b"[DONE]"):
                try:
                    yield json.loads(text[5:])
                except ValueError as error:
                    raise EngineFailedError(f"an event is not JSON: {error}") from error


def _chunk(data: dict[str, Any]) -> Chunk:
    if error := data.get("error"):
        raise _refusal(int(error.get("code") or 500), str(error.get("message")))
    try:
        if not data["choices"]:
            return Chunk([], [])
        choice = data["choices"][0]
        ids = [int(token) for token in choice.get("token_ids") or []]
        logprobs = [float(entry["logprob"]) for entry in (choice.get("logprobs") or {}).get("content") or []]
        spans = [(str(span["version"]), span["start"], span["end"]) for span in choice.get("weight_versions") or []]
        finish_reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineFailedError(f"an event has not the expected form: {type(error).__name__}: {error}") from error
    if len(ids) != len(logprobs):
        raise EngineFailedError(f"{len(ids)} tokens came with {len(logprobs)} log-probabilities")
    return Chunk(ids, logprobs, finish_reason, spans)


def _refusal(status: int, text: str) -> Exception:
    """What an error means: 4xx never succeeds, but 408 and 429 are a matter of time."""
    message = f"the engine answers {status}: {text}"
    return EngineRefusedError(message) if 400 <= status < 500 and status not in (408, 429) else EngineFailedError(message)
