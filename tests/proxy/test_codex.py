"""Real Codex against the proxy, with a StubEngine as the model: each protocol that Codex speaks, by the name it gives the model.

An unknown name means function tools; `gpt-5.5` adds a freeform `apply_patch` and `tool_search`; from `gpt-5.6-sol` on there is one
freeform tool that takes JavaScript, and the tools come as an item of the input.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.sessions import CallKind, CallRecord, SegmentReason
from tests.proxy.clients import text_of_call
from tests.support.codex import run_codex
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

PATCH = "*** Begin Patch\n*** Add File: b.txt\n+new\n*** End Patch\n"
WITH_SEARCH = {"lean": False, "config": {"web_search": "disabled"}}
REMOTE_COMPACTION = {"config": {"model_providers": {"proxy": {"name": "OpenAI"}}, "model_auto_compact_token_limit": 1}}


def script(stub: StubEngine, *answers: str) -> None:
    """Have the engine give these answers, one a call, and then the last one again."""
    left = list(answers)
    stub.script = lambda _: left.pop(0) if len(left) > 1 else left[0]


def one_segment(proxy: Proxy, stub: StubEngine, session: str, calls: int) -> list[CallRecord]:
    """The calls of a session, which are one chain of tokens."""
    recorded = proxy.calls(session).calls
    assert [call.parent for call in recorded] == [None, *range(calls - 1)]
    assert {call.segment for call in recorded} == {0}
    assert [call.prompt_ids for call in recorded] == stub.prompts
    return recorded


def test_codex_patches_a_file_by_a_freeform_tool(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path) -> None:
    script(stub, text_of_call("apply_patch", input=PATCH), "done")
    session, key = proxy.open(member)
    work = run_codex(tmp_path, proxy.url, key, model="gpt-5.5")
    assert (work / "b.txt").read_text() == "new\n"
    calls = one_segment(proxy, stub, session, 2)
    (offered,) = [tool["function"] for tool in calls[0].tools if tool["function"]["name"] == "apply_patch"]
    assert "lark grammar:\nstart: begin_patch hunk+ end_patch" in offered["description"]
    assert calls[1].messages[-1]["content"].endswith("A b.txt\n")


@pytest.mark.parametrize("model", ["gpt-5.6-sol", "gpt-6-sol"])
def test_codex_runs_javascript_in_code_mode(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path, model: str) -> None:
    script(stub, text_of_call("functions__exec", input='await tools.exec_command({cmd: "echo hi > c.txt"}); text(6 * 7);'), "done")
    session, key = proxy.open(member)
    work = run_codex(tmp_path, proxy.url, key, model=model)
    assert (work / "c.txt").read_text() == "hi\n"
    calls = one_segment(proxy, stub, session, 2)
    assert {"functions__exec", "functions__wait"} <= {tool["function"]["name"] for tool in calls[0].tools}
    assert calls[1].messages[-1]["content"].endswith("42")


def test_a_malformed_input_of_a_freeform_tool_does_not_break_the_segment(
    proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path
) -> None:
    script(stub, text_of_call("functions__exec", code="text(1)"), text_of_call("functions__exec", input="text(2)"), "done")
    session, key = proxy.open(member)
    run_codex(tmp_path, proxy.url, key, model="gpt-6-sol")
    calls = one_segment(proxy, stub, session, 3)
    assert "Script failed" in calls[1].messages[-1]["content"]
    assert calls[2].messages[-1]["content"].endswith("2")


def test_codex_finds_tools_and_the_model_can_call_them(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path) -> None:
    search = text_of_call("tool_search", query="spawn agent")
    script(stub, search, text_of_call("multi_agent_v1__close_agent", target="nobody"), "done")
    session, key = proxy.open(member)
    run_codex(tmp_path, proxy.url, key, model="gpt-5.5", options=WITH_SEARCH)
    calls = one_segment(proxy, stub, session, 3)
    found = [tool["function"]["name"] for tool in json.loads(calls[1].messages[-1]["content"])]
    assert "multi_agent_v1__close_agent" in found
    assert "invalid agent id nobody" in calls[2].messages[-1]["content"]


@pytest.mark.parametrize("model", ["policy", "gpt-6-sol"])
def test_codex_compacts_by_an_item_that_the_proxy_reads_back(
    proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path, model: str
) -> None:
    run = {"policy": text_of_call("exec_command", cmd="true"), "gpt-6-sol": text_of_call("functions__exec", input="text(1)")}
    script(stub, run[model], "<think>\nhm\n</think>\n\nIt ran.", "done")
    session, key = proxy.open(member)
    run_codex(tmp_path, proxy.url, key, model=model, options=REMOTE_COMPACTION)
    calls = proxy.calls(session).calls
    assert [call.kind for call in calls] == [CallKind.TURN, CallKind.COMPACTION, CallKind.TURN]
    assert [call.parent for call in calls] == [None, 0, None]
    assert [call.segment_reason for call in calls] == [SegmentReason.FIRST, SegmentReason.FIRST, SegmentReason.COMPACTION]
    assert calls[2].messages[-1]["content"].endswith("\n\nIt ran.")
    assert [call.prompt_ids for call in calls] == stub.prompts


def test_codex_compacts_by_a_prompt_of_its_own_too(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": {"model_auto_compact_token_limit": 1}}
    script(stub, text_of_call("functions__exec", input="text(1)"), "It ran.", "done")
    session, key = proxy.open(member)
    run_codex(tmp_path, proxy.url, key, model="gpt-6-sol", options=options)
    calls = proxy.calls(session).calls
    assert [call.kind for call in calls] == [CallKind.TURN, CallKind.COMPACTION, CallKind.TURN]
    assert [call.parent for call in calls] == [None, None, None]
    assert "It ran." in calls[2].messages[-1]["content"]


def team(prompt: str) -> str:
    """Sends a helper, waits for it, and says that all is done; the helper says what it did."""
    if "Task name: /root/helper" in prompt:
        return "I helped."
    if "Sender: /root/helper" in prompt:
        return "done"
    if "<tool_response>" in prompt:
        return text_of_call("collaboration__wait_agent", timeout_ms=60_000)
    return text_of_call("collaboration__spawn_agent", task_name="helper", message="Please help.")


def test_what_codexs_agents_tell_each_other_reaches_them(proxy: Proxy, stub: StubEngine, member: int, tmp_path: Path) -> None:
    stub.script = team
    session, key = proxy.open(member)
    run_codex(tmp_path, proxy.url, key, model="gpt-6-sol", without=("--ephemeral",))  # an agent is sent with what is on disk
    calls = proxy.calls(session).calls
    (helper,) = [call for call in calls if call.kind is CallKind.SUBAGENT]
    assert helper.messages[-1]["content"].endswith("Sender: /root\nPayload:\nPlease help.")
    mine = [call for call in calls if call is not helper]
    assert {call.segment for call in mine} == {0}
    assert helper.segment_reason is SegmentReason.SUBAGENT
    assert mine[-1].messages[-1]["content"].endswith("Payload:\nI helped.")
