"""A Serve config: what is refused before and while it is deployed, and the whole way through Serve's own schema."""

import asyncio
import re
import textwrap
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from rlsvc.commands.serve import serve
from rlsvc.core.errors import NotFoundError, SpecError, UserError
from rlsvc.serve import listener, preflight
from rlsvc.serve.application import BuildError, build, deployments_of
from rlsvc.serve.deploy import Deployment, check_room
from rlsvc.serve.haproxy import free_ports
from rlsvc.serve.keys import new_key, write_file
from rlsvc.serve.replica import PolicyReplica
from rlsvc.spec.compose import compose_file, validate
from rlsvc.spec.serve import ServeConfigSpec, ServeSpec


def config_of(*applications, host="127.0.0.1", port=8000):
    """Plain values of a config whose applications have these `args`."""
    return {
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": f"app{i}",
                "route_prefix": f"/{i}" if i else "/",
                "import_path": "rlsvc.serve.application:build",
                "args": args,
            }
            for i, args in enumerate(applications)
        ],
    }


@pytest.fixture
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"polcy": "x"}, "unknown key 'polcy'. Did you mean 'policy'?"),
        ({"replicas": 0}, "'replicas': got 0, input should be greater than or equal to 1"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas: got 2, at least min_replicas = 3"),
        ({"name": "../arm"}, "policy name '../arm': expected 1 to 64 letters"),
        ({"policy": "models:/../arm"}, "unknown policy in sqlite:"),
        ({"keys": "nowhere.json"}, "nowhere.json: no such file; make a key with: rlsvc keys add"),
        ({"group": "left"}, "normaliser group: got 'left', expected one of all"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(bundle, tmp_path, wrong, text):
    with pytest.raises(BuildError, match=re.escape(text)) as caught:
        build({"policy": str(bundle), "root": str(tmp_path), **wrong})
    assert "\n" not in str(caught.value)


def test_several_faults_are_still_one_line():
    with pytest.raises(BuildError, match=r"'replicas': got 0.*; unknown key 'polcy'") as caught:
        build({"policy": "x", "polcy": "x", "replicas": 0})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"http_option": {"host": "127.0.0.1"}}, "unknown key 'http_option'. Did you mean 'http_options'?"),
        ({"applications": []}, "'applications': got"),
        ({"http_options": {"port": 0}}, "'http_options.port': got 0"),
    ],
)
def test_what_rays_schema_passes_over_is_refused(bundle, change, text):
    with pytest.raises(SpecError, match=re.escape(text)):
        validate(ServeConfigSpec, config_of({"policy": str(bundle)}) | change)


@pytest.mark.parametrize("key", ["name", "route_prefix", "import_path"])
def test_two_applications_share_neither_name_nor_route_nor_another_import_path(bundle, key):
    config = config_of({"policy": str(bundle)}, {"policy": str(bundle)})
    config["applications"][1][key] = {**config["applications"][0], "import_path": "os:system"}[key]
    with pytest.raises(SpecError, match=key):
        validate(ServeConfigSpec, config)


def test_two_deployments_with_one_name_are_refused(bundle):
    named = {"policy": str(bundle), "name": "arm"}
    with pytest.raises(SpecError, match=re.escape("two have the args.name 'arm', expected different ones")):
        validate(ServeConfigSpec, config_of(named, named))
    unnamed = {"policy": str(bundle)}
    with pytest.raises(UserError, match="'app0' and 'app1' both serve a policy named 'random'"):
        deployments_of(validate(ServeConfigSpec, config_of(unnamed, unnamed)))
    assert len(deployments_of(validate(ServeConfigSpec, config_of(named, unnamed)))) == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "robot.local"])
def test_a_config_that_listens_for_others_needs_keys_for_every_application(bundle, tmp_path, host):
    _, kept = new_key("robot", ("act",))
    write_file(tmp_path / "keys.json", (kept,))
    closed = {"policy": str(bundle), "keys": str(tmp_path / "keys.json")}
    half = config_of(closed, {"policy": str(bundle), "name": "other"}, host=host)
    with pytest.raises(UserError, match=r"application 'app1': without args\.keys"):
        deployments_of(validate(ServeConfigSpec, half))
    assert deployments_of(validate(ServeConfigSpec, config_of(closed, host=host)))[0].keys is not None


def test_a_gpu_asked_for_where_there_is_none_is_refused_before_ray_starts(bundle, tmp_path, no_cluster, monkeypatch):
    monkeypatch.setattr(preflight, "_devices", lambda driver: 0)
    (port,) = free_ports(1)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config_of({"policy": str(bundle), "gpus": 1}, port=port)))
    with pytest.raises(UserError, match="gpus = 1: there is no GPU here"):
        serve(str(file))


def test_policies_that_fit_alone_and_not_together_are_refused(bundle):
    both = config_of({"policy": str(bundle), "name": "a", "cpus": 2}, {"policy": str(bundle), "name": "b"})
    deployments = deployments_of(validate(ServeConfigSpec, both))
    with pytest.raises(UserError, match="2 policies need 3 CPUs and 0 GPUs together, there are 2 and 0"):
        check_room(deployments, have_cpus=2, have_gpus=0)
    check_room(deployments, have_cpus=3, have_gpus=0)


def test_errors_in_a_config_file_name_the_line(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        textwrap.dedent("""\
            applications:
              - import_path: rlsvc.serve.application:build
                args:
                  policy: bundle
                  replica: 2
            """)
    )
    with pytest.raises(SpecError, match=r"serve.yaml:5: unknown key 'applications.0.args.replica'. Did you mean 'repl"):
        serve(str(file))


def test_options_beside_a_config_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="write options into it"):
        serve(str(tmp_path / "serve.yaml"), replicas=2)
    with pytest.raises(UserError, match="write options into it"):
        serve(str(tmp_path / "serve.yaml"), host="0.0.0.0")
    with pytest.raises(SpecError, match="no such file"):
        serve(str(tmp_path / "serve.yaml"))


def test_the_config_that_ships_is_valid_for_rlsvc_and_for_ray(root: Path):
    from ray.serve.schema import ServeDeploySchema

    file = root / "deployments" / "serve.yaml"
    config = compose_file(ServeConfigSpec, file)
    assert preflight.is_loopback(config.http_options.host) or all(app.args.keys for app in config.applications)
    ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    with pytest.raises(NotFoundError, match=r"keys\.json: no such file"):
        deployments_of(config)


@pytest.fixture
def serve_alone(ray_cluster):
    """The suite's Ray without Serve, before and after."""
    from ray import serve

    serve.shutdown()
    yield
    for app in serve.status().applications:
        serve.delete(app)
    serve.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_a_config_file_is_deployed_asks_for_keys_and_refuses_its_successor(serve_alone, bundle, tmp_path):
    """As the cluster's REST API does for `serve deploy`: Serve's schema, its controller, its builder."""
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    key, kept = new_key("robot", ("read", "act"))
    write_file(tmp_path / "keys.json", (kept,))
    (port,) = free_ports(1)
    closed = {"policy": str(bundle), "name": "arm", "cpus": 0.1, "keys": str(tmp_path / "keys.json")}
    plain = config_of(closed, {**closed, "name": "second"}, port=port)
    config = ServeDeploySchema.model_validate(plain)
    client = serve_start(http_options=config.http_options.model_dump(), proxy_location=config.proxy_location)
    client.deploy_apps(config, _blocking=True)

    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
    body = {"observation": {"observation.state": [1, 2, 3]}, "seed": 1, "step": 0}
    assert httpx.post(f"{url}/v1/policies/arm/act", json=body).status_code == 401
    answer = httpx.post(f"{url}/v1/policies/arm/act", json=body, headers=headers)
    assert np.asarray(answer.json()["action"]).shape == (4, 2)
    # The second application's routes ask for the same roles below their prefix.
    assert httpx.post(f"{url}/1/v1/policies/second/act", json=body).status_code == 401
    assert httpx.post(f"{url}/1/v1/policies/second/act", json=body, headers=headers).status_code == 200
    policy = WebsocketClientPolicy(f"ws://127.0.0.1:{port}", api_key=key)
    assert policy.infer({"observation.state": np.zeros(3)})["actions"].shape == (4, 2)
    policy._ws.close()

    for wrong, text in (({"gpus": 1}, "gpus = 1: there is no GPU here"), ({"replica": 2}, "unknown key 'replica'")):
        client.deploy_apps(ServeDeploySchema.model_validate(config_of({**closed, **wrong}, port=port)), _blocking=False)
        message = wait_for_failure(client, "app0")
        assert text in message
        assert "Traceback" not in message
    # What was served before goes on.
    assert httpx.post(f"{url}/v1/policies/arm/act", json=body, headers=headers).status_code == 200


def wait_for_failure(client, app):
    """Why an application could not be deployed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        details = client.get_serve_details()["applications"][app]
        if details["status"] == "DEPLOY_FAILED":
            return details["message"]
        time.sleep(0.1)
    raise AssertionError(details)


@pytest.mark.ray
def test_a_cluster_that_listens_for_others_takes_no_application_without_keys(serve_alone, bundle, tmp_path):
    """A stand-in for Serve's controller says so, since tests open no such port."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve.config import HTTPOptions

    @ray.remote(num_cpus=0)
    class Controller:
        def get_http_config(self):
            return HTTPOptions(host="0.0.0.0")

    controller = Controller.options(name=SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE).remote()
    try:
        with pytest.raises(BuildError, match=r"Serve listens on 0.0.0.0 .* without keys"):
            build({"policy": str(bundle), "cpus": 0.1})
        _, kept = new_key("robot", ("act",))
        write_file(tmp_path / "keys.json", (kept,))
        build({"policy": str(bundle), "cpus": 0.1, "keys": str(tmp_path / "keys.json")})
    finally:
        ray.kill(controller)


def test_a_replica_without_keys_does_not_start_behind_a_listener_for_others(monkeypatch):
    """Serve may have been started on another host after the application was built."""
    loaded = []
    replica = object.__new__(PolicyReplica)
    monkeypatch.setattr(listener, "listener", lambda: "0.0.0.0")
    with pytest.raises(UserError, match=r"Serve listens on 0\.0\.0\.0"):
        asyncio.run(PolicyReplica.__init__(replica, Deployment("arm", lambda: loaded.append(1))))
    assert loaded == []


@pytest.mark.ray
def test_more_than_the_cluster_has_is_refused_unless_nodes_come_later(ray_cluster, bundle):
    asked = {"policy": str(bundle), "gpus": 0.5}
    with pytest.raises(BuildError, match=r"there is no GPU here.*wait_for_nodes: true"):
        build(asked)
    build({**asked, "wait_for_nodes": True})
    assert ServeSpec(**asked).fewest == 1
