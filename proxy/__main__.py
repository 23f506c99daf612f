"""Start the proxy: `python -m proxy --tokenizer DIR --port 8300 --socket PATH --journal FILE`.

The admin token and the engines come from the environment (`infra.settings`). SIGTERM and SIGINT end it gracefully: no new
requests, calls in flight get a few seconds to finish, the journal is closed.
"""

import argparse
import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop

from infra.settings import settings
from proxy.app import Proxy, model_routes, public
from proxy.engine import engine_pools
from proxy.errors import JournalUnavailableError
from proxy.generation import Generation
from proxy.journal import Journal
from proxy.rendering import Rendering
from proxy.sessions import Sessions

log = logging.getLogger("proxy")
GRACE_SECONDS = 10
TIDY_SECONDS = 600


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve`, which has two of them to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    """Run until a signal. Returns the exit status."""
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.access").disabled = True  # paths may hold session keys
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options))
    except (ValueError, OSError) as error:
        print(f"proxy: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proxy", description="The model proxy of OpenForgeRL")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory in Hugging Face format")
    parser.add_argument("--renderer", type=json.loads, help="renderer configuration as JSON; default: by the model type in config.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--socket", type=Path, help="unix socket for the model routes")
    parser.add_argument("--journal", type=Path, required=True, help="SQLite file; made if it is not there")
    parser.add_argument(
        "--retention-hours", type=float, default=168.0, help="closed sessions leave the journal after this time; default: 168"
    )
    parser.add_argument("--max-context", type=int, help="tokens, prompt and answer together; default: the engine's")
    return parser.parse_args()


async def _run(options: argparse.Namespace) -> int:
    configured = settings()
    if not configured.proxy_admin_token.get_secret_value():
        raise ValueError("OPENFORGE_PROXY_ADMIN_TOKEN is not set: the session API would be open to all")
    rendering = Rendering(options.tokenizer, options.renderer)
    tcp = _bind(options.host, options.port)
    journal = Journal(options.journal)
    try:
        sessions = Sessions(journal, configured.proxy_admin_token)
        recovered = await sessions.recover()
        async with engine_pools(configured.engines) as pools:
            generation = Generation(sessions, journal, rendering, pools, options.max_context)
            proxy = Proxy(sessions, generation, journal, pools)
            log.info("listening on %s:%d, %d open sessions recovered", options.host, tcp.getsockname()[1], recovered)
            tidying = asyncio.create_task(_tidy(sessions, 3600 * options.retention_hours))
            try:
                await _serve(proxy, tcp, options.socket)
            finally:
                tidying.cancel()
    finally:
        journal.close()
    return 0


async def _tidy(sessions: Sessions, retention: float) -> None:
    """Forget closed sessions `retention` seconds after their end: their trajectories are in storage since then."""
    while True:
        try:
            if removed := await sessions.tidy(time.time() - retention):
                log.info("%d sessions left the journal", removed)
        except JournalUnavailableError as error:
            log.warning("the journal could not be tidied: %s", error)
        await asyncio.sleep(TIDY_SECONDS)


async def _serve(proxy: Proxy, tcp: socket.socket, path: Path | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    common = {"lifespan": "off", "log_config": None, "access_log": False, "timeout_graceful_shutdown": GRACE_SECONDS}
    servers = [(_Server(uvicorn.Config(public(proxy), **common)), tcp)]  # type: ignore[arg-type]
    if path:
        servers.append((_Server(uvicorn.Config(model_routes(proxy), **common)), _bind_unix(path)))  # type: ignore[arg-type]

    def stop() -> None:
        for server, _ in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await asyncio.gather(*(server.serve(sockets=[bound]) for server, bound in servers))


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    bound.listen(1024)
    return bound


def _bind_unix(path: Path) -> socket.socket:
    """Bind a unix socket that only this user can reach, in place of one that a dead proxy has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
    except OSError as error:
        raise OSError(f"cannot listen on {path}: {error.strerror or error}") from error
    path.chmod(0o600)
    bound.listen(1024)
    return bound


if __name__ == "__main__":
    sys.exit(main())
