"""Where the parts of a deployment find each other. Read from the environment (`OPENFORGE_…`), which `openforge up` sets.

Secrets are `SecretStr`: they do not print, log or serialise.
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """Addresses and credentials. Every process reads only those it uses."""

    model_config = SettingsConfigDict(env_prefix="OPENFORGE_", extra="ignore")

    home: Path = Field(Path(".openforge"), description="state of the local stack, sandboxes, staged weights")
    storage_url: str = Field("", description="fsspec URL of trajectories, checkpoints and manifests; default: HOME/storage")
    s3_endpoint: str = Field("", description="S3 service other than AWS; keys come from the usual AWS variables")

    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"

    proxy_url: str = "http://127.0.0.1:8300"
    proxy_socket: Path | None = Field(None, description="unix socket of the proxy's model routes, for local sandboxes")
    proxy_admin_token: SecretStr = SecretStr("")

    engines: Annotated[dict[str, list[str]], NoDecode] = Field(
        default_factory=lambda: {"policy": ["http://127.0.0.1:8000"]},
        description="engine pools: 'policy=http://a:8000|http://b:8000,teacher=http://c:8001'",
    )
    engine_reload: str = Field("reload_weights", description="worker method of vLLM that loads weights from a path")
    trainer_url: str = "http://127.0.0.1:8400"
    trainer_token: SecretStr = SecretStr("")

    @field_validator("engines", mode="before")
    @classmethod
    def _parse_engines(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pools: dict[str, list[str]] = {}
        for entry in filter(None, value.split(",")):
            name, separator, urls = entry.partition("=")
            if not separator or not urls:
                raise ValueError(f"{entry!r} is not NAME=URL[|URL…]")
            pools[name.strip()] = [url.strip().rstrip("/") for url in urls.split("|")]
        return pools

    @property
    def storage(self) -> str:
        """URL of the storage root, without a trailing slash."""
        return (self.storage_url or f"file://{self.home.absolute()}/storage").rstrip("/")


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()
