"""Sandboxes: where harness and verifier run. `base.py` is the interface; one file a backend, registered here."""

import time
from collections.abc import Callable

from activities.sandboxes.base import SandboxBackend
from infra.settings import Settings


def _bubblewrap(settings: Settings) -> SandboxBackend:
    from activities.sandboxes.bubblewrap import BubblewrapBackend

    return BubblewrapBackend(root=settings.home.absolute() / "sandboxes", proxy_socket=settings.proxy_socket)


BACKENDS: dict[str, Callable[[Settings], SandboxBackend]] = {"bubblewrap": _bubblewrap}


def open_backend(name: str, settings: Settings) -> SandboxBackend:
    """The backend of this name. Raises ValueError naming those that exist."""
    if name not in BACKENDS:
        raise ValueError(f"unknown sandbox backend {name!r}; known: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](settings)


async def sweep(backend: SandboxBackend, now: float | None = None) -> list[str]:
    """The janitor: destroy sandboxes whose deadline has passed; returns their ids. A listing that fails destroys nothing."""
    moment = time.time() if now is None else now
    expired = [sandbox.id for sandbox in await backend.list_sandboxes() if sandbox.deadline <= moment]
    for sandbox_id in expired:
        await backend.destroy(sandbox_id)
    return expired
