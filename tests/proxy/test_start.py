"""Starting the proxy: what is wrong is said in one line, and the exit status is 2."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import BASE_PYTHON, ROOT
from tests.support.proxy import proxy_server
from tests.support.stub_engine import stub_engine


def start(tmp_path: Path, tokenizer: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the proxy until it gives up."""
    command = [BASE_PYTHON, "-m", "proxy", "--tokenizer", tokenizer, "--journal", tmp_path / "journal.db", *arguments]
    settings = {"OPENFORGE_PROXY_ADMIN_TOKEN": "token", **environment}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--tokenizer", "nowhere"), {}, "proxy: there is no tokenizer.json in nowhere"),
        (("--renderer", '{"name": "qwen99"}'), {}, "proxy: the renderer configuration"),
        ((), {"OPENFORGE_PROXY_ADMIN_TOKEN": ""}, "proxy: OPENFORGE_PROXY_ADMIN_TOKEN is not set"),
        (("--journal", "/proc/journal.db"), {}, "proxy: the journal /proc/journal.db cannot be used"),
        (("--socket", "/proc/proxy.sock"), {}, "proxy: cannot listen on /proc/proxy.sock"),
    ],
    ids=["tokenizer", "renderer", "token", "journal", "socket"],
)
def test_a_bad_setting_is_named(
    tmp_path: Path, tiny_model: Path, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    ended = start(tmp_path, tiny_model, "--port", "0", *arguments, **environment)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(message), ended.stderr


def test_a_port_in_use_is_named(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = start(tmp_path, tiny_model, "--port", str(port))
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr


def test_a_model_type_without_a_renderer_is_named_with_those_that_have_one(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    ended = start(tmp_path, tmp_path, "--port", "0")
    assert "no renderer is registered for model type 'bert' (known: qwen3, qwen3_moe)" in ended.stderr


def test_a_signal_ends_the_proxy_with_status_0_and_its_logs_hold_no_key(tmp_path: Path, tiny_model: Path) -> None:
    with stub_engine(tiny_model, lambda _: "OK") as engine, proxy_server(tiny_model, {"policy": engine.url}, tmp_path) as proxy:
        _, key = proxy.open()
        assert proxy.admin.post(f"/s/{key}/v1/responses", json={"input": "hi"}).status_code == 200
        assert proxy.admin.post(f"/s/{key}x/v1/responses", json={"input": "hi"}).status_code == 401
        os.kill(proxy.server.process.pid, signal.SIGTERM)
        assert proxy.server.process.wait(20) == 0
        assert key not in proxy.server.log.read_text()
