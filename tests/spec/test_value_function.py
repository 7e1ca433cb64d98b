import pytest

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import compose

FILTER = ["experiment=pusht_demo", "algo.advantage.bundle=somewhere"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (FILTER, "quantile, threshold: got neither, expected one of them"),
        ([*FILTER, "algo.advantage.quantile=0.3", "algo.advantage.threshold=0"], "quantile, threshold: got both"),
        ([*FILTER, "algo.advantage.quantile=30"], r"'algo\.advantage\.quantile': got 30"),
        (
            [*FILTER, "algo.advantage.quantile=0.3", "algo.advantage.mode=weight"],
            r"'algo\.advantage\.mode': got 'weight'",
        ),
        (["experiment=value_pusht", "env={name: pusht}"], "env: algo value_function trains what does not act"),
        (
            ["experiment=value_pusht", "policy.head.support=[1,-1]"],
            r"support: got \[1\.0, -1\.0\], expected the smaller end",
        ),
        (["experiment=value_pusht", "policy.returns.discount=1.01"], r"'policy\.returns\.discount': got 1\.01"),
        (["experiment=value_pusht", "algo={name: imitation}"], "algo imitation trains diffusion.*, got value_mlp"),
        (
            ["experiment=value_pusht", "~policy", "policy={name: diffusion}"],
            "algo value_function trains value_mlp or value_vlm, got diffusion",
        ),
        (
            [*FILTER, "algo.advantage.quantile=0.3", "algo.advantage.mode=condition"],
            r"policy\.advantage_in_prompt: got False, expected True",
        ),
        (["experiment=pi05_debug", "policy.advantage_in_prompt=true"], "advantage_in_prompt: got True, expected False"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(words, message):
    with pytest.raises(SpecError, match=message):
        compose(words)


def test_the_head_is_a_choice():
    spec = compose(["experiment=value_pusht", "policy.head={name: regression}"])
    assert spec.policy.head.name == "regression"
