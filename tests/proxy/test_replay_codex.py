"""Replay with the real Codex: its sandbox dies in mid-rollout, and a fresh one goes on with the same trajectory."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from activities.harnesses import get_harness
from activities.harnesses.base import HarnessContext
from activities.sandboxes.base import SandboxSpec
from activities.sandboxes.bubblewrap import BubblewrapBackend
from contracts.config import HarnessConfig
from contracts.sessions import CallRecord, ReplayConfig, ReplayLevel
from tests.proxy.clients import call_text
from tests.proxy.test_replay import CODEX, facts
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

COMMANDS = ["echo one > a.txt; cat a.txt", "echo two >> a.txt; { time cat a.txt; } 2>&1", "wc -l a.txt", "cat a.txt"]


def agent(prompt: str) -> str:
    """Runs the commands, then says that it is done."""
    turn = prompt.count("<tool_response>")
    return call_text(COMMANDS[turn]) if turn < len(COMMANDS) else "done"


class Sandboxes:
    """Starts Codex in fresh sandboxes, by the adapter."""

    def __init__(self, proxy: Proxy, root: Path) -> None:
        self.backend = BubblewrapBackend(root=root / "sandboxes", proxy_socket=proxy.socket)

    @asynccontextmanager
    async def codex(self, name: str, key: str) -> Any:
        """Codex at work in sandbox `name`; the sandbox dies with the block."""
        harness = get_harness(HarnessConfig(name="codex", options={"instructions": "Use commands."}))
        context = HarnessContext(instruction="Do it.", workdir="/app", api_key=SecretStr(key))
        spec = SandboxSpec(
            id=name, owner={}, image="debian", cpus=1, memory_mb=1024, pids=64, file_size_mb=64, deadline=time.time() + 300,
            workdir="/app", read_only=harness.read_only(),
        )  # fmt: skip
        await self.backend.create(spec)
        try:
            await self.backend.put(name, harness.files(context))
            await self.backend.start(name, "harness", harness.command(context), env=harness.env(context), timeout=200)
            yield name
        finally:
            await self.backend.destroy(name)

    async def finish(self, name: str) -> bytes | None:
        """Wait until Codex has ended, and return what it made."""
        status = await self.backend.wait(name, "harness", 200)
        assert status.exit_code == 0, await self.backend.logs(name, "harness", 10_000)
        return await self.backend.get(name, "/app/a.txt")


@pytest.fixture
def sandboxes(proxy: Proxy, tmp_path: Path) -> Iterator[Sandboxes]:
    yield Sandboxes(proxy, tmp_path)


def recorded(proxy: Proxy, session: str) -> list[CallRecord]:
    return proxy.calls(session).calls


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, len(COMMANDS) + 1], ids=["after 1", "after 3", "after all"])
async def test_codex_goes_on_with_the_same_tokens_after_its_sandbox_died(
    proxy: Proxy, stub: StubEngine, member: int, sandboxes: Sandboxes, k: int
) -> None:
    """`k` answers were given when the sandbox died, while the engine worked at the next."""
    total = len(COMMANDS) + 1

    def until_k(prompt: str) -> str:
        if prompt.count("<tool_response>") >= k:
            stub.gate.clear()
        return agent(prompt)

    stub.script = until_k
    session, key = proxy.open(member, **CODEX)
    async with sandboxes.codex("first", key) as first:
        if k == total:
            await sandboxes.finish(first)
        while len(recorded(proxy, session)) < k or len(stub.prompts) < min(k + 1, total):
            await asyncio.sleep(0.05)

    again, key = proxy.open(member, attempt=2, replay_of=session, replay=ReplayConfig(pace=0.0), **CODEX)
    stub.script = agent
    stub.prompts.clear()
    stub.gate.set()
    async with sandboxes.codex("second", key) as fresh:
        assert await sandboxes.finish(fresh) == b"one\ntwo\n"

    before, after = recorded(proxy, session), recorded(proxy, again)
    assert (len(before), len(after)) == (k, total)
    assert [facts(call) for call in after[:k]] == [facts(call) for call in before]
    assert [bool(call.replayed) for call in after] == [True] * k + [False] * (total - k)
    assert stub.prompts == [call.prompt_ids for call in after[k:]], "only what was never sampled is sampled"
    assert {call.segment for call in after} == {0}
    status = proxy.close(again).replay
    assert status is not None
    assert (sum(status.hits.values()), status.diverged_at) == (k, None)
    assert status.hits[ReplayLevel.EQUAL] < k or k == 1, "Codex writes an id of its own into each output"
