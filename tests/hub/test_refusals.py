"""What cannot be pushed or pulled: one clear sentence each, and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from shared_bundle import TOKEN, make_bundle

ROOT = Path(__file__).parents[2]


def one_sentence(printed):
    errors = [line for line in printed.splitlines() if line and not line.startswith("note: ")]
    assert len(errors) == 1, printed
    assert errors[0].startswith("error: ")
    return errors[0]


def push(rlsvc, source, name="mylab/demo", *words):
    return one_sentence(rlsvc("policies", "push", source, name, *words, code=2))


def pull(rlsvc, name, target, *words):
    printed = one_sentence(rlsvc("policies", "pull", name, target, *words, code=2))
    assert not target.exists()
    return printed


def test_without_a_token_nothing_is_asked(rlsvc, hub, bundle):
    assert "pushing needs a token" in push(rlsvc, bundle)
    assert hub.requests == []


@pytest.mark.parametrize("offline", ["push", "pull"])
def test_offline_says_which_variable(rlsvc, hub, bundle, token_file, tmp_path, monkeypatch, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    try:
        if offline == "push":
            printed = push(rlsvc, bundle, "mylab/demo", "--token-file", token_file)
        else:
            printed = pull(rlsvc, "mylab/demo", tmp_path / "x")
    finally:
        close_session()
    assert "HF_HUB_OFFLINE is set" in printed
    assert hub.requests == []


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no token"), ("two words", "holds no token"), ("hf_ü", "holds no token"), (None, "cannot be read")],
)
def test_a_token_file_without_a_token_is_named_and_not_shown(rlsvc, hub, bundle, tmp_path, content, message):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    printed = push(rlsvc, bundle, "mylab/demo", "--token-file", file)
    assert f"--token-file {file}: {message}" in printed
    assert not content or content not in printed


def test_a_token_that_is_none_is_said(rlsvc, hub, bundle, tmp_path):
    (tmp_path / "token").write_text("hf_madeUp")
    printed = push(rlsvc, bundle, "mylab/demo", "--token-file", tmp_path / "token")
    assert "does not take the token" in printed
    assert "hf_madeUp" not in printed


def test_no_permission_says_what_is_needed(rlsvc, hub, bundle, tmp_path):
    (tmp_path / "token").write_text("hf_malloryToken")
    hub.put("model", "mylab/demo", {"x.json": b"{}"})
    for name in ("mylab/demo", "mylab/new"):
        printed = push(rlsvc, bundle, name, "--token-file", tmp_path / "token")
        assert "it needs write permission there" in printed
    assert hub.files("model", "mylab/demo").keys() == {"x.json"}
    assert ("model", "mylab/new") not in hub.repos


def test_no_such_repository_says_whether_there_was_a_token(rlsvc, hub, tmp_path, token_file):
    assert "no model repository 'mylab/none'" in pull(rlsvc, "mylab/none", tmp_path / "x")
    assert "with the token that was given" in pull(rlsvc, "mylab/none", tmp_path / "x", "--token-file", token_file)


def test_no_such_revision_lists_those_that_are(rlsvc, hub, tmp_path):
    hub.put("model", "mylab/demo", {"x.json": b"{}"}).tags["v1"] = "0" * 40
    printed = pull(rlsvc, "mylab/demo@v2", tmp_path / "x")
    assert "no revision 'v2'. There are: main, v1." in printed


@pytest.mark.parametrize("words", [(), ("--token-file",)])
def test_a_gated_repository_says_to_ask_for_access(rlsvc, hub, tmp_path, words):
    hub.put("model", "mylab/demo", {"bundle.json": b"{}"}, gated=True)
    (tmp_path / "token").write_text("hf_malloryToken")
    printed = pull(rlsvc, "mylab/demo", tmp_path / "x", *((*words, tmp_path / "token") if words else ()))
    assert f"is gated; ask for access on {hub.url}/mylab/demo" in printed


@pytest.mark.parametrize(
    "name", ["demo", "/demo", "mylab/", "mylab/demo/x", "mylab/de mo", "mylab/demo--x", "mylab/demo@"]
)
def test_a_name_that_is_none_is_refused_before_anything_is_asked(rlsvc, hub, bundle, tmp_path, name):
    assert f"'{name}'" in push(rlsvc, bundle, name)
    assert f"'{name}'" in pull(rlsvc, name, tmp_path / "x")
    assert hub.requests == []


def test_a_name_without_an_owner_says_what_is_expected(rlsvc, hub, tmp_path):
    assert "expected OWNER/NAME" in pull(rlsvc, "demo", tmp_path / "x")


def test_a_revision_in_the_name_of_a_push_says_the_option(rlsvc, hub, bundle):
    assert "--revision wide" in push(rlsvc, bundle, "mylab/demo@wide")


def test_a_bundle_that_does_not_verify_is_not_pushed(rlsvc, hub, bundle, token_file):
    (bundle / "params.safetensors").write_bytes(b"short")
    assert "params.safetensors: 5 bytes, the manifest says" in push(
        rlsvc, bundle, "mylab/demo", "--token-file", token_file
    )
    assert hub.requests == []


@pytest.mark.parametrize("odd", ["evil.pkl", "evil.py", "evil.pt", "README.md"])
def test_a_bundle_with_a_file_that_no_bundle_shares_is_not_pushed(rlsvc, hub, tmp_path, token_file, odd):
    path = make_bundle(tmp_path / "odd", files={odd: b"boom"})
    assert f"its manifest names '{odd}'" in push(rlsvc, path, "mylab/demo", "--token-file", token_file)
    assert hub.requests == []


def test_what_is_neither_a_bundle_nor_a_run_is_said(rlsvc, hub, tmp_path):
    assert "expected the folder of a bundle or of a run" in push(rlsvc, tmp_path / "nothing")
    assert "is neither a policy bundle (it has no bundle.json) nor a run" in push(rlsvc, tmp_path)


def test_a_hub_that_fails_or_is_away_is_named(rlsvc, hub, bundle, token_file, tmp_path, monkeypatch):
    hub.fail["GET *"] = 503
    assert f"{hub.url} failed (503)" in push(rlsvc, bundle, "mylab/demo", "--token-file", token_file)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in pull(rlsvc, "mylab/demo", tmp_path / "x")


def test_a_hub_that_is_asked_too_often_is_said(rlsvc, hub, tmp_path):
    hub.fail["GET *"] = 429
    assert "is asked too often" in pull(rlsvc, "mylab/demo", tmp_path / "x")


def test_the_hubs_own_words_are_passed_on_without_the_token(rlsvc, hub, bundle, token_file):
    hub.fail["GET /api/whoami-v2"] = 418
    printed = push(rlsvc, bundle, "mylab/demo", "--token-file", token_file)
    assert "refused (418): made to fail" in printed
    assert TOKEN not in printed


@pytest.mark.parametrize("command", ["policies", "dataset"])
@pytest.mark.parametrize("way", [("push", "x", "mylab/demo"), ("pull", "mylab/demo", "x")])
def test_without_huggingface_hub_one_line_says_which_extra(command, way, tmp_path):
    script = (
        "import sys\nsys.modules['huggingface_hub'] = None\nfrom rlsvc.cli import main\nsys.argv[0] = 'rlsvc'\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, command, *way], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "install rlsvc[hub]" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
