"""Supervisor of one process in a bubblewrap sandbox: `python -I -S supervisor.py RUN_DIR`. Standard library only, quick to start.

It is a session of its own, so it outlives the worker that started it. RUN_DIR holds, in order of appearance:

    job.json   what to run; read once and removed, because the environment in it holds the session's key
    lock       held while the supervisor lives: a second one for the same process gives up at once
    pid        "PID STARTTIME" of the supervisor, by which it is found again
    container  the same of the container's first process, by which it is ended where the supervisor was killed
    stdout, stderr
    exit.json  how the process ended; written last, atomically

The process is a bubblewrap container with namespaces of its own. When its first process ends, its time is up, or the supervisor
dies (of whatever), the kernel ends the whole pid namespace: nothing that ran in it survives.

The container's network is a loopback of its own. Where the job names a proxy, the supervisor opens a listening socket *inside* that
network (by joining the namespace in a short-lived child) and carries its connections to the proxy's unix socket. The socket is
looked up anew for every connection, so a proxy that starts again is found again; connections wait for it.
"""

import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Job = dict[str, Any]

CONNECT_PATIENCE = 60.0  # seconds that a connection waits for a proxy that is starting again
END_PATIENCE = 60.0  # seconds for the kernel to end a killed namespace, which may be busy writing
MEMORY_POLL = 0.25  # seconds between looks at the memory of the tree, where no cgroup can be had
CGROUP_ROOT = "/sys/fs/cgroup"
PR_SET_CHILD_SUBREAPER = 36
NS_GET_USERNS = 0xB701  # ioctl_ns(2): the user namespace that owns a namespace


def main(run_dir: str) -> int:
    os.chdir(run_dir)
    lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    if os.path.exists("exit.json"):
        return 0
    with open("job.json") as file:
        job = json.load(file)
    os.unlink("job.json")
    stop_r = catch_signals()  # before it can be found and asked to stop
    write_atomically("pid", f"{os.getpid()} {start_time(os.getpid())}")
    write_atomically("exit.json", json.dumps(run(job, stop_r)))
    return 0


def catch_signals() -> int:
    """A descriptor on which the number of every signal arrives."""
    stop_r, stop_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(stop_w)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return stop_r


def run(job: Job, stop_r: int) -> Job:
    started = time.monotonic()
    cgroup = Cgroup(job["cgroup"], job["memory_mb"], job["pids"], job["cpus"])
    adopt_orphans()
    info_r, info_w = os.pipe2(os.O_CLOEXEC)
    gate_r, gate_w = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        execute(job, cgroup, info_w, gate_r)
    os.close(info_w)
    os.close(gate_r)
    inner = read_child_pid(info_r)
    container = identify(inner) if inner else None
    try:
        if inner and job["proxy_socket"]:
            listener = listen_inside(inner, job["proxy_port"])
            threading.Thread(target=forward, args=(listener, job["proxy_socket"]), daemon=True).start()
        os.write(gate_w, b"go\n")
    except OSError as error:  # or bubblewrap has failed, and says why itself
        end(container)
        note(f"the supervisor could not connect the sandbox to the proxy: {error}")
    return watch(job, cgroup, child, container, stop_r, started)


def execute(job: Job, cgroup: "Cgroup", info_w: int, gate_r: int) -> None:
    """In the child: enter the cgroup, set the limits that are inherited, become bubblewrap.

    The command waits for a line from the supervisor; one that dies before it has noted the container's first process says none,
    and the command never starts. (A bubblewrap that dies with it may leave a child that waits for ever: `destroy` finds that.)
    """
    try:
        cgroup.enter()
        size = job["file_size_mb"] * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(gate_r, 0)
        os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):  # Python ignores the last
            signal.signal(number, signal.SIG_DFL)
        # Opened anew for both directions: without a reader, bubblewrap would give up halfway and leave its child waiting for it.
        info = os.open(f"/proc/self/fd/{info_w}", os.O_RDWR)
        os.set_inheritable(info, True)
        arguments = os.memfd_create("arguments", 0)  # not on the command line, where the sandbox could read the host's paths
        os.write(arguments, b"".join(text.encode() + b"\0" for text in job["arguments"]))
        os.lseek(arguments, 0, os.SEEK_SET)
        # Set inside, where the user namespace counts its own processes only; dash and bash name the limit differently.
        limit = "" if cgroup.limits_pids else '{ ulimit -u "$0" 2>/dev/null || ulimit -p "$0"; } && '
        shell = ["/bin/sh", "-c", f'read -r go && {limit}exec "$@" </dev/null', str(job["pids"])]
        argv = [job["bwrap"], "--args", str(arguments), "--info-fd", str(info), "--", *shell, *job["argv"]]
        os.execve(argv[0], argv, job["env"])
    except BaseException as error:
        note(f"the supervisor could not start bubblewrap: {error}")
    os._exit(127)


def watch(job: Job, cgroup: "Cgroup", child: int, container: "int | None", stop_r: int, started: float) -> Job:
    """Wait for the end, the time limit, a request to stop, or (without a cgroup) too much memory."""
    deadline = started + job["timeout"]
    killed = ""
    peak = cpu = 0.0
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        left = deadline - time.monotonic()
        if left <= 0 and not killed:
            killed = "time"
        if not cgroup.limits_memory:
            used = tree_memory_mb(child)
            peak = max(peak, used)
            if used > job["memory_mb"] and not killed:
                killed = "memory"
        if killed:
            cpu = tree_cpu_seconds(child)  # what a namespace that is killed reaps is not counted
            end(container)  # first: bubblewrap ties it to its parent only later
            os.kill(child, signal.SIGKILL)
            done, status, usage = os.wait4(child, 0)
            break
        wait = max(0.0, left) if cgroup.limits_memory else min(MEMORY_POLL, max(0.0, left))
        if select.select([stop_r], [], [], wait)[0] and any(b != signal.SIGCHLD for b in os.read(stop_r, 64)):
            killed = "asked"
    end(container)
    used, largest = used_by_children([usage])
    code = os.waitstatus_to_exitcode(status)
    memory, oom = cgroup.peak_memory_mb(), cgroup.out_of_memory()
    cgroup.remove()
    return {
        "exit_code": None if killed else (128 - code if code < 0 else code),
        "timed_out": killed == "time",
        "out_of_memory": killed == "memory" or (oom and code != 0),
        "killed": killed == "asked",
        "seconds": time.monotonic() - started,
        "cpu_seconds": max(cpu, used),
        "peak_memory_mb": memory or peak or largest,
    }


def adopt_orphans() -> None:
    """Become the parent of processes whose own has ended, prctl(2): bubblewrap leaves before the container's first process has."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def used_by_children(usages: "list[resource.struct_rusage]") -> "tuple[float, float]":
    """(seconds of CPU, MiB of the largest process) of the given children and all that have ended since.

    The container's first process is among these, and what it used includes all that ran in the container.
    """
    with suppress(ChildProcessError):
        while (ended := os.wait4(-1, os.WNOHANG))[0]:
            usages.append(ended[2])
    return sum(usage.ru_utime + usage.ru_stime for usage in usages), max(usage.ru_maxrss for usage in usages) / 1024


def identify(inner: int) -> "int | None":
    """A pidfd of the container's first process, noted where it can be found again; none if bubblewrap has failed already."""
    try:
        container = os.pidfd_open(inner)
        write_atomically("container", f"{inner} {start_time(inner)}")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return container


def end(container: "int | None") -> None:
    """Kill the first process of the pid namespace, by its pidfd, and wait: it ends after all others of the namespace have."""
    if container is None:
        return
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(container, signal.SIGKILL)
    if not select.select([container], [], [], END_PATIENCE)[0]:
        note(f"the sandbox's processes have not ended {END_PATIENCE:g} s after they were killed")


class Cgroup:
    """A control group per sandbox and process, version 1 or 2, where one can be made; otherwise it limits nothing and says so."""

    def __init__(self, name: str, memory_mb: int, pids: int, cpus: float) -> None:
        self.directories: list[str] = []
        self.limits_memory = self.limits_pids = False
        unified = os.path.exists(f"{CGROUP_ROOT}/cgroup.controllers")
        memory = memory_mb * 1024 * 1024
        period = 100_000
        if unified:
            wanted = [("", {"memory.max": memory, "memory.swap.max": 0, "pids.max": pids, "cpu.max": f"{int(cpus * period)} {period}"})]
            try_mkdir(f"{CGROUP_ROOT}/openforge")
            for parent in (CGROUP_ROOT, f"{CGROUP_ROOT}/openforge"):
                try_write(f"{parent}/cgroup.subtree_control", "+memory +pids +cpu")
        else:
            wanted = [
                ("memory", {"memory.limit_in_bytes": memory}),
                ("pids", {"pids.max": pids}),
                ("cpu", {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": int(cpus * period)}),
            ]
        for controller, values in wanted:
            directory = os.path.join(CGROUP_ROOT, controller, "openforge", name)
            if not try_mkdir(directory):
                continue
            self.directories.append(directory)
            written = {key: try_write(f"{directory}/{key}", str(value)) for key, value in values.items()}
            self.limits_memory |= written.get("memory.limit_in_bytes", False) or written.get("memory.max", False)
            self.limits_pids |= written.get("pids.max", False)

    def enter(self) -> None:
        for directory in self.directories:
            try_write(f"{directory}/cgroup.procs", str(os.getpid()))

    def peak_memory_mb(self) -> float:
        for directory in self.directories:
            for name in ("memory.peak", "memory.max_usage_in_bytes"):
                value = try_read(f"{directory}/{name}")
                if value:
                    return int(value) / 1024 / 1024
        return 0.0

    def out_of_memory(self) -> bool:
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):
                for line in try_read(f"{directory}/{name}").splitlines():
                    if line.startswith("oom_kill ") and int(line.split()[1]) > 0:
                        return True
        return False

    def remove(self) -> None:
        for directory in self.directories:
            for _ in range(50):
                try:
                    os.rmdir(directory)
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        break
                    time.sleep(0.01)  # processes of the namespace are still being reaped


def read_child_pid(info_r: int) -> "int | None":
    """The pid of bubblewrap's child in our own pid namespace; none if bubblewrap failed before it had one."""
    text = b""
    while b"}" not in text:
        piece = os.read(info_r, 4096)
        if not piece:
            return None
        text += piece
    return int(json.loads(text)["child-pid"])


def listen_inside(pid: int, port: int) -> socket.socket:
    """A listening TCP socket on 127.0.0.1:`port` of the network namespace of `pid`."""
    ours, theirs = socket.socketpair()
    helper = os.fork()
    if helper == 0:
        try:
            join_network(pid)
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deadline = time.monotonic() + 5
            while True:
                try:
                    listener.bind(("127.0.0.1", port))
                    break
                except OSError:  # bubblewrap has not brought the loopback up yet
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)
            listener.listen(64)
            socket.send_fds(theirs, [b"x"], [listener.fileno()])
            os._exit(0)
        except BaseException as error:
            note(f"the supervisor could not enter the sandbox's network: {error}")
            os._exit(1)
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(helper, 0)
    if not descriptors:
        raise OSError("no listening socket inside the sandbox")
    return socket.socket(fileno=descriptors[0])


def join_network(pid: int) -> None:
    """Join the network namespace of `pid`: directly as root, otherwise as the owner of the user namespace that made it.

    That is not the one that `pid` is in: bubblewrap goes into a second one so that no further ones can be made.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def join(namespace: int) -> None:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    own = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + 5
    while os.readlink(f"/proc/{pid}/ns/net") == own:  # bubblewrap's child has not unshared yet
        if time.monotonic() > deadline:
            raise OSError("the sandbox shares the host's network")
        time.sleep(0.001)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        join(network)
    except PermissionError:
        join(fcntl.ioctl(network, NS_GET_USERNS))
        join(network)


def forward(listener: socket.socket, proxy_socket: str) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=carry, args=(connection, proxy_socket), daemon=True).start()


def carry(inside: socket.socket, proxy_socket: str) -> None:
    """Join one connection from inside to the proxy; waits for a proxy that is away."""
    deadline = time.monotonic() + CONNECT_PATIENCE
    while True:
        outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            outside.connect(proxy_socket)
            break
        except OSError:
            outside.close()
            if time.monotonic() > deadline:
                inside.close()
                return
            time.sleep(0.1)
    back = threading.Thread(target=pump, args=(outside, inside), daemon=True)
    back.start()
    pump(inside, outside)
    back.join()
    inside.close()
    outside.close()


def pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        try:
            while data := source.recv(65536):
                target.sendall(data)
        finally:
            target.shutdown(socket.SHUT_WR)


def tree_memory_mb(root: int) -> float:
    """Resident memory of a process and all its descendants."""
    pages = sum(int(fields[1]) for pid in tree(root) if len(fields := try_read(f"/proc/{pid}/statm").split()) > 1)
    return pages * resource.getpagesize() / 1024 / 1024


def tree_cpu_seconds(root: int) -> float:
    """CPU time of a process, its descendants, and those of them that have ended and been waited for."""
    ticks = sum(sum(map(int, fields[11:15])) for pid in tree(root) if (fields := try_read(f"/proc/{pid}/stat").rpartition(")")[2].split()))
    return ticks / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> "Iterator[int]":
    """A process and all its descendants."""
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        pending += [int(child) for child in try_read(f"/proc/{pid}/task/{pid}/children").split()]


def start_time(pid: int) -> str:
    """Clock ticks since boot at which `pid` started: tells it from a later process of the same number."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def write_atomically(name: str, text: str) -> None:
    with open(f"{name}.tmp", "w") as file:
        file.write(text)
    os.replace(f"{name}.tmp", name)


def note(text: str) -> None:
    with open("stderr", "a") as file:
        file.write(f"{text}\n")


def try_mkdir(path: str) -> bool:
    try:
        os.makedirs(path, exist_ok=True)
        return True
    except OSError:
        return False


def try_write(path: str, text: str) -> bool:
    try:
        with open(path, "w") as file:
            file.write(text)
        return True
    except OSError:
        return False


def try_read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
