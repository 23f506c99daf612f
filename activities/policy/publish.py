"""`publish_policy`: make every engine of a pool hold one version of a run's weights, by vLLM's own routes.

An engine is paused so that requests in flight end on the old weights (`mode=wait`: no answer mixes two versions); then the weights are
loaded from disk, the prefix cache is emptied, and only then is the version's label set, which the engine puts on every answer. The
label is what the proxy believes. What can go wrong in the engine in silence is checked before: vLLM answers 200 to a file that lacks a
tensor and serves a mixture, and a path that does not exist destroys the weights it has.
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

from contracts.identity import version_prefix
from contracts.runs import Activity
from contracts.updates import Published, PublishRequest, VersionManifest, weight_label
from infra.settings import Settings, settings
from infra.storage import Storage, StorageError

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
    async with httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5)) as client:
        stale = [url for url in urls if await _label(client, url) != label]
        if stale:
            try:
                directory = await asyncio.to_thread(stage, Storage.of(settings()), settings(), request)
            except StorageError as error:
                raise ApplicationError(str(error), type="storage_unavailable") from error
            except (ValueError, FileNotFoundError) as error:
                raise ApplicationError(str(error), type="bad_weights", non_retryable=True) from error
            for url in stale:
                activity.heartbeat(url)
                await load(client, url, directory, label)
    return Published(version=request.version, engines=len(urls), loaded=len(stale), seconds=time.monotonic() - started)


def stage(storage: Storage, where: Settings, request: PublishRequest) -> Path:
    """A local directory with checked weights. Raises ValueError or FileNotFoundError saying what is wrong with them."""
    base = Path(request.base_model)
    if request.version == 0:
        tensor_names(base)
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
        if hashlib.sha256((directory / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{directory / name} is not the file that was exported: its digest differs")
    expected, found = tensor_names(base), tensor_names(directory)
    if found != expected or found != manifest.tensors:
        difference = sorted(set(expected) ^ set(found))
        raise ValueError(f"version {request.version} does not have the tensors of {base}: they differ in {difference[:5]}")
    return directory


def tensor_names(directory: Path) -> list[str]:
    """Sorted tensor names from the headers of a directory's safetensors files. Raises FileNotFoundError, ValueError."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors file")
    names: list[str] = []
    for file in files:
        with file.open("rb") as opened:
            try:
                (size,) = struct.unpack("<Q", opened.read(8))
                names += [name for name in json.loads(opened.read(size)) if name != "__metadata__"]
            except (struct.error, ValueError) as error:
                raise ValueError(f"{file} is not a safetensors file") from error
    return sorted(names)


async def load(client: httpx.AsyncClient, url: str, directory: Path, label: str) -> None:
    """Load weights into one engine. It is resumed whatever happens; a failed load leaves its label not set."""
    await _post(client, url, "/pause?mode=wait")
    try:
        await _post(client, url, "/update_weight_version", {"new_version": "loading"})
        method = settings().engine_reload
        await _post(client, url, "/collective_rpc", {"method": method, "kwargs": {"weights_path": str(directory)}})
        await _post(client, url, "/reset_prefix_cache")
        await _post(client, url, "/update_weight_version", {"new_version": label})
    finally:
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
