"""One proxy process and one StubEngine for all tests here; each test opens sessions of its own."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.proxy import Proxy, proxy_server
from tests.support.stub_engine import StubEngine, stub_engine

_members = itertools.count()


@pytest.fixture
def member() -> int:
    """Number of a rollout that no other test uses."""
    return next(_members)


@pytest.fixture(scope="session")
def _stub(tiny_model: Path) -> Iterator[StubEngine]:
    with stub_engine(tiny_model, lambda _: "") as engine:
        yield engine


@pytest.fixture
def stub(_stub: StubEngine) -> Iterator[StubEngine]:
    """The engine behind `proxy`, with a script that says OK."""
    _stub.script = lambda _: "OK"
    _stub.label = _stub.label_after_abort = "run@0"
    _stub.troubles.clear()
    _stub.prompts.clear()
    _stub.params.clear()
    _stub.gate.set()
    yield _stub
    _stub.gate.set()


@pytest.fixture(scope="session")
def proxy(_stub: StubEngine, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A real proxy process in front of the StubEngine."""
    directory = tmp_path_factory.mktemp("proxy")
    with proxy_server(tiny_model, {"policy": _stub.url}, directory) as server:
        yield server
