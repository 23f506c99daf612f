"""`publish_policy`: make every engine of a pool hold one version of a run's weights, by vLLM's own routes.

An engine is paused so that requests in flight end on the old weights (`mode=wait`: no answer mixes two versions; `keep` would be faster
and split answers between versions, `abort` would throw them away); then the weights are loaded from disk, the prefix cache is emptied,
and only then is the version's label set, which the engine puts on every answer. The label is what the proxy believes.

What can go wrong in the engine in silence is checked before: vLLM answers 200 to a file that lacks a tensor and serves a mixture. A load
that fails destroys the weights that the engine has, and the next request would kill it: it stays paused, requests wait, and the retry
of the activity mends it.
"""

import asyncio
import hashlib
import json
import shutil
import struct
import time
from pathlib import Path

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.failures import outlasting
from activities.heartbeats import beating
from contracts.identity import version_prefix
from contracts.runs import Activity
from contracts.updates import Published, PublishRequest, VersionManifest, weight_label
from infra.settings import Settings, settings
from infra.storage import Storage

KEEP_STAGED = 2


@activity.defn(name=Activity.PUBLISH_POLICY)
async def publish_policy(request: PublishRequest) -> Published:
    """Publish; an engine that holds the version already is left alone.

    Raises ApplicationError: not retryable if the weights themselves are wrong or missing, retryable if an engine is away.
    """
    started = time.monotonic()
    urls = settings().engines.get(request.engine)
    if not urls:
        known = ", ".join(sorted(settings().engines))
        raise ApplicationError(f"unknown engine pool {request.engine!r}; known: {known}", type="unknown_engine", non_retryable=True)
    label = weight_label(request.run, request.version)
    async with beating(), httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5)) as client:
        stale = [url for url in urls if await _label(client, url) != label]
        if stale:
            try:
                with outlasting():
                    directory = await asyncio.to_thread(stage, Storage.of(settings()), settings(), request)
            except (ValueError, FileNotFoundError) as error:
                raise ApplicationError(str(error), type="bad_weights", non_retryable=True) from error
            for url in stale:
                await load(client, url, directory, label)
    return Published(version=request.version, engines=len(urls), loaded=len(stale), seconds=time.monotonic() - started)


def stage(storage: Storage, where: Settings, request: PublishRequest) -> Path:
    """A local directory with checked weights. Raises ValueError or FileNotFoundError saying what is wrong with them."""
    base = Path(request.base_model)
    if request.version == 0:
        tensors(base)
        return base
    prefix = version_prefix(request.run, request.version)
    try:
        manifest = VersionManifest.model_validate_json(storage.read(f"{prefix}/manifest.json"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"version {request.version} of run {request.run} is not finished: {error}") from error
    if storage.local_root is not None:
        directory = storage.local_root / prefix
    else:
        directory = where.home.absolute() / "staging" / request.run / f"version={request.version:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        storage.download_directory(prefix, directory)
        for old in sorted(directory.parent.iterdir())[:-KEEP_STAGED]:
            shutil.rmtree(old, ignore_errors=True)
    for name, digest in manifest.files.items():
        with (directory / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{directory / name} is not the file that was exported: its digest differs")
    expected, found = tensors(base), tensors(directory)
    if difference := sorted({name for name, _ in expected.items() ^ found.items()}):
        raise ValueError(f"version {request.version} does not have the tensors of {base}: they differ in {difference[:5]}")
    if difference := sorted(set(found) ^ set(manifest.tensors)):
        raise ValueError(f"version {request.version} does not have the tensors of its manifest: they differ in {difference[:5]}")
    return directory


def tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape, from the headers of a directory's safetensors files. Raises FileNotFoundError, ValueError."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as opened:
            try:
                (size,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(size))
            except (struct.error, ValueError, OverflowError, MemoryError) as error:
                raise ValueError(f"{file} is not a safetensors file") from error
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


async def load(client: httpx.AsyncClient, url: str, directory: Path, label: str) -> None:
    """Load weights into one engine. Unless all of it succeeds the label is not set, and the engine goes on only with whole weights."""
    whole = True
    try:
        await _post(client, url, "/pause?mode=wait")
        await _post(client, url, "/update_weight_version", {"new_version": "loading"})
        whole = False
        method = settings().engine_reload
        await _post(client, url, "/collective_rpc", {"method": method, "kwargs": {"weights_path": str(directory)}})
        await _post(client, url, "/reset_prefix_cache")
        whole = True
        await _post(client, url, "/update_weight_version", {"new_version": label})
    finally:
        if whole:
            await _post(client, url, "/resume")
    if (found := await _label(client, url)) != label:
        raise ApplicationError(f"engine {url} says {found!r} after {label!r} was loaded", type="engine_unavailable")


async def _label(client: httpx.AsyncClient, url: str) -> str:
    return str((await _request(client, "GET", f"{url}/weight_info")).json().get("weight_version", ""))


async def _post(client: httpx.AsyncClient, url: str, path: str, body: dict[str, object] | None = None) -> None:
    await _request(client, "POST", url + path, body)


async def _request(client: httpx.AsyncClient, method: str, url: str, body: dict[str, object] | None = None) -> httpx.Response:
    try:
        response = await client.request(method, url, json=body)
    except httpx.HTTPError as error:
        raise ApplicationError(f"engine {url} does not answer: {type(error).__name__}", type="engine_unavailable") from error
    if response.status_code >= 400:
        raise ApplicationError(f"engine {url} answered {response.status_code}: {response.text[:300]}", type="engine_unavailable")
    return response
