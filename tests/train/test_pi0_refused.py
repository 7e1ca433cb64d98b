"""Input that does not fit a pi0 run ends the command with one message, by name, before training starts."""

from pathlib import Path

import numpy as np
import pytest

from rlsvc.cli import main
from rlsvc.envs.two_goals import demonstrations

DATA = Path(__file__).parent.parent / "data"
GEMMA = "{width: 8, depth: 1, mlp_dim: 8, heads: 1, head_dim: 8}"
SMALL = [
    "policy.vision={width: 8, depth: 1, mlp_dim: 8, heads: 1, patch: 24}", f"policy.backbone={GEMMA}",
    f"policy.expert={GEMMA}", "policy.horizon=4", "algo.batch_size=4", "env=null", "tracking.trackers=[]",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two demonstrations, the same without a task, and weights of PaliGemma's that are too narrow."""
    folder = tmp_path_factory.mktemp("refused")
    columns = demonstrations(2)
    np.savez(folder / "data.npz", **columns)
    np.savez(folder / "silent.npz", **{**columns, "tasks": np.asarray(["", " "])})
    np.savez(folder / "narrow.npz", **{"params/llm/embedder/input_embedding": np.zeros((259, 6), np.float32)})
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["policy.cameras=[observation.images.wrist]"],
            "policy.cameras names 'observation.images.wrist', which is no image of the contract; it has: "
            "observation.image",
        ),
        (["data.observation=[observation.images.wrist,observation.state,task]"], "'observation.images.wrist'"),
        (["policy.cameras=[]"], "policy.cameras has 0 cameras, the contract 1: 'observation.image' is not named"),
        (["data.observation=[observation.image,observation.state]"], "pi0 needs one prompt"),
        (["data.datasets.0.path={folder}/silent.npz"], "the prompt is empty"),
        (
            ["+algo.weights={{path: {folder}/narrow.npz, may_lack: ['.*']}}"],
            "'embedding' has shape (259, 6), the policy (259, 8)",
        ),
        (["+algo.weights.path={folder}/nothing"], "nothing: no such file or folder"),
        (
            ["policy.tokenizer={{name: paligemma, path: {folder}/paligemma_tokenizer.model}}"],
            "paligemma_tokenizer.model': not readable (No such file or directory)",
        ),
        (
            [f"data.norm_stats={DATA}/openpi_norm_stats/zwbx_pi05_libero.json"],
            "statistics 'state' for 'observation.state': got 8 dimensions, the contract has 2",
        ),
        (["learner.fsdp=2"], "learner.fsdp x learner.tensor: 2 x 1 does not divide the 1 devices of 1 ranks"),
    ],
)
def test_a_run_that_cannot_be_ends_with_two_and_one_message(words, message, folder, tmp_path, monkeypatch, capsys):
    data = f"data.datasets.0.path={folder}/data.npz"
    words = [word.format(folder=folder) for word in words]
    monkeypatch.setattr(
        "sys.argv", ["rlsvc", "train", "experiment=pi05_debug", f"root={tmp_path}", data, *SMALL, *words, "--local"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("checkpoints/*"))
