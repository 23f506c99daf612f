"""Run a task's verifier and read its reward, by Harbor's protocol.

1. The agent and everything it started have ended before the tests come in; what it left in /logs/verifier and /tests is removed.
2. The exit code of `test.sh` says nothing. `reward.json` wins over `reward.txt`.
3. No valid reward is a failure of the verifier, never a reward of 0; a verifier that could not install its tools without a network
   says so.
"""

import json
import math
import re
from typing import Final

from activities.sandboxes.base import SandboxBackend
from activities.tasks.harbor import Task
from contracts.failures import Cause, RolloutError
from contracts.rollouts import Score

REWARD_JSON: Final = "/logs/verifier/reward.json"
REWARD_TEXT: Final = "/logs/verifier/reward.txt"
STDOUT: Final = "/logs/verifier/test-stdout.txt"

_INSTALL_FAILED: Final = re.compile(
    r"Could not resolve|Temporary failure (in name resolution|resolving)|Name or service not known|Network is unreachable"
    r"|Failed to establish a new connection|No matching distribution found|Unable to locate package|Failed to fetch"
    r"|Could not connect to|Connection refused.*(index|mirror|archive)|dns error|ENOTFOUND|EAI_AGAIN"
    r"|(apt-get|apt|curl|wget|uv|uvx|pip|npm): command not found",
)


async def verify(backend: SandboxBackend, sandbox: str, task: Task) -> Score:
    """Score the sandbox's state. Raises RolloutError with VERIFIER_TIMEOUT or VERIFIER_ERROR."""
    name = f"the verifier of {task.name}"
    await backend.remove(sandbox, ["/logs/verifier", "/tests"])
    await backend.put(sandbox, {"/tests": task.tests, STDOUT: b""})  # and so /logs/verifier is a directory, whatever the agent made of it
    result = await backend.exec(
        sandbox,
        ["bash", "-c", f"(bash /tests/test.sh) > {STDOUT} 2>&1"],
        env={**task.image.env, **task.verifier_env},
        cwd=task.image.workdir,
        timeout=task.verifier_timeout,
    )
    log = await _read(backend, sandbox, STDOUT)
    text = (log or b"")[-4000:].decode(errors="replace")
    if result.timed_out:
        raise RolloutError(Cause.VERIFIER_TIMEOUT, f"the verifier of {task.name} ran past {task.verifier_timeout:g} s: {text[-500:]}")
    # Tools that could not be installed make any reward meaningless: many test scripts go on and write 0.
    installing = _INSTALL_FAILED.search(text)
    try:
        reward, parts = read_reward(await _read(backend, sandbox, REWARD_JSON), await _read(backend, sandbox, REWARD_TEXT))
    except ValueError as error:
        reason = f"it could not install its tools without a network ({installing[0]})" if installing else str(error)
        raise RolloutError(Cause.VERIFIER_ERROR, f"the verifier of {task.name} gave no valid reward: {reason}: {text[-500:]}") from error
    if installing and reward == 0:
        raise RolloutError(
            Cause.VERIFIER_ERROR,
            f"{name} could not install its tools without a network ({installing[0]}); its 0 is not a reward",
        )
    return Score(reward=reward, parts=parts, seconds=result.seconds, log_tail=text[-1000:])


def read_reward(reward_json: bytes | None, reward_text: bytes | None) -> tuple[float, dict[str, float]]:
    """(reward, named parts) by the protocol. Raises ValueError saying what is wrong; nothing at all is wrong too.

    The reward of a `reward.json` is its entry `reward`, or its only entry, or the mean of its entries.
    """
    if reward_json is not None:
        return _from_json(reward_json)
    if reward_text is None:
        raise ValueError("it wrote neither reward.json nor reward.txt")
    text = reward_text.decode(errors="replace").strip()
    try:
        reward = float(text)
    except ValueError:
        raise ValueError(f"reward.txt holds {text[:60]!r}, not a number") from None
    if not math.isfinite(reward):
        raise ValueError(f"reward.txt holds {text!r}, which is not finite")
    return reward, {}


def _from_json(raw: bytes) -> tuple[float, dict[str, float]]:
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"reward.json is not JSON: {error}") from None
    if not isinstance(values, dict) or not values:
        raise ValueError("reward.json must be an object with at least one number")
    parts: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict | list):
            raise ValueError(f"reward.json: {name!r} is nested; values must be numbers")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"reward.json: {name!r} is {value!r}, not a finite number")
        parts[name] = float(value)
    return parts.get("reward", sum(parts.values()) / len(parts)), parts


async def _read(backend: SandboxBackend, sandbox: str, path: str) -> bytes | None:
    try:
        return await backend.get(sandbox, path)
    except FileNotFoundError:
        return None
