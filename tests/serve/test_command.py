"""`rlsvc serve` and `rlsvc query`: what is refused before Ray starts, and the whole way with openpi's client."""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_fakes import FakeRunner, observation, serving

from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.commands.query import query
from rlsvc.commands.serve import serve
from rlsvc.core.errors import BundleError, BusyError, NotFoundError, UserError
from rlsvc.serve import deploy, haproxy, preflight
from rlsvc.serve.deploy import ray_for_serving
from rlsvc.serve.haproxy import free_ports, haproxy_environment, wait_for_replicas
from rlsvc.serve.keys import new_key, write_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "robot.local", ""])
def test_listening_for_others_without_authentication_is_refused(bundle, host):
    with pytest.raises(UserError, match="loopback only"):
        serve(str(bundle), host=host)


def test_with_keys_it_may_listen_for_others_and_bad_keys_are_refused_first(bundle, tmp_path):
    (port,) = free_ports(1)
    preflight.check_address("0.0.0.0", port, keys=True)
    (tmp_path / "keys.json").write_text("{}")
    with pytest.raises(UserError, match="expected a file of keys"):
        serve(str(bundle), host="0.0.0.0", port=port, keys=tmp_path / "keys.json")


def test_a_port_in_use_is_refused(bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BusyError, match="is in use"):
        serve(str(bundle), port=taken.getsockname()[1])


def test_a_port_that_another_serve_is_about_to_use_is_refused():
    (port,) = free_ports(1)
    with (
        preflight.hold_port(port),
        pytest.raises(BusyError, match="another `rlsvc serve`"),
        preflight.hold_port(port),
    ):
        pass
    with preflight.hold_port(port):
        pass


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "a b", "x" * 65, "ä", "a\n"])
def test_names_that_do_not_stand_in_a_url_are_refused(bundle, name):
    with pytest.raises(UserError, match="policy name"):
        serve(str(bundle), name=name)


def test_what_is_not_a_bundle_is_refused(tmp_path, bundle):
    (port,) = free_ports(1)
    with pytest.raises(NotFoundError, match="expected the folder of a policy bundle"):
        serve(str(tmp_path / "nothing"), port=port)
    with pytest.raises(BundleError, match="not a policy bundle"):
        serve(str(tmp_path), port=port)


def test_a_bundle_of_another_schema_version_is_refused_in_one_line(bundle, tmp_path):
    (port,) = free_ports(1)
    shutil.copytree(bundle, tmp_path / "newer")
    file = tmp_path / "newer" / "bundle.json"
    file.write_text(file.read_text().replace('"schema_version": 2', '"schema_version": 7'))
    with pytest.raises(BundleError, match=r"schema_version is 7, this rlsvc reads 1 and 2$"):
        serve(str(tmp_path / "newer"), port=port)


def test_a_normaliser_group_that_the_bundle_has_not_is_refused(bundle):
    (port,) = free_ports(1)
    with pytest.raises(BundleError, match="normaliser group: got 'arm', expected one of all"):
        serve(str(bundle), port=port, group="arm")


def test_a_registered_model_is_looked_up_under_the_root_that_was_given(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=str(tmp_path)):
        serve("models:/arm@production", port=port, root=str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 5000},
        {"max_body_mb": 17},
        {"deadline_s": 0.0},
        {"batch_wait_ms": -1.0},
        {"chunk_expiry_ms": 0.0},
        {"chunk_expiry_ms": float("inf")},
        {"log_level": "warnin"},
        {"port": 0},
        {"port": 70000},
    ],
)
def test_options_out_of_range_are_refused(bundle, options):
    ((option, value),) = options.items()
    with pytest.raises(UserError, match=rf"{option}\W+(got '?)?{value}") as caught:
        serve(str(bundle), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "have", "text"),
    [
        ((1, 1.0, 1.0), (2, 0), "there is no GPU here"),
        ((3, 1.0, 0.0), (2, 0), "need 3 CPUs, there are 2"),
        ((2, 0.5, 1.0), (2, 1), "hold 1 such replicas"),
        ((3, 0.1, 0.4), (2, 1), "hold 2 such replicas"),
        ((1, 1.0, 1.5), (2, 2), "whole cards"),
        ((0, 1.0, 0.0), (2, 0), "1 replica or more"),
        ((1, -1.0, 0.0), (2, 0), "no negative share"),
    ],
)
def test_resources_that_are_not_there_are_refused_at_once(ask, have, text):
    with pytest.raises(UserError, match=text):
        preflight.check_resources(*ask, have_cpus=have[0], have_gpus=have[1])


@pytest.mark.parametrize(
    ("ask", "have"),
    [((2, 1.0, 0.0), (2, 0)), ((4, 0.5, 0.5), (2, 2)), ((3, 0.1, 1 / 3), (2, 1)), ((1, 0.0, 2.0), (1, 2))],
)
def test_resources_that_fit_are_taken(ask, have):
    preflight.check_resources(*ask, have_cpus=have[0], have_gpus=have[1])


def test_no_driver_means_no_gpu_whatever_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert preflight.local_gpus(tmp_path / "none") == 0


def test_haproxys_own_ports_are_fenced_to_loopback(tmp_path):
    environment = haproxy_environment(tmp_path)
    config = tmp_path / "haproxy.cfg"
    config.write_text("global\nfrontend prometheus\n    bind :9101\nlisten stats\n  bind *:8404\n  stats enable\n")
    # -c: HAProxy checks the configuration, which the wrapper has rewritten, and ends.
    subprocess.run(
        [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(config)], check=False, capture_output=True
    )
    binds = [line.strip() for line in config.read_text().splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", "bind 127.0.0.1:8404"]


def test_the_port_that_haproxy_could_not_take_is_named(tmp_path):
    environment = haproxy_environment(tmp_path)
    config = tmp_path / "haproxy.cfg"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(f"defaults\n    mode http\n    timeout client 1s\nlisten stats\n    bind 127.0.0.1:{port}\n")
        ended = subprocess.run(
            [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-f", str(config)], capture_output=True, text=True
        )
    report = f"ray::HAProxyManager.ready()\nRuntimeError: HAProxy crashed during startup: {ended.stderr}"
    cause = deploy._cause([report])
    assert cause.startswith("HAProxy did not start: Binding [")
    assert "proxy stats" in cause
    assert cause.endswith(f"[127.0.0.1:{port}]")


def test_ports_are_none_that_the_system_gives_to_whoever_asks_for_any():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(20000 <= port < lowest for port in ports)


def test_haproxys_data_port_speaks_tls_where_a_certificate_is_given(tmp_path, certificate):
    environment = haproxy_environment(tmp_path)
    config = tmp_path / "haproxy.cfg"
    data = "frontend http_frontend\n    bind 127.0.0.1:8000\n    mode http\n"
    other = "frontend grpc_frontend\n    bind 0.0.0.0:9000 proto h2\n"
    config.write_text(f"defaults\n    mode http\n    timeout client 1s\n{data}{other}")
    for _ in range(2):  # HAProxy is started anew with the same file
        checked = subprocess.run(
            [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(config)],
            capture_output=True, text=True, env={**os.environ, haproxy.PEM: str(certificate)},
        )  # fmt: skip
        assert checked.returncode == 0, checked.stderr
    binds = [line.strip() for line in config.read_text().splitlines() if "bind" in line]
    tls = f"ssl crt {certificate} ssl-min-ver TLSv1.2 alpn http/1.1"
    assert binds == [f"bind 127.0.0.1:8000 {tls}", "bind 0.0.0.0:9000 proto h2"]


def test_files_that_are_no_certificate_and_its_key_are_refused(tmp_path, certificate, bundle):
    del certificate
    cert, key, encrypted = (tmp_path / name for name in ("certificate.pem", "key.pem", "encrypted.pem"))
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", str(key), "-out", str(encrypted), "-passout", "pass:x"], check=True
    )
    for files, text in (
        ((tmp_path / "none.pem", key), "--tls-cert .*none.pem: no such file"),
        ((cert, tmp_path / "none.pem"), "--tls-key .*none.pem: no such file"),
        ((cert, cert), "expected a certificate in PEM and the key that belongs to it"),
        ((key, key), "expected a certificate in PEM and the key that belongs to it"),
        ((cert, encrypted), "--tls-key .*encrypted.pem: it is encrypted"),
    ):
        with pytest.raises(UserError, match=text) as caught:
            serve(str(bundle), tls_cert=files[0], tls_key=files[1])
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--tls-cert and --tls-key: give both, or neither"):
        serve(str(bundle), tls_cert=cert)


def test_the_listener_of_a_cluster_gets_its_certificate_from_who_starts_it(tmp_path, certificate, monkeypatch):
    del certificate
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    files = (tmp_path / "certificate.pem", tmp_path / "key.pem")
    with pytest.raises(UserError, match=r"start its Ray with RLSVC_TLS_PEM="), ray_for_serving(tls=files):
        pass


def test_serving_waits_until_haproxy_reaches_the_replicas_themselves(monkeypatch):
    table = (
        "# pxname,svname,status,\nhttp-rlsvc,SERVE_REPLICA_a,{},\nhttp-rlsvc,SERVE_PROXY_ACTOR-fallback-b,UP,\n"
        "http-rlsvc,BACKEND,UP,\n"
    )
    asked = []

    class Stats(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(table.format("UP" if len(asked) > 2 else "DOWN").encode())

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Stats) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(server.server_address[1]),
        }
        wait_for_replicas(1, environment)
        assert asked == ["/stats;csv"] * 3
        with pytest.raises(TimeoutError, match="reaches 1 of 2 replicas"):
            wait_for_replicas(2, environment, timeout_s=0.2)
        # The images and `ray up` name no port.
        monkeypatch.setattr(haproxy, "STATS_PORT", server.server_address[1])
        wait_for_replicas(1, {"RAY_SERVE_ENABLE_HA_PROXY": "1"})
        server.shutdown()
    wait_for_replicas(1, {})  # Serve's own proxy: nothing to wait for


def test_query_prints_actions_and_latency(tmp_path, capsys):
    with serving(FakeRunner()) as url:
        query(url, example=True, n=5)
        printed = capsys.readouterr().out
        assert "policy 'fake' version fake-1" in printed
        assert "p50" in printed
        assert "(n = 5)" in printed
        window = observation(2.0)
        np.savez(tmp_path / "window.npz", **window)
        (tmp_path / "window.json").write_text(
            json.dumps(
                {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in window.items()}
            )
        )
        for name in ("window.npz", "window.json"):
            query(url, observation=tmp_path / name, transport="http")
            assert "│ 6 " in capsys.readouterr().out  # the state's sum is the first action


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("x.json", b"{", "not readable as .json"),
        ("x.json", b"[1]", "expected a map of arrays"),
        ("x.npz", b"PK", "not readable as .npz"),
        ("x.npy", b"", "expected a .json or .npz"),
        ("missing.json", None, "no such file"),
    ],
)
def test_query_refuses_files_that_are_no_observation(tmp_path, file, content, text):
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=text):
        query("127.0.0.1:1", observation=tmp_path / file)


def test_query_never_unpickles(tmp_path):
    np.savez(tmp_path / "x.npz", state=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="not readable"):
        query("127.0.0.1:1", observation=tmp_path / "x.npz")


def test_query_wants_one_source_of_observations(tmp_path):
    with pytest.raises(UserError, match="either --observation"):
        query("127.0.0.1:1")
    with pytest.raises(UserError, match="either --observation"):
        query("127.0.0.1:1", observation=tmp_path / "x.json", example=True)


def test_query_says_when_nothing_answers():
    (port,) = free_ports(1)
    with pytest.raises(UserError, match="cannot be reached"):
        query(f"127.0.0.1:{port}", example=True)


def rlsvc(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "rlsvc.cli", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, **options
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_the_whole_way_from_a_bundle_to_openpis_client_and_ctrl_c(bundle, tmp_path, certificate, monkeypatch, secure):
    (port,) = free_ports(1)
    url = f"{'https://' if secure else ''}127.0.0.1:{port}"
    key, kept = new_key("robot", ("read", "act"))
    write_file(tmp_path / "keys.json", (kept,))
    options = ["--port", str(port), "--batch-size", "4", "--keys", str(tmp_path / "keys.json")]
    if secure:
        options += ["--tls-cert", str(tmp_path / "certificate.pem"), "--tls-key", str(tmp_path / "key.pem")]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    command = [sys.executable, "-m", "rlsvc.cli", "serve", str(bundle), *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    started = []
    try:
        assert read_until(process, "Ctrl-C", seconds=180), process.poll()
        started = psutil.Process(process.pid).children(recursive=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            policy = WebsocketClientPolicy(f"ws{'s' if secure else ''}://127.0.0.1:{port}", api_key=key)
        assert policy.infer({"observation.state": np.zeros(3)})["actions"].shape == (4, 2)
        keyless = rlsvc("query", url, "--example")
        assert (keyless.returncode, "it asks for an API key" in keyless.stderr) == (2, True)
        queried = rlsvc("query", url, "--example", "-n", "20", "--key", key)
        assert queried.returncode == 0, queried.stderr
        assert "latency over ws: p50" in queried.stdout
        second = rlsvc("serve", str(bundle), "--port", str(port))
        assert second.returncode == 2
        assert f"port {port} on 127.0.0.1 is in use" in second.stderr
        listening = {
            connection.laddr.ip
            for child in started
            if child.name() == "haproxy"
            for connection in child.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        with PolicyClient(url, options=ClientOptions(timeout_s=90.0, retries=100, key=key)) as client:
            before = client.act({"observation.state": np.zeros(3)}, seed=1, step=2)
            (replica,) = [child for child in started if "ServeReplica" in " ".join(child.cmdline())]
            replica.kill()
            after = client.act({"observation.state": np.zeros(3)}, seed=1, step=2)
            np.testing.assert_array_equal(after.action, before.action)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


def read_until(process, text, seconds):
    """Whether a line of the process's output has the text within so many seconds."""
    lines = queue.SimpleQueue()
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout], daemon=True).start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if text in lines.get(timeout=1):
                return True
        except queue.Empty:
            continue
    return False
