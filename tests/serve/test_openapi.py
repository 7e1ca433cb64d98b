"""The OpenAPI page: every route with all its answers, held against a served application by Schemathesis."""

import importlib
from functools import partial

import pytest
from serving_fakes import FakeRunner, service_of, serving
from starlette.testclient import TestClient

from rlsvc.runner import BaselineRunner
from rlsvc.serve.app import build_app
from rlsvc.serve.deploy import Deployment, start
from rlsvc.serve.episodes import EpisodeInbox, add_episode_routes
from rlsvc.serve.haproxy import free_ports
from rlsvc.serve.keys import ROLES, Keys, new_key, role_of
from rlsvc.serve.settings import ServeSettings

KEY, KEPT = new_key("tester", tuple(ROLES))


def page_of(keys, folder):
    with service_of(FakeRunner()) as service:
        app = build_app(service, keys)
        add_episode_routes(app, EpisodeInbox(folder, lambda path: None, 1000))
        with TestClient(app) as client:
            return client.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()


def operations(page):
    return {
        (method.upper(), path): operation
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_says_its_answers_and_the_key_that_it_asks_for(tmp_path):
    page = page_of(Keys((KEPT,)), tmp_path)
    assert page["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for (method, path), operation in operations(page).items():
        answers = operation["responses"]
        assert all(answer["description"] and answer["content"] for answer in answers.values()), path
        assert "HTTPValidationError" not in str(answers), path
        asks = role_of(method, path) is not None
        assert ({"401", "403"} <= set(answers), "security" in operation) == (asks, asks), path
        if "{" in path:
            assert "404" in answers, path
        if method == "POST":
            assert {"200", "400", "413", "415", "422", "500", "503", "504"} <= set(answers), path
            assert operation["requestBody"]["content"], path


def test_without_keys_the_page_asks_for_none(tmp_path):
    page = page_of(None, tmp_path)
    assert page["components"] == {}
    assert not any("security" in operation for operation in operations(page).values())


def test_links_lead_to_operations_of_the_page(tmp_path):
    found = operations(page_of(None, tmp_path)).values()
    names = [operation["operationId"] for operation in found]
    linked = {
        link["operationId"]
        for operation in found
        for answer in operation["responses"].values()
        for link in answer.get("links", {}).values()
    }
    assert len(names) == len(set(names))
    assert {"act", "infer", "infer_of_version"} <= linked <= set(names)


@pytest.fixture(scope="module")
def schemathesis_run(root):
    """benchmarks/schemathesis_run.py, which is a script and no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield importlib.import_module("schemathesis_run")


def zeros(schemathesis_run):
    """A policy that takes every dtype, not loaded yet."""
    return partial(BaselineRunner, "zero", importlib.import_module("schemathesis_hooks").CONTRACT)


def test_schemathesis_finds_nothing_in_the_application(schemathesis_run):
    with serving(zeros(schemathesis_run)(), keys=Keys((KEPT,)), max_body_bytes=2**20) as url:
        outcome = schemathesis_run.check(url, KEY, examples=3, seed=0)
    assert outcome.failures == 0, outcome.text
    assert outcome.acted > 50


@pytest.mark.ray
@pytest.mark.slow
def test_schemathesis_finds_nothing_behind_haproxy(ray_cluster, schemathesis_run):
    from ray import serve

    (port,) = free_ports(1)
    settings, keys = ServeSettings(max_body_bytes=2**20), Keys((KEPT,))
    serve.shutdown()  # a Serve that other tests began keeps its port
    start(Deployment("zero", zeros(schemathesis_run), port=port, cpus=0.1, settings=settings, keys=keys))
    try:
        outcome = schemathesis_run.check(f"127.0.0.1:{port}", KEY, examples=20, seed=0)
    finally:
        serve.shutdown()
    assert outcome.failures == 0, outcome.text
    assert outcome.acted > 50
