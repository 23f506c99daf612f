"""The same storage code against a real S3 server (SeaweedFS), and against plain readers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import s3fs

from activities.trajectories import read
from contracts.identity import iteration_batch
from infra.storage import Storage, StorageError
from tests.support.processes import BASE_PYTHON, free_port, running
from tests.trainer.synthetic import Made, seal

KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret-value"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("weed")
    credentials = [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}]
    identities = [{"name": "test", "credentials": credentials, "actions": ["Admin"]}]
    (directory / "s3.json").write_text(json.dumps({"identities": identities}))
    port = free_port()
    command = [BASE_PYTHON.parent / "weed", "server", f"-dir={directory}", "-ip=127.0.0.1", "-filer", "-s3", f"-s3.port={port}"]
    command += [f"-s3.config={directory}/s3.json", f"-s3.port.grpc={free_port()}", "-s3.iam=false", "-volume.max=4"]
    for part in ("master", "volume", "filer"):
        command += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    url = f"http://127.0.0.1:{port}"
    with running(command, url, directory / "weed.log", ready="/healthz", seconds=60):
        yield url


@pytest.fixture
def storage(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(client_kwargs={"endpoint_url": endpoint}, skip_instance_cache=True)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return Storage("s3://bucket/root", s3_endpoint=endpoint)


def test_objects_are_written_read_listed_and_removed(storage: Storage, tmp_path: Path) -> None:
    storage.check_writable()
    storage.write("a/one", b"1")
    storage.write("a/b/two", b"2")
    storage.write("a/one", b"again")
    assert storage.read("a/one") == b"again"
    assert storage.list("a") == ["a/b/two", "a/one"]
    assert storage.exists("a/b/two")
    storage.download_directory("a", tmp_path)
    assert (tmp_path / "b/two").read_bytes() == b"2"
    storage.remove("a")
    assert storage.list("a") == []
    assert not storage.exists("a/one")


def test_a_missing_object_and_a_missing_bucket_say_so(storage: Storage, endpoint: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no s3://bucket/root/nothing"):
        storage.read("nothing")
    with pytest.raises(StorageError, match="cannot write s3://no-such-bucket/"):
        Storage("s3://no-such-bucket", s3_endpoint=endpoint).write("x", b"1")


def test_wrong_credentials_are_a_clear_error_without_the_secret(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["AWS_ACCESS_KEY_ID"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    with pytest.raises(StorageError, match="cannot write s3://bucket/x") as caught:
        Storage("s3://bucket", s3_endpoint=endpoint).write("x", b"1")
    assert "a-wrong-secret" not in str(caught.value)


def test_a_sealed_batch_is_read_back_by_us_and_by_plain_readers(storage: Storage, tmp_path: Path) -> None:
    seal(storage, "run", 4, [Made(0, [1, 2], [3, 4], [-0.1, -0.2], reward=float(member)) for member in range(3)])
    assert read.batches(storage, "run") == [iteration_batch(4)]
    table = read.read_batch(storage, read.read_manifest(storage, "run", iteration_batch(4)))
    assert table.num_rows == 3
    pq.write_table(table, tmp_path / "all.parquet")
    frame = pd.read_parquet(tmp_path / "all.parquet")
    assert frame.groupby("group")["reward"].mean().to_dict() == {0: 1.0}
