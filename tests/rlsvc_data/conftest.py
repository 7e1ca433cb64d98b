"""Samples of real datasets, copied so that a test may damage them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[1] / "data"


@pytest.fixture
def sample(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of tests/data/<name>."""

    def copy(name: str) -> Path:
        source, target = SAMPLES / name, tmp_path / Path(name).name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        return target

    return copy


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path_factory.mktemp("cache")))
