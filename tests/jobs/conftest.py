"""One Ray head for the tests of jobs, and a cache of each test's own."""

import pytest
from heads import Head


@pytest.fixture(scope="session")
def head(tmp_path_factory):
    """The dashboard's address of a Ray head of these tests' own, which asks for a token."""
    made = Head(tmp_path_factory.mktemp("head") / "log")
    try:
        made.wait()
        yield made.address
    finally:
        made.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What is sent is remembered in this test's own folder."""
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / "cache"))
