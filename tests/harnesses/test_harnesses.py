"""Adapters: what they put in place, what they refuse, and a real Codex in a real sandbox."""

import json
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from activities.harnesses import get_harness
from activities.harnesses.base import HarnessContext
from activities.harnesses.codex import to_toml
from activities.sandboxes.base import ProcessLogs, ProcessStatus, SandboxSpec
from activities.sandboxes.bubblewrap import BubblewrapBackend
from contracts.config import HarnessConfig
from contracts.failures import Cause, RolloutError
from tests.support.stub_responses import serve_script

CONTEXT = HarnessContext(instruction="Do it.", workdir="/app", api_key=SecretStr("key-1"))
TREES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**31), 2**31), st.text(max_size=8), st.lists(st.integers(0, 9), max_size=3)),
    lambda children: st.dictionaries(st.text(min_size=1, max_size=6), children, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(min_size=1, max_size=6), TREES, max_size=5))
def test_any_table_survives_toml(table: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "codecs"}, "unknown harness 'codecs'; known: codex, command, oracle"),
        ({"name": "codex", "options": {"leen": True}}, r"leen: .*\(options: lean, instructions, config\)"),
        ({"name": "codex", "options": {"lean": "perhaps"}}, "lean: "),
        ({"name": "command"}, "run: Field required"),
        ({"name": "oracle", "options": {"x": 1}}, r"x: .*\(options: none\)"),
    ],
)
def test_a_harness_that_is_asked_for_wrongly_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_harness(HarnessConfig.model_validate(config))


def test_codex_is_pointed_at_the_proxy_and_the_key_is_in_the_environment_alone() -> None:
    harness = get_harness(HarnessConfig(name="codex", options={"instructions": "Short.", "config": {"features": {"goals": True}}}))
    files = harness.files(CONTEXT)
    config = tomllib.loads(bytes(files["/home/agent/.codex/config.toml"]).decode())  # type: ignore[arg-type]
    assert config["model_providers"]["proxy"]["base_url"] == "http://127.0.0.1:8300/v1"
    assert config["features"]["goals"] is True
    assert config["features"]["plugins"] is False
    assert files[config["model_instructions_file"]] == b"Short."
    assert all(b"key-1" not in content for content in files.values() if isinstance(content, bytes))
    assert harness.env(CONTEXT)["PROXY_KEY"] == "key-1"
    assert "key-1" not in " ".join(harness.command(CONTEXT))


def test_an_oracle_without_a_solution_cannot_run() -> None:
    with pytest.raises(RolloutError, match="no solution") as caught:
        get_harness(HarnessConfig(name="oracle")).files(CONTEXT)
    assert caught.value.cause is Cause.HARNESS_INSTALL


def test_a_crash_shows_the_end_of_the_log() -> None:
    status = ProcessStatus(state="exited", exit_code=7)
    with pytest.raises(RolloutError, match=r"codex exited with 7: .*the reason") as caught:
        get_harness(HarnessConfig()).check_end(status, ProcessLogs(stdout=b"", stderr=b"x" * 5000 + b" the reason"))
    assert caught.value.cause is Cause.HARNESS_CRASH


async def test_real_codex_runs_a_command_in_the_sandbox(tmp_path: Path) -> None:
    socket = tmp_path / "run" / "proxy.sock"
    socket.parent.mkdir()
    harness = get_harness(HarnessConfig(name="codex", options={"instructions": "Use one command."}))
    async with serve_script(socket, [("exec_command", {"cmd": "echo 42 > answer.txt"}), "All done."]) as requests:
        backend = BubblewrapBackend(root=tmp_path / "sandboxes", proxy_socket=socket)
        await backend.create(
            SandboxSpec(
                id="box", owner={}, image="debian", cpus=1, memory_mb=1024, pids=64, file_size_mb=64, deadline=time.time() + 99,
                workdir="/app", read_only=harness.read_only(),
            )
        )  # fmt: skip
        try:
            await backend.put("box", harness.files(CONTEXT))
            await backend.start("box", "harness", harness.command(CONTEXT), env=harness.env(CONTEXT), timeout=60)
            status = await backend.wait("box", "harness", 60)
            logs = await backend.logs("box", "harness", 10_000)
            assert status.exit_code == 0, logs
            assert await backend.get("box", "/app/answer.txt") == b"42\n"
        finally:
            await backend.destroy("box")
    assert [request["authorization"] for request in requests] == ["Bearer key-1"] * 2
    assert "Process exited with code 0" in json.dumps(requests[1]["body"]["input"])
    harness.check_end(status, logs)
