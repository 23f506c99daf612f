"""Object storage: whole objects by path under one root, through fsspec. One code path for `file://` and `s3://`.

Invariants:
1. A reader sees an old object or a new one, never half of one: a local write goes to a temporary name and is renamed; S3 puts
   are atomic by themselves.
2. Objects are immutable in meaning: a repeat of the same work overwrites an object with the same content.
3. A failure says which root and which path, never a credential.
"""

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from botocore.exceptions import BotoCoreError
from fsspec.implementations.local import LocalFileSystem

from infra.settings import Settings

_FAILURES = (OSError, ValueError, BotoCoreError)  # what file systems, s3fs and botocore raise


class StorageError(Exception):
    """Storage cannot be reached, or refuses: the message says which root, which path and why."""


class Storage:
    """Objects under one root URL. Paths are relative, with `/`."""

    def __init__(self, root: str, *, s3_endpoint: str = "") -> None:
        self.root = root.rstrip("/")
        options: dict[str, Any] = {}
        if urlsplit(root).scheme == "s3":
            options["skip_instance_cache"] = True
            if s3_endpoint:
                options["client_kwargs"] = {"endpoint_url": s3_endpoint}
        try:
            self._fs, self._base = fsspec.core.url_to_fs(self.root, **options)
        except (ValueError, ImportError, OSError) as error:
            raise StorageError(f"storage root {self.root!r} cannot be used: {error}") from error
        self._local = isinstance(self._fs, LocalFileSystem)

    @classmethod
    def of(cls, settings: Settings) -> "Storage":
        """The deployment's storage."""
        return cls(settings.storage, s3_endpoint=settings.s3_endpoint)

    @property
    def local_root(self) -> Path | None:
        """The root as a directory of this machine, where it is one."""
        return Path(self._base) if self._local else None

    def url(self, path: str) -> str:
        """Full URL of `path`."""
        return f"{self.root}/{path}"

    def write(self, path: str, data: bytes) -> str:
        """Store an object; returns its sha256 in hex. Raises StorageError."""
        target = f"{self._base}/{path}"
        try:
            if self._local:
                temporary = f"{target}.{os.getpid()}.tmp"
                self._fs.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH120
                with open(temporary, "wb") as file:  # noqa: PTH123
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)  # noqa: PTH105
            else:
                self._fs.pipe_file(target, data)
        except _FAILURES as error:
            raise StorageError(f"cannot write {self.url(path)}: {_reason(error)}") from error
        return hashlib.sha256(data).hexdigest()

    def read(self, path: str) -> bytes:
        """An object's content. Raises FileNotFoundError, or StorageError."""
        try:
            data = self._fs.cat_file(f"{self._base}/{path}")
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {self.url(path)}") from None
        except _FAILURES as error:
            raise StorageError(f"cannot read {self.url(path)}: {_reason(error)}") from error
        return bytes(data)

    def exists(self, path: str) -> bool:
        """Whether the object is there. Raises StorageError."""
        try:
            self._fs.invalidate_cache()
            return bool(self._fs.exists(f"{self._base}/{path}"))
        except _FAILURES as error:
            raise StorageError(f"cannot look for {self.url(path)}: {_reason(error)}") from error

    def list(self, prefix: str) -> list[str]:
        """Relative paths of all objects below `prefix`, sorted. For people's tools: no invariant may rest on a listing."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(f"{self._base}/{prefix}")
        except FileNotFoundError:
            return []
        except _FAILURES as error:
            raise StorageError(f"cannot list {self.url(prefix)}: {_reason(error)}") from error
        paths = (str(path)[len(self._base) + 1 :] for path in found)
        return sorted(path for path in paths if path.startswith(f"{prefix}/") and not path.endswith(".tmp"))

    def upload_directory(self, source: Path, prefix: str) -> dict[str, str]:
        """Store every file below `source` under `prefix`; returns relative name to sha256. Raises StorageError."""
        return {
            str(file.relative_to(source)): self.write(f"{prefix}/{file.relative_to(source)}", file.read_bytes())
            for file in sorted(source.rglob("*"))
            if file.is_file()
        }

    def download_directory(self, prefix: str, target: Path) -> None:
        """Fetch every object below `prefix` into the directory `target`. Raises StorageError."""
        for path in self.list(prefix):
            file = target / path[len(prefix) + 1 :]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.read(path))

    def remove(self, prefix: str) -> None:
        """Remove every object below `prefix`. Raises StorageError."""
        try:
            if self._fs.exists(f"{self._base}/{prefix}"):
                self._fs.rm(f"{self._base}/{prefix}", recursive=True)
        except _FAILURES as error:
            raise StorageError(f"cannot remove {self.url(prefix)}: {_reason(error)}") from error

    def check_writable(self) -> None:
        """Write and remove a small object. Raises StorageError with what is wrong."""
        path = f".openforge-write-check-{os.getpid()}"
        self.write(path, b"ok")
        self._fs.rm_file(f"{self._base}/{path}")


def _reason(error: BaseException) -> str:
    """The innermost message: botocore wraps what went wrong in several layers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
