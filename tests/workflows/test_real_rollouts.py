"""Real rollouts of the `oracle` harness: real worker process, sandbox, proxy, verifier and storage. No engine: the oracle asks no model."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from temporalio.client import Client

from contracts.config import HarnessConfig, SandboxConfig
from contracts.failures import Outcome
from contracts.identity import RolloutId
from contracts.rollouts import RolloutResult, RolloutSpec, TaskRef
from contracts.runs import QUEUE, Workflow
from contracts.sessions import Sampling, SessionLimits
from tests.support.processes import BASE_PYTHON, Server, free_port, running
from tests.support.proxy import ADMIN, Proxy, proxy_server
from tests.workflows.test_training_run import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILES = {
    "task.toml": "[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 60\n",
    "instruction.md": "Write a line to answer.txt.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "solution/solve.sh": "echo begun >> /app/answer.txt\nuntil [ -e /app/go ]; do sleep 0.05; done\n",
    "tests/test.sh": 'test "$(wc -l < /app/answer.txt)" = 1 && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n',
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task whose solution writes a line and waits for /app/go; its verifier wants exactly one line."""
    for name, text in FILES.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


@pytest.fixture(scope="module")
def proxy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with proxy_server(tiny_model, {"policy": "http://127.0.0.1:9"}, tmp_path_factory.mktemp("proxy")) as server:
        yield server


def worker(client: Client, proxy: Proxy, home: Path) -> AbstractContextManager[Server]:
    """A worker process. It serves no HTTP: that it is up is seen by the proxy's being up and by what it does."""
    environment = {
        "OPENFORGE_HOME": str(home),
        "OPENFORGE_TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "OPENFORGE_PROXY_URL": proxy.url,
        "OPENFORGE_PROXY_SOCKET": str(proxy.socket),
        "OPENFORGE_PROXY_ADMIN_TOKEN": ADMIN,
        "OPENFORGE_TRAINER_URL": f"http://127.0.0.1:{free_port()}",
    }
    return running([BASE_PYTHON, "-m", "cli.worker"], proxy.url, home / "worker.log", ready="/healthz", seconds=30, environment=environment)


async def start(client: Client, task: Path) -> Any:
    rollout = RolloutId(run=f"run-{uuid.uuid4().hex[:8]}", batch="iteration=000000", group=0, member=0)
    spec = RolloutSpec(
        rollout=rollout, task=TaskRef(name="wait", path=str(task), digest=""), harness=HarnessConfig(name="oracle"),
        sandbox=SandboxConfig(), policy="run", sampling=Sampling(), limits=SessionLimits(seconds=120),
    )  # fmt: skip
    return await client.start_workflow(Workflow.ROLLOUT, spec, id=rollout.workflow_id, task_queue=QUEUE, result_type=RolloutResult)


async def test_a_rollout_whose_worker_is_killed_goes_on_in_the_same_attempt(
    client: Client, proxy: Proxy, task: Path, tmp_path: Path
) -> None:
    with worker(client, proxy, tmp_path) as first:
        handle = await start(client, task)
        await until(lambda: list(tmp_path.glob("sandboxes/*/**/answer.txt")), 60)
        first.kill()
    (answer,) = tmp_path.glob("sandboxes/*/**/answer.txt")
    (answer.parent / "go").touch()  # the harness ends while nobody watches
    with worker(client, proxy, tmp_path):
        async with asyncio.timeout(90):
            result: RolloutResult = await handle.result()
    assert (result.ending.outcome, result.attempts, result.reward) == (Outcome.COMPLETED, 1, 1.0)
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert result.trajectory
    (row,) = pq.read_table(tmp_path / "storage" / result.trajectory.path).to_pylist()
    assert (row["attempt"], row["reward"], row["calls"], row["trainable"]) == (1, 1.0, 0, False)
    assert proxy.status(row["session"]).state == "closed"


async def test_a_cancelled_rollout_leaves_no_sandbox_and_a_row(client: Client, proxy: Proxy, task: Path, tmp_path: Path) -> None:
    with worker(client, proxy, tmp_path):
        handle = await start(client, task)
        await until(lambda: list(tmp_path.glob("sandboxes/*/**/answer.txt")), 60)
        await handle.cancel()
        async with asyncio.timeout(60):
            result: RolloutResult = await handle.result()
    assert (result.ending.outcome, result.attempts) == (Outcome.CANCELLED, 1)
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert result.trajectory
    (row,) = pq.read_table(tmp_path / "storage" / result.trajectory.path).to_pylist()
    assert (row["outcome"], row["reward"]) == ("cancelled", None)
    assert proxy.status(row["session"]).state == "closed"
