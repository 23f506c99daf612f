"""Storage: whole objects or none, clear errors."""

import os
from pathlib import Path

import pytest

from infra.settings import Settings
from infra.storage import Storage, StorageError


def test_what_is_written_is_read_back_and_listed(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}")
    digest = storage.write("runs/a/x.bin", b"abc")
    assert storage.read("runs/a/x.bin") == b"abc"
    assert storage.list("runs") == ["runs/a/x.bin"]
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_repeat_overwrites_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}")
    storage.write("x", b"one")
    storage.write("x", b"two")
    assert storage.read("x") == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_missing_object_says_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file://.*/nowhere"):
        Storage(f"file://{tmp_path}").read("nowhere")


def test_a_root_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write file://.*/file/\.openforge-write-check"):
        Storage(f"file://{tmp_path}/file").check_writable()


def test_an_unknown_scheme_is_a_clear_error() -> None:
    with pytest.raises(StorageError, match="'warp://x' cannot be used"):
        Storage("warp://x")


def test_an_s3_error_does_not_show_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError) as caught:
        Storage("s3://bucket", s3_endpoint="http://127.0.0.1:9").write("x", b"")
    assert "very-secret-value" not in str(caught.value)


def test_a_directory_survives_the_round_trip(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a").write_bytes(b"1")
    (source / "deep" / "b").write_bytes(os.urandom(32))
    storage = Storage(f"file://{tmp_path}/root")
    names = storage.upload_directory(source, "weights")
    storage.download_directory("weights", tmp_path / "copy")
    assert set(names) == {"a", "deep/b"}
    assert (tmp_path / "copy" / "deep" / "b").read_bytes() == (source / "deep" / "b").read_bytes()


def test_engine_pools_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_ENGINES", "policy=http://a:1|http://b:2/,teacher=http://c:3")
    assert Settings().engines == {"policy": ["http://a:1", "http://b:2"], "teacher": ["http://c:3"]}


def test_settings_do_not_print_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_PROXY_ADMIN_TOKEN", "do-not-print-me")
    assert "do-not-print-me" not in repr(Settings()) + Settings().model_dump_json()
