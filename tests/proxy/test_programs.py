"""Real harnesses from the registries against the proxy, with a StubEngine as the model: each ends well, and its session is one segment."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.clients import text_of_call
from tests.support.programs import program, run
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

pytestmark = pytest.mark.slow


def agent(tool: str, argument: str, last: str) -> Any:
    """A script: three commands by the harness's shell tool, one of which shows what the first has written, then `last`."""
    commands = ["echo hello > a.txt", "cat a.txt", "echo done >> a.txt"]

    def answer(prompt: str) -> str:
        turn = prompt.count("<tool_response>")
        return "I do it." + text_of_call(tool, **{argument: commands[turn]}) if turn < len(commands) else last

    return answer


def check(proxy: Proxy, stub: StubEngine, session: str, home: Path, dialect: str, calls: int) -> None:
    """The work is done; the session is one chain of tokens, each of which was sampled once."""
    assert (home / "work/a.txt").read_text() == "hello\ndone\n"
    recorded = proxy.calls(session).calls
    assert {call.dialect for call in recorded} == {dialect}
    assert [call.parent for call in recorded] == [None, *range(calls - 1)]
    assert {call.segment for call in recorded} == {0}
    assert [call.prompt_ids for call in recorded] == stub.prompts
    assert "hello" in stub.text(recorded[2].prompt_ids[len(recorded[1].prompt_ids) :])


def test_mini_swe_agent(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path) -> None:
    stub.script = agent("bash", "command", text_of_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    session, key = proxy.open(member)
    environment = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_BASE": f"{proxy.url}/v1",
        "OPENAI_API_KEY": key,
    }
    run(
        [program("mini"), "-y", "--exit-immediately", "-m", "openai/policy", "-o", "traj.json", "-t", "Write a.txt."], tmp_path, environment
    )
    check(proxy, stub, session, tmp_path, "chat", 4)


def test_pi(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path) -> None:
    stub.script = agent("bash", "command", "done")
    session, key = proxy.open(member)
    provider = {
        "baseUrl": f"{proxy.url}/v1",
        "api": "openai-completions",
        "apiKey": key,
        "models": [{"id": "policy", "name": "Policy", "reasoning": False, "input": ["text"], "contextWindow": 131072, "maxTokens": 8192}],
    }
    settings = tmp_path / ".pi/agent"
    settings.mkdir(parents=True)
    (settings / "models.json").write_text(json.dumps({"providers": {"proxy": provider}}))
    command = [program("pi"), "-p", "--mode", "json", "--provider", "proxy", "--model", "policy", "--no-session", "Write a.txt."]
    run(command, tmp_path, {"PI_OFFLINE": "1"})
    check(proxy, stub, session, tmp_path, "chat", 4)


@pytest.mark.parametrize(
    ("api", "dialect"), [("openai-responses", "responses"), ("openai-completions", "chat"), ("anthropic-messages", "messages")]
)
def test_openclaw(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path, api: str, dialect: str) -> None:
    stub.script = agent("exec", "command", "done")
    session, key = proxy.open(member)
    model = {"id": "policy", "name": "Policy", "reasoning": True, "input": ["text"], "contextWindow": 131072, "maxTokens": 8192}
    free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    base_url = proxy.url if api == "anthropic-messages" else f"{proxy.url}/v1"
    config = {
        "update": {"checkOnStart": False},
        "agents": {"defaults": {"model": {"primary": "proxy/policy"}}},
        "tools": {"profile": "coding", "deny": ["process", "sessions_spawn", "subagents", "sessions_yield"]},
        "models": {
            "mode": "replace",
            "providers": {"proxy": {"baseUrl": base_url, "apiKey": key, "api": api, "models": [{**model, "cost": free}]}},
        },
    }
    (tmp_path / "openclaw.json").write_text(json.dumps(config))
    command = [program("openclaw"), "agent", "exec", "Write a.txt.", "--config", tmp_path / "openclaw.json"]
    run([*command, "--cwd", tmp_path / "work", "--json", "--timeout", "120"], tmp_path, {})
    check(proxy, stub, session, tmp_path, dialect, 4)
