"""Rewards by the protocol, and a verifier that breaks is not the agent's fault."""

import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.rewards import verify
from activities.rewards.verifier import read_reward
from activities.sandboxes.base import SandboxSpec
from activities.sandboxes.bubblewrap import BubblewrapBackend
from activities.tasks import Task, load_task
from contracts.failures import Cause, RolloutError


@pytest.mark.parametrize(
    ("in_json", "in_text", "reward"),
    [
        (None, b"1", 1.0),
        (None, b" 0.25\n", 0.25),
        (None, b"-3", -3.0),
        (b'{"reward": 0.5, "speed": 9}', b"1", 0.5),
        (b'{"only": 2}', None, 2.0),
        (b'{"a": 0, "b": 1}', None, 0.5),
    ],
)
def test_a_valid_reward_is_read(in_json: bytes | None, in_text: bytes | None, reward: float) -> None:
    assert read_reward(in_json, in_text)[0] == reward


@pytest.mark.parametrize(
    ("in_json", "in_text", "message"),
    [
        (None, None, "neither reward.json nor reward.txt"),
        (None, b"", "not a number"),
        (None, b"passed", "'passed', not a number"),
        (None, b"nan", "not finite"),
        (None, b"inf", "not finite"),
        (b"", b"1", "not JSON"),
        (b"[1]", b"1", "must be an object"),
        (b"{}", b"1", "at least one number"),
        (b'{"a": {"b": 1}}', b"1", "'a' is nested"),
        (b'{"a": "1"}', b"1", "not a finite number"),
        (b'{"a": true}', b"1", "not a finite number"),
        (b'{"a": NaN}', b"1", "not a finite number"),
    ],
)
def test_anything_else_is_no_reward_and_never_zero(in_json: bytes | None, in_text: bytes | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_reward(in_json, in_text)


@given(st.one_of(st.none(), st.binary(max_size=40)), st.one_of(st.none(), st.binary(max_size=40)))
def test_no_bytes_make_it_do_anything_but_give_a_number_or_say_why(in_json: bytes | None, in_text: bytes | None) -> None:
    try:
        reward, _ = read_reward(in_json, in_text)
    except ValueError as error:
        assert str(error)
    else:
        assert math.isfinite(reward)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_every_flat_object_of_numbers_is_a_reward(values: dict[str, float]) -> None:
    assert read_reward(json.dumps(values).encode(), None)[1] == values


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[BubblewrapBackend]:
    made = BubblewrapBackend(root=tmp_path / "sandboxes", proxy_socket=None)
    spec = SandboxSpec(
        id="box", owner={}, image="debian", cpus=1, memory_mb=256, pids=64, file_size_mb=8, deadline=time.time() + 99, workdir="/app"
    )
    await made.create(spec)
    yield made
    await made.destroy("box")


def task(tmp_path: Path, test: str, timeout: float = 20) -> Task:
    root = tmp_path / "task"
    for name, text in {
        "task.toml": f"[verifier]\ntimeout_sec = {timeout}\n[verifier.env]\nWORD = 'given'\n",
        "instruction.md": "x",
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
        "tests/test.sh": test,
        "tests/data": "beside",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return load_task(root)


async def test_the_exit_code_says_nothing_and_the_files_are_there(backend: BubblewrapBackend, tmp_path: Path) -> None:
    test = 'test "$(cat /tests/data) $WORD $PWD" = "beside given /app" && echo 0.5 > /logs/verifier/reward.txt; exit 3'
    assert (await verify(backend, "box", task(tmp_path, test))).reward == 0.5


async def test_a_reward_planted_by_the_agent_is_removed(backend: BubblewrapBackend, tmp_path: Path) -> None:
    await backend.exec(
        "box", ["bash", "-c", "echo 1 > /logs/verifier/reward.txt; mkdir /tests; echo 'echo 1' > /tests/test.sh"], timeout=10
    )
    with pytest.raises(RolloutError, match="neither reward") as caught:
        await verify(backend, "box", task(tmp_path, "true"))
    assert caught.value.cause is Cause.VERIFIER_ERROR


async def test_a_planted_link_cannot_redirect_the_tests(backend: BubblewrapBackend, tmp_path: Path) -> None:
    target = tmp_path / "host"
    target.mkdir()
    await backend.exec("box", ["bash", "-c", f"rm -rf /logs; ln -s {target} /logs; ln -s {target} /tests"], timeout=10)
    assert (await verify(backend, "box", task(tmp_path, "echo 1 > /logs/verifier/reward.txt"))).reward == 1
    assert list(target.iterdir()) == []


async def test_tools_that_could_not_be_installed_are_an_error_and_not_a_zero(backend: BubblewrapBackend, tmp_path: Path) -> None:
    test = "curl -sSf https://example.invalid/uv.sh | sh; echo 0 > /logs/verifier/reward.txt"
    with pytest.raises(RolloutError, match="could not install its tools without a network") as caught:
        await verify(backend, "box", task(tmp_path, test))
    assert caught.value.cause is Cause.VERIFIER_ERROR


async def test_a_verifier_that_does_not_end_is_a_timeout(backend: BubblewrapBackend, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="ran past 1 s") as caught:
        await verify(backend, "box", task(tmp_path, "sleep 50", timeout=1))
    assert caught.value.cause is Cause.VERIFIER_TIMEOUT
