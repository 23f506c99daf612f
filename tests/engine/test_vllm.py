"""Token-exactness against a real vLLM: what is recorded is what was sampled, and what is published is what is served."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.harnesses import get_harness
from activities.harnesses.base import HarnessContext
from activities.policy.publish import load, publish_policy, tensors
from activities.sandboxes.base import SandboxSpec
from activities.sandboxes.bubblewrap import BubblewrapBackend
from contracts.config import HarnessConfig
from contracts.identity import version_prefix
from contracts.sessions import Sampling
from contracts.updates import PublishRequest, UpdateResult, VersionManifest
from infra.settings import settings
from infra.storage import Storage
from tests.proxy.clients import Client, user
from tests.support.processes import ROOT, TRAINER_PYTHON
from tests.support.proxy import Proxy, proxy_server
from tests.support.reference import reference_logprobs
from tests.support.vllm import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROMPT = [20, 30, 40, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def proxy(vllm: Vllm, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    vllm.set_label("run@0")
    with proxy_server(tiny_model, {"policy": vllm.url}, tmp_path_factory.mktemp("proxy")) as server:
        yield server


@pytest.fixture
def publishing(vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """The deployment's settings for a publication to the real engine; its weights are put back in the end."""
    monkeypatch.setenv("OPENFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENFORGE_ENGINES", f"policy={vllm.url}")
    monkeypatch.setenv("OPENFORGE_ENGINE_RELOAD", "reload_policy_weights")
    settings.cache_clear()
    yield Storage.of(settings())
    settings.cache_clear()


def make_version(storage: Storage, model: Path, run: str, version: int, seed: int) -> Path:
    """Store another random model of the same shape as a version; returns its directory."""
    root = storage.local_root
    assert root
    directory = root / version_prefix(run, version)
    script = ROOT / "tests/support/tiny_model.py"
    subprocess.run([TRAINER_PYTHON, script, directory, "--seed", str(seed)], check=True, capture_output=True, env={"OMP_NUM_THREADS": "1"})
    files = {file.name: storage.write(f"{version_prefix(run, version)}/{file.name}", file.read_bytes()) for file in directory.iterdir()}
    manifest = VersionManifest(
        run=run, version=version, parent=0, files=files, tensors=sorted(tensors(directory)), result=UpdateResult(version=version, rows=1)
    )
    storage.write(f"{version_prefix(run, version)}/manifest.json", manifest.model_dump_json().encode())
    return directory


async def publish(run: str, version: int, model: Path) -> int:
    request = PublishRequest(run=run, version=version, base_model=str(model))
    return (await ActivityEnvironment().run(publish_policy, request)).loaded


def test_what_is_recorded_is_what_the_engine_sampled(proxy: Proxy, vllm: Vllm) -> None:
    session, key = proxy.open(sampling=Sampling(temperature=0.0, max_tokens=16))
    Client(proxy.url, key).message([user("count the files")])
    (call,) = proxy.calls(session).calls
    choice = vllm.generate(call.prompt_ids, temperature=0.0, max_tokens=16)
    assert call.response_ids == choice["token_ids"]
    assert call.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]  # type: ignore[index]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_log_probabilities_are_those_of_the_distribution_that_was_sampled(
    proxy: Proxy, tiny_model: Path, temperature: float
) -> None:
    session, key = proxy.open(member=int(10 * temperature), sampling=Sampling(temperature=temperature, max_tokens=24))
    client = Client(proxy.url, key)
    history = [user("one")]
    for word in ("two", "three"):
        history += [client.message(history), user(word)]
    calls = proxy.calls(session).calls
    expected = reference_logprobs(tiny_model, [(call.prompt_ids, call.response_ids) for call in calls], temperature)
    for call, logprobs in zip(calls, expected, strict=True):
        assert max(abs(one - other) for one, other in zip(call.logprobs, logprobs, strict=True)) < 1e-3


async def test_real_codex_is_served_by_real_vllm(proxy: Proxy, tmp_path: Path) -> None:
    """The weights are random, so the answer is noise; that it is recorded exactly and that Codex accepts it is the point."""
    session, key = proxy.open(member=2, sampling=Sampling(temperature=1.0, max_tokens=8))
    harness = get_harness(HarnessConfig(name="codex", options={"instructions": "Answer."}))
    backend = BubblewrapBackend(root=tmp_path, proxy_socket=proxy.socket)
    spec = SandboxSpec(
        id="box", owner={}, image="debian", cpus=1, memory_mb=1024, pids=64, file_size_mb=64, deadline=time.time() + 120,
        workdir="/app", read_only=harness.read_only(),
    )  # fmt: skip
    context = HarnessContext(instruction="Say something.", workdir="/app", api_key=SecretStr(key), max_context=4096)
    await backend.create(spec)
    try:
        await backend.put("box", harness.files(context))
        await backend.start("box", "harness", harness.command(context), env=harness.env(context), timeout=90)
        status = await backend.wait("box", "harness", 90)
        logs = await backend.logs("box", "harness", 4000)
    finally:
        await backend.destroy("box")
    recorded = proxy.calls(session).calls
    assert recorded, logs
    assert recorded[0].dialect == "responses"
    assert {span.version for call in recorded for span in call.versions} == {0}
    assert {call.segment for call in recorded} == {0}
    assert status.state == "exited"


def test_a_random_model_calls_the_tool_that_it_must_and_answers_in_the_schema_that_it_must(proxy: Proxy, vllm: Vllm) -> None:
    session, key = proxy.open(member=30, sampling=Sampling(temperature=1.0, max_tokens=3000))
    client = Client(proxy.url, key)
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": schema}} for name in ("run", "look")]
    look = {"type": "function", "function": {"name": "look"}}
    for number in range(10):  # it says something else each time, with marks of its form among its thoughts and spelt in letters
        message = client.message([user(f"one {number}")], tools=tools, tool_choice=look, parallel_tool_calls=False)
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"])["kind"] in ("a", "b")
    message = client.message([user("two")], tools=tools, tool_choice="required")
    assert {call["function"]["name"] for call in message["tool_calls"]} <= {"run", "look"}
    form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": schema}}
    message = client.message([user("three")], tools=[], response_format=form)
    assert json.loads(message["content"])["kind"] in ("a", "b")
    refused = client.chat([user("four")], tools=[], response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}})
    assert (refused.status_code, proxy.status(session).engine_failures) == (400, 0), refused.text
    assert {call.finish_reason for call in proxy.calls(session).calls} == {"tool_calls", "stop"}


def test_the_engine_ends_an_answer_at_a_stop_text(proxy: Proxy, vllm: Vllm) -> None:
    session, key = proxy.open(member=31, sampling=Sampling(temperature=0.0, max_tokens=30))
    client = Client(proxy.url, key)
    text = client.message([user("one")], tools=[])["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    assert client.message([user("one")], tools=[], stop=[stop])["content"] == text.split(stop)[0]
    whole, ended = proxy.calls(session).calls
    assert ended.stop_sequence == stop
    assert whole.response_ids[: len(ended.response_ids)] == ended.response_ids


async def test_published_weights_are_served_with_their_version(publishing: Storage, vllm: Vllm, tiny_model: Path) -> None:
    directory = make_version(publishing, tiny_model, "pub", 1, seed=7)
    try:
        assert await publish("pub", 1, tiny_model) == 1
        choice = vllm.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True)
        served = [entry["logprob"] for entry in choice["logprobs"]["content"]]  # type: ignore[index]
        (expected,) = reference_logprobs(directory, [(PROMPT, choice["token_ids"])])  # type: ignore[list-item]
        assert max(abs(one - other) for one, other in zip(served, expected, strict=True)) < 1e-3
        assert choice["weight_versions"] == [{"version": "pub@1", "start": 0, "end": 8}]
        assert await publish("pub", 1, tiny_model) == 0
    finally:
        assert await publish("run", 0, tiny_model) == 1
    choice = vllm.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True)
    (expected,) = reference_logprobs(tiny_model, [(PROMPT, choice["token_ids"])])  # type: ignore[list-item]
    assert abs(choice["logprobs"]["content"][0]["logprob"] - expected[0]) < 1e-3  # type: ignore[index]


async def test_weights_that_lack_a_tensor_or_differ_from_their_digest_never_reach_the_engine(
    publishing: Storage, vllm: Vllm, tiny_model: Path
) -> None:
    directory = make_version(publishing, tiny_model, "bad", 1, seed=8)
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ApplicationError, match="its digest differs") as caught:
        await publish("bad", 1, tiny_model)
    assert caught.value.non_retryable
    (directory / "model.safetensors").write_bytes(whole)
    other = tiny_model.parent / "more-tensors"
    shutil.copytree(tiny_model, other, dirs_exist_ok=True)
    script = (
        "import sys, torch; from safetensors.torch import load_file, save_file; path = sys.argv[1] + '/model.safetensors'\n"
        "tensors = load_file(path); tensors |= {name: torch.zeros(1) for name in ('extra.weight', 'model.norm.weight')}\n"
        "save_file(tensors, path)"
    )
    subprocess.run([TRAINER_PYTHON, "-c", script, other], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with pytest.raises(ApplicationError, match=r"does not have the tensors of .*extra\.weight.*model\.norm\.weight"):
        await publish("bad", 1, other)
    with pytest.raises(ApplicationError, match="is not finished"):
        await publish("bad", 2, tiny_model)
    assert vllm.generate(PROMPT, max_tokens=1)["weight_versions"][0]["version"] == "run@0"  # type: ignore[index]


async def test_an_engine_whose_load_failed_answers_only_after_the_next_has_succeeded(
    publishing: Storage, vllm: Vllm, tiny_model: Path, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        with pytest.raises(ApplicationError, match="answered 500") as caught:
            await load(client, vllm.url, tmp_path / "nothing", "run@0")
    assert not caught.value.non_retryable
    waiting = asyncio.create_task(asyncio.to_thread(vllm.generate, PROMPT, temperature=0.0, max_tokens=2))
    assert not (await asyncio.wait({waiting}, timeout=1))[0]
    assert await publish("run", 0, tiny_model) == 1
    choice = await waiting
    (expected,) = reference_logprobs(tiny_model, [(PROMPT, choice["token_ids"])])  # type: ignore[list-item]
    assert abs(choice["logprobs"]["content"][0]["logprob"] - expected[0]) < 1e-3  # type: ignore[index]
    assert choice["weight_versions"][0]["version"] == "run@0"  # type: ignore[index]


async def test_an_unknown_pool_names_those_that_exist(publishing: Storage, tiny_model: Path) -> None:
    with pytest.raises(ApplicationError, match="unknown engine pool 'gpu'; known: policy"):
        await ActivityEnvironment().run(publish_policy, PublishRequest(run="r", version=0, base_model=str(tiny_model), engine="gpu"))
