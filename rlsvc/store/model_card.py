"""The card of a policy on the hub, made from its bundle and its run: nothing stands in it that neither says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.spec.compose import to_yaml
from rlsvc.spec.run import RunSpec
from rlsvc.spec.tracking import TrackingSpec
from rlsvc.store.bundle import LEROBOT_WEIGHTS, Bundle
from rlsvc.store.dataset_card import Described, license_fields, table
from rlsvc.store.runs import Measured, Score

SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key|access_?key", re.IGNORECASE)
"""Names of environment variables whose values are left out."""
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
LABELS = ("id", "task", "suite", "observation")
"""Fields that tell one environment of a suite from another."""


@dataclass(frozen=True)
class Trained:
    """How a policy was trained.

    Attributes:
        spec: of the run, as it stands in its folder.
        datasets: what is known of `spec.data.datasets`, in their order.
    """

    spec: RunSpec
    datasets: tuple[Described, ...] = ()


def model_card(
    repo: str,
    bundle: Bundle,
    *,
    files: Sequence[str],
    versions: Mapping[str, str],
    trained: Trained | None,
    measured: Sequence[Measured] = (),
    licence: str | None = None,
) -> str:
    """README.md of a policy on the hub.

    The same arguments give the same text: no date stands in it.

    Args:
        repo: OWNER/NAME.
        bundle: the policy.
        files: names of the bundle's files.
        versions: packages and commit that made it.
        trained: None where no run is known, as of an imported policy.
        measured: evaluations of this bundle.
        licence: identifier on the hub; None states none.
    """
    lerobot = LEROBOT_WEIGHTS in files
    parts = [
        f"---\n{_metadata(repo, bundle, lerobot, trained, measured, licence)}\n---\n# {repo.partition('/')[2]}\n",
        _opening(bundle, trained),
        f"## Use\n\n{_use(repo, lerobot)}",
        f"## What it sees and does\n\n{_contract(bundle.contract)}",
        f"## Training data\n\n{_data(trained)}",
        f"## Evaluation\n\n{_evaluation(measured)}",
        f"## Training\n\n{_training(bundle, versions, trained)}",
    ]
    return "\n".join(parts)


def portable(spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """A specification that may be shown and runs elsewhere, and what was changed.

    Trackers and the folder of runs become the defaults, since they are of one place. Paths from the root of a disk
    become relative ones: datasets lie under datasets/. Names and passwords in addresses go, and so do the values of a
    simulator's environment variables that are called as secrets are.
    """
    changed: dict[str, str] = {}
    tree = spec.replace(resume=False, overwrite=False, root="runs", tracking=TrackingSpec()).model_dump(mode="json")
    for dataset in (tree.get("data") or {}).get("datasets", ()):
        dataset["path"] = _relative(dataset["path"], "datasets/", changed)
    _clean(tree, changed)
    notes = [f"`{new}`: a path of the machine that trained it, give yours" for new in changed.values()]
    runtime = (tree.get("env") or {}).get("runtime")
    if runtime:
        secret = [name for name in runtime["variables"] if SECRET.search(name)]
        for name in secret:
            del runtime["variables"][name]
        notes += [f"`env.runtime.variables.{name}`: left out, since its name is that of a secret" for name in secret]
    return RunSpec.model_validate(tree), notes


def _relative(path: str, folder: str, changed: dict[str, str]) -> str:
    if not path.startswith(("/", "~")) or path.startswith("/dev/"):
        return path
    if path not in changed:
        name, number = Path(path).name, 2
        new = folder + name
        while new in changed.values():
            new, number = f"{folder}{name}_{number}", number + 1
        changed[path] = new
    return changed[path]


def _clean(tree: Any, changed: dict[str, str]) -> None:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, str):
            tree[key] = USER_INFO.sub("", _relative(value, "", changed))
        elif isinstance(value, dict | list):
            _clean(value, changed)


def _metadata(
    repo: str,
    bundle: Bundle,
    lerobot: bool,
    trained: Trained | None,
    measured: Sequence[Measured],
    licence: str | None,
) -> str:
    policy = bundle.policy
    kinds = [str(policy.get("type") or policy["name"]), *([] if trained is None else [str(trained.spec.algo.name)])]
    suites = [str(each.env["name"]) for each in measured]
    known = [] if trained is None else [data.hub for data in trained.datasets if data.hub]
    results = [result for each in measured for result in _results(each, trained)]
    data = ModelCardData(
        library_name="lerobot" if lerobot else "rlsvc",
        pipeline_tag="robotics",
        tags=list(dict.fromkeys(["robotics", "rlsvc", *(["lerobot"] if lerobot else []), *kinds, *suites])),
        datasets=list(dict.fromkeys(known)) or None,
        model_name=repo.partition("/")[2] if results else None,
        eval_results=results or None,
        license=None if licence is None else license_fields(licence)["license"],
    )
    return data.to_yaml().rstrip()


def _results(measured: Measured, trained: Trained | None) -> list[EvalResult]:
    """The metric that the run is judged by, and successes where they are told."""
    judged = "max_reward" if trained is None else str(trained.spec.evaluation.metric)
    names = dict.fromkeys([judged] if judged == "return" else [judged, "success"])
    return [
        EvalResult(
            task_type="robotics",
            task_name="Robotics",
            dataset_type=str(measured.env["name"]),
            dataset_name=_environment(measured.env),
            metric_type=name,
            metric_name=f"{name}, mean of {measured.episodes} episodes, 95 % interval {_interval(score)}",
            metric_value=round(score.mean, 6),
        )
        for name in names
        if (score := measured.scores.get(name)) is not None
    ]


def _environment(env: Mapping[str, Any]) -> str:
    labels = [str(env[name]) for name in LABELS if env.get(name) not in (None, "")]
    return " ".join([str(env["name"]), *labels])


def _interval(score: Score) -> str:
    return "not known" if score.low is None or score.high is None else f"{score.low:.3f} to {score.high:.3f}"


def _opening(bundle: Bundle, trained: Trained | None) -> str:
    policy, run = bundle.policy, bundle.run
    kind = str(policy.get("type") or policy["name"])
    if not run.get("project") or not run.get("name"):
        origin = f", made of `{run['converted_from']}`" if run.get("converted_from") else ""
        return f"A `{kind}` policy{origin}, written by rlsvc. No run is known that trained it.\n"
    by = "" if trained is None else f"with `{trained.spec.algo.name}` "
    return (
        f"A `{kind}` policy, trained {by}by rlsvc: run `{run['project']}/{run['name']}`, step {run.get('step')}, seed "
        f"{run.get('seed')}.\n"
    )


def _use(repo: str, lerobot: bool) -> str:
    name = repo.partition("/")[2]
    text = f"```bash\nrlsvc policies pull {repo} bundles/{name}\nrlsvc serve bundles/{name}\n```\n"
    return text + ("\nPlain LeRobot loads it, too, with its policy's `from_pretrained`.\n" if lerobot else "")


def _contract(contract: Contract) -> str:
    rows = [("sees", f"`{key}`", *_feature(feature)) for key, feature in contract.observation.items()]
    rows.append(("does", "`action`", *_feature(contract.action)))
    return (
        f"{table(('', 'name', 'shape', 'dtype', 'unit', 'range', 'elements'), rows)}\n"
        f"It sees {contract.n_obs_steps} observation step(s), oldest first, and gives {contract.action_horizon} "
        f"action(s) at a time, at {contract.rate_hz:g} Hz.\n"
    )


def _feature(feature: Feature) -> tuple[str, str, str, str, str]:
    shape = " x ".join(map(str, feature.shape)) or "1"
    return (
        shape,
        "text" if feature.dtype == TEXT else feature.dtype,
        feature.unit,
        _range(feature),
        ", ".join(feature.names),
    )


def _range(feature: Feature) -> str:
    if feature.is_image:
        return "0 to 255"
    if feature.low is None and feature.high is None:
        return ""
    return f"{_bound(feature.low)} to {_bound(feature.high)}"


def _bound(bound: tuple[float, ...] | None) -> str:
    """One number where all elements have the same."""
    if bound is None:
        return "no bound"
    return ", ".join(f"{x:g}" for x in (bound[:1] if len(set(bound)) == 1 else bound))


def _data(trained: Trained | None) -> str:
    if trained is None:
        return "Not known.\n"
    if not trained.datasets:
        return "None: it learnt from its own rollouts.\n"
    rows = []
    for data in trained.datasets:
        at = f" at {data.commit[:12]}" if data.commit else ""
        hub = f"[{data.hub}](https://huggingface.co/datasets/{data.hub}){at}" if data.hub else ""
        where = ", ".join(filter(None, (hub, data.source))) or "not stated"
        sizes = ("" if data.episodes is None else data.episodes, "" if data.steps is None else data.steps)
        rows.append((f"`{data.name}`", *sizes, data.licence or "not stated", where))
    return table(("dataset", "episodes", "steps", "licence", "source"), rows)


def _evaluation(measured: Sequence[Measured]) -> str:
    if not measured:
        return "Not measured.\n"
    texts = []
    for each in measured:
        rows = [(name, f"{score.mean:.3f}", _interval(score)) for name, score in each.scores.items()]
        text = (
            f"{_environment(each.env)}, {each.episodes} episodes:\n\n{table(('metric', 'mean', '95 % interval'), rows)}"
        )
        if each.tasks:
            text += "\n" + table(("task", "success"), [(name, f"{x:.3f}") for name, x in sorted(each.tasks.items())])
        texts.append(text)
    return "\n".join(texts)


def _training(bundle: Bundle, versions: Mapping[str, str], trained: Trained | None) -> str:
    made = ", ".join(f"{name} {value}" for name, value in versions.items() if name != "commit") or "not known"
    text = (
        f"- versions: {made}\n- commit of rlsvc: {versions.get('commit', 'not known')}\n- bundle: `{bundle.id}`\n"
        f"- compute precision: {bundle.precision}\n"
    )
    if trained is None:
        return text
    spec, notes = portable(trained.spec)
    listed = "".join(f"- {note}\n" for note in notes)
    told = f"\nBefore it runs elsewhere:\n\n{listed}" if notes else ""
    return (
        f"{text}\nThe whole specification, for `rlsvc train FILE.yaml`:\n{told}\n"
        f"<details>\n\n```yaml\n{to_yaml(spec)}```\n\n</details>\n"
    )
