"""The local sandbox: what it isolates, what it limits, and that nothing is left of it."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from activities.sandboxes import open_backend, sweep
from activities.sandboxes.base import SandboxSpec
from activities.sandboxes.bubblewrap import BubblewrapBackend
from contracts.failures import Cause, RolloutError
from infra.settings import Settings

SALT = f".{os.getpid()}"  # a fraction of a second, by which this session's processes are told from another's
SPEC = SandboxSpec(
    id="box",
    owner={"run": "test"},
    image="debian:bookworm-slim",
    cpus=1,
    memory_mb=128,
    pids=32,
    file_size_mb=4,
    deadline=time.time() + 600,
    workdir="/app",
    env={"FROM_TASK": "yes"},
)


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[Path]:
    """A proxy's unix socket that answers every request with what it was sent."""
    path = tmp_path / "run" / "proxy.sock"
    path.parent.mkdir()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"seen: " + line)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path=str(path))
    yield path
    server.close()


@pytest.fixture
async def backend(tmp_path: Path, socket: Path) -> AsyncIterator[BubblewrapBackend]:
    made = BubblewrapBackend(root=tmp_path / "sandboxes", proxy_socket=socket)
    await made.create(SPEC)
    yield made
    for sandbox in await made.list_sandboxes():
        await made.destroy(sandbox.id)


async def shell(backend: BubblewrapBackend, command: str, timeout: float = 20) -> str:
    result = await backend.exec("box", ["bash", "-c", command], timeout=timeout)
    return (result.stdout + result.stderr).decode()


def processes_with(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if marker in (entry / "cmdline").read_text().replace("\0", " ") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("path", ["/root", str(Path.home()), "/var/log", "/etc/shadow", "/etc/ssl/private", str(Path(__file__).parents[2])])
async def test_the_hosts_files_are_not_there(backend: BubblewrapBackend, path: str) -> None:
    assert "No such file" in await shell(backend, f"ls -d {path}")


@pytest.mark.parametrize("path", ["/usr/x", "/usr/bin/x", "/etc/ssl/certs/x"])
async def test_the_system_cannot_be_written(backend: BubblewrapBackend, path: str) -> None:
    assert "Read-only file system" in await shell(backend, f"touch {path}")


async def test_it_is_not_root_and_cannot_make_namespaces(backend: BubblewrapBackend) -> None:
    assert (await shell(backend, "id -u")).strip() == "1000"
    assert "failed" in await shell(backend, "unshare -Ur true")


async def test_no_setting_of_the_kernel_can_be_written(backend: BubblewrapBackend) -> None:
    """Root's id without capabilities may write these by their mode alone: one of them names a program that the kernel runs as root."""
    assert "core_pattern" in await shell(backend, "ls /proc/sys/kernel")
    assert await shell(backend, "find /proc/sys -type f -writable") == ""
    message = await shell(backend, "exec 3>>/proc/sys/kernel/core_pattern")
    assert "Read-only file system" in message or "Permission denied" in message  # as root, as anyone else


async def test_it_sees_its_own_processes_only(backend: BubblewrapBackend) -> None:
    assert int(await shell(backend, "ls -d /proc/[0-9]* | wc -l")) < 10
    assert str(backend._root) not in await shell(backend, "cat /proc/*/cmdline")


async def test_its_environment_holds_what_was_given_and_nothing_of_ours(
    backend: BubblewrapBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFORGE_PROXY_ADMIN_TOKEN", "leaked")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "leaked")
    environment = await shell(backend, "env")
    assert "leaked" not in environment
    assert "FROM_TASK=yes" in environment
    assert "TZ=UTC" in environment


async def test_a_command_has_no_network_at_all(backend: BubblewrapBackend) -> None:
    assert (await shell(backend, "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | cut -d: -f1")).split() == ["lo"]
    assert "refused" in await shell(backend, "exec 3<>/dev/tcp/127.0.0.1/8300")


async def test_a_started_process_reaches_the_proxy_and_nothing_else(backend: BubblewrapBackend) -> None:
    script = "exec 3<>/dev/tcp/127.0.0.1/8300; echo hello >&3; cat <&3; exec 4<>/dev/tcp/127.0.0.1/22"
    await backend.start("box", "harness", ["bash", "-c", script], timeout=20)
    await backend.wait("box", "harness", 20)
    logs = await backend.logs("box", "harness", 1000)
    assert logs.stdout == b"seen: hello\n"
    assert b"refused" in logs.stderr


async def test_a_connection_waits_for_a_proxy_that_starts_again(backend: BubblewrapBackend, socket: Path) -> None:
    socket.unlink()
    await backend.start("box", "harness", ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8300; echo late >&3; cat <&3"], timeout=30)
    assert (await backend.status("box", "harness")).state == "running"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async with await asyncio.start_unix_server(answer, path=str(socket)):
        await backend.wait("box", "harness", 20)
    assert (await backend.logs("box", "harness", 100)).stdout == b"late\n"


async def test_too_much_memory_ends_it_and_says_so(backend: BubblewrapBackend) -> None:
    result = await backend.exec("box", ["python3", "-c", "import time; x = bytearray(400 * 2**20); time.sleep(20)"], timeout=30)
    assert result.out_of_memory
    assert result.exit_code != 0


async def test_what_every_process_in_it_used_is_accounted(backend: BubblewrapBackend) -> None:
    burn = "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'"
    await backend.start("box", "both", ["sh", "-c", f"{burn} & {burn}; wait"], timeout=30)
    assert 0.9 <= (await backend.wait("box", "both", 30)).cpu_seconds < 3
    await backend.start("box", "killed", ["sh", "-c", f"{burn}; sleep 30"], timeout=3)
    killed = await backend.wait("box", "killed", 30)
    assert killed.timed_out
    assert 0.4 <= killed.cpu_seconds < 3


async def test_no_more_processes_than_allowed_can_be_made(backend: BubblewrapBackend) -> None:
    program = "import os, signal\nfor made in range(200):\n  try: os.fork() or signal.pause()\n"
    program += "  except OSError: print(made, flush=True); os._exit(0)"
    assert 8 < int((await backend.exec("box", ["python3", "-c", program], timeout=20)).stdout) < SPEC.pids


async def test_a_fork_bomb_dies_with_its_process(backend: BubblewrapBackend) -> None:
    marker = f"sleep 98765{SALT}"
    result = await backend.exec("box", ["bash", "-c", f"for i in $(seq 100); do {marker} & done; wait"], timeout=3)
    assert result.timed_out
    assert processes_with(marker) == []


async def test_a_broken_pipe_ends_a_program_as_anywhere_else(backend: BubblewrapBackend) -> None:
    assert await shell(backend, "yes | head -1; echo ${PIPESTATUS[0]}") == "y\n141\n"


async def test_what_bubblewrap_cannot_do_is_said(backend: BubblewrapBackend) -> None:
    await backend.create(replace(SPEC, id="odd", read_only={"/opt/tool": Path("/nowhere/tool")}))
    result = await backend.exec("odd", ["true"], timeout=10)
    assert result.exit_code != 0
    assert b"Can't find source path /nowhere/tool" in result.stderr


async def test_a_file_cannot_grow_beyond_its_limit(backend: BubblewrapBackend) -> None:
    assert "File too large" in await shell(backend, "head -c 10000000 /dev/zero > big")
    assert (await shell(backend, "stat -c %s big")).strip() == str(4 * 2**20)


async def test_time_ends_it_and_everything_it_started(backend: BubblewrapBackend) -> None:
    marker = f"sleep 87654{SALT}"
    result = await backend.exec("box", ["bash", "-c", f"(setsid {marker} &) ; setsid nohup {marker} & {marker}"], timeout=1)
    assert result.timed_out
    assert result.exit_code is None
    assert processes_with(marker) == []


async def test_the_end_of_a_process_ends_what_it_left_running(backend: BubblewrapBackend) -> None:
    marker = f"sleep 76543{SALT}"
    await shell(backend, f"(setsid {marker} >/dev/null 2>&1 &) ; exit 0")
    assert processes_with(marker) == []


def start_and_be_killed(program: str) -> None:
    """Run a program until it says that it has started the process; then kill it."""
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert starter.stdout
    assert starter.stdout.readline() == b"started\n"
    os.killpg(starter.pid, 9)
    starter.wait()


async def test_a_process_outlives_its_starter_and_is_found_again(backend: BubblewrapBackend, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from activities.sandboxes.bubblewrap import BubblewrapBackend\n"
        f"backend = BubblewrapBackend(root=Path({str(tmp_path / 'sandboxes')!r}), proxy_socket=None)\n"
        "asyncio.run(backend.start('box', 'harness', ['bash', '-c', 'read x < pipe; echo $x'], timeout=60)); print('started', flush=True)\n"
        "import time; time.sleep(60)"
    )
    await shell(backend, "mkfifo pipe")
    await asyncio.to_thread(start_and_be_killed, program)
    assert (await backend.status("box", "harness")).state == "running"
    await shell(backend, "echo survived > pipe")
    assert (await backend.wait("box", "harness", 20)).exit_code == 0
    assert (await backend.logs("box", "harness", 100)).stdout == b"survived\n"


async def test_many_left_behind_have_ended_when_a_command_returns(backend: BubblewrapBackend) -> None:
    marker = f"sleep 21098{SALT}"
    for _ in range(10):
        await shell(backend, f"for i in $(seq 20); do (setsid {marker} >/dev/null 2>&1 &); done; exit 0")
        assert processes_with(marker) == []


async def test_starting_twice_runs_once(backend: BubblewrapBackend) -> None:
    for _ in range(2):
        await backend.start("box", "harness", ["bash", "-c", "echo run >> count"], timeout=20)
        await backend.wait("box", "harness", 20)
    assert await backend.get("box", "/app/count") == b"run\n"


async def test_a_killed_process_has_ended(backend: BubblewrapBackend) -> None:
    await backend.start("box", "harness", ["sleep", f"65432{SALT}"], timeout=60)
    await backend.kill("box", "harness")
    status = await backend.status("box", "harness")
    assert status.state == "exited"
    assert processes_with(f"sleep 65432{SALT}") == []


async def test_a_container_whose_supervisor_was_killed_has_ended(backend: BubblewrapBackend, tmp_path: Path) -> None:
    await backend.start("box", "harness", ["sh", "-c", f"echo; exec sleep 32109{SALT}"], timeout=60)
    while not (await backend.logs("box", "harness", 10)).stdout:
        await asyncio.sleep(0.01)
    pid, _ = (tmp_path / "sandboxes/box/run/harness/pid").read_text().split()
    os.kill(int(pid), 9)
    await backend.kill("box", "harness")
    assert (await backend.status("box", "harness")).state == "absent"
    assert processes_with(f"sleep 32109{SALT}") == []


async def test_a_supervisor_killed_at_any_moment_leaves_no_process(backend: BubblewrapBackend, tmp_path: Path) -> None:
    for number in range(20):
        await backend.start("box", f"p{number}", ["sleep", f"43210{SALT}"], timeout=60)
        pid, _ = (tmp_path / f"sandboxes/box/run/p{number}/pid").read_text().split()
        await asyncio.sleep(number / 1000)
        os.kill(int(pid), 9)
    await asyncio.sleep(0.5)  # for what a dead supervisor leaves to come to rest; too short makes the test weaker, never false
    await backend.destroy("box")
    deadline = time.monotonic() + 20
    while processes_with(f"sleep 43210{SALT}") and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert processes_with(f"sleep 43210{SALT}") == []


async def test_a_process_that_was_never_started_is_absent(backend: BubblewrapBackend) -> None:
    assert (await backend.status("box", "other")).state == "absent"


async def test_destroy_ends_processes_and_removes_files(backend: BubblewrapBackend, tmp_path: Path) -> None:
    await shell(backend, "mkdir -p locked/in && chmod 000 locked")
    await backend.start("box", "harness", ["sleep", f"54321{SALT}"], timeout=60)
    await backend.destroy("box")
    await backend.destroy("box")
    assert processes_with(f"sleep 54321{SALT}") == []
    assert not (tmp_path / "sandboxes" / "box").exists()
    assert await backend.list_sandboxes() == []


async def test_the_key_is_not_on_disk_while_the_harness_runs(backend: BubblewrapBackend, tmp_path: Path) -> None:
    await backend.start("box", "harness", ["sleep", f"43210{SALT}"], env={"KEY": "session-secret"}, timeout=60)
    files = [path for path in (tmp_path / "sandboxes").rglob("*") if path.is_file()]
    assert files
    assert all(b"session-secret" not in path.read_bytes() for path in files)


@pytest.mark.parametrize("path", ["/app/link/x", "/app/link"])
async def test_a_link_out_of_the_sandbox_is_not_followed(backend: BubblewrapBackend, tmp_path: Path, path: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("secret")
    await shell(backend, f"ln -s {outside} /app/link")
    with pytest.raises(FileNotFoundError):
        await backend.get("box", path)
    await backend.put("box", {"/app/link/y": b"planted"})
    assert sorted(file.name for file in outside.iterdir()) == ["x"]


@pytest.mark.parametrize("path", ["relative", "/app/../etc/passwd", "/usr/bin/tool"])
async def test_a_path_that_cannot_be_written_is_refused(backend: BubblewrapBackend, path: str) -> None:
    with pytest.raises(RolloutError, match=r"absolute path|read-only system") as caught:
        await backend.put("box", {path: b""})
    assert caught.value.cause is Cause.SANDBOX_IMAGE


async def test_a_pipe_left_by_the_agent_does_not_block_reading(backend: BubblewrapBackend) -> None:
    await shell(backend, "mkfifo answer.txt")
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        await backend.get("box", "/app/answer.txt")


async def test_a_socket_left_by_the_agent_is_no_file(backend: BubblewrapBackend) -> None:
    await shell(backend, "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer.txt\")'")
    with pytest.raises(FileNotFoundError, match=r"/app/answer.txt cannot be read"):
        await backend.get("box", "/app/answer.txt")


async def test_directories_keep_their_modes(backend: BubblewrapBackend, tmp_path: Path) -> None:
    source = tmp_path / "tests"
    source.mkdir()
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    await backend.put("box", {"/tests": source})
    assert await shell(backend, "/tests/run.sh") == "ran\n"


async def test_the_janitor_takes_what_is_past_its_deadline(backend: BubblewrapBackend) -> None:
    await backend.create(replace(SPEC, id="old", deadline=time.time() - 1))
    assert await sweep(backend) == ["old"]
    assert [sandbox.id for sandbox in await backend.list_sandboxes()] == ["box"]


async def test_a_sandbox_that_is_gone_is_lost(backend: BubblewrapBackend) -> None:
    with pytest.raises(RolloutError, match="does not exist") as caught:
        await backend.exec("nowhere", ["true"], timeout=5)
    assert caught.value.cause is Cause.SANDBOX_LOST


def test_an_unknown_backend_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match="unknown sandbox backend 'docker'; known: bubblewrap"):
        open_backend("docker", Settings())
