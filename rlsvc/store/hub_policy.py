"""Policies on the hub: a bundle with a card made from its run, pushed; a bundle, pulled and verified."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from huggingface_hub.hf_api import RepoFile

from rlsvc.core.errors import BundleError, SpecError, UserError
from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec
from rlsvc.store.bundle import MAX_META_BYTES, META, Bundle, read_bundle, read_manifest, read_versions
from rlsvc.store.dataset_card import Described, describe
from rlsvc.store.folders import new_folder, refuse_in_the_way
from rlsvc.store.hub import CARD, Hub, HubError, Published, Repo, parse_repo
from rlsvc.store.model_card import Trained, model_card
from rlsvc.store.registry import open_registry
from rlsvc.store.run_store import fetch_bundle
from rlsvc.store.runs import SPEC, Measured, best_bundle, measured_in_file, measured_in_run, stored_spec
from rlsvc.store.storage import is_url

SUFFIXES = (".safetensors", ".json", ".model", ".txt")
"""What a bundle's files are: numbers and texts. Nothing that a loader would execute."""
LEROBOT_CONFIG, LEROBOT_MODEL = "config.json", "model.safetensors"
LEROBOT_FILES = re.compile(
    r"config\.json|model\.safetensors|policy_[\w.-]+\.(json|safetensors)"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|tokenizer\.model|vocab\.json"
)
"""What `rlsvc policies import` reads of a folder of LeRobot's."""


@dataclass(frozen=True)
class Source:
    """A bundle to be pushed.

    Attributes:
        bundle: verified.
        run: the folder of the run that trained it; None where none is known.
        trained, measured: what that says.
        notes: what could not be found out.
    """

    bundle: Bundle
    run: Path | None
    trained: Trained | None
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]


def find_source(
    source: str,
    *,
    root: str = "runs",
    store: str | None = None,
    datasets: Sequence[str] = (),
    evaluations: Sequence[Path] = (),
) -> Source:
    """What SOURCE means: the folder of a bundle or of a run (its best bundle), or models:/NAME@ALIAS.

    Args:
        source: as a person gives it.
        root: where runs and the model registry live.
        store: MLflow store; None means MLFLOW_TRACKING_URI, then the root's.
        datasets: OWNER/NAME on the hub of the run's datasets, in their order; none takes what is noted beside them.
        evaluations: files of `rlsvc evaluate --output`, of this bundle.

    Raises:
        UserError: neither is there, the bundle does not verify, a file that the hub shall not get, an evaluation of
            another bundle.
    """
    path, run = _locate(source, root, store)
    bundle = read_bundle(path)
    _refuse_odd_files(path, read_manifest(path))
    notes: list[str] = []
    run = next((folder for folder in (run, *_candidates(bundle, root)) if folder and _made_by(folder, bundle)), None)
    trained, measured = None, []
    if run is None:
        notes.append("no run is known that trained it: its card has no training configuration")
    else:
        try:
            spec = compose([str(run / SPEC)])
            trained = Trained(spec, _described(spec, datasets))
        except SpecError as error:
            notes.append(f"{run / SPEC}: does not fit this rlsvc ({error}): the card has no training configuration")
        step, env = bundle.run.get("step"), (stored_spec(run) or {}).get("env")
        if isinstance(step, int) and env and (found := measured_in_run(run, env, step)):
            measured.append(found)
    if trained is None and datasets:
        raise UserError(f"--dataset: got {datasets[0]}, but no run is known that trained {source}")
    measured += [measured_in_file(file, bundle.id) for file in evaluations]
    if not measured:
        notes.append("no evaluation of this bundle is known: its card has no results (rlsvc evaluate --output FILE)")
    return Source(bundle, run, trained, tuple(measured), tuple(notes))


def policy_contents(repo: Repo, source: Source, licence: str | None = None) -> dict[str, Path | bytes]:
    """What the repository shall hold, by path: the bundle's files and a card."""
    folder, names = source.bundle.path, [META, *read_manifest(source.bundle.path)]
    card = model_card(
        repo.name,
        source.bundle,
        files=names,
        versions=read_versions(folder),
        trained=source.trained,
        measured=source.measured,
        licence=licence,
    )
    return {**{name: folder / name for name in names}, CARD: card.encode()}


def push_policy(
    hub: Hub, repo: Repo, contents: Mapping[str, Path | bytes], *, message: str, private: bool = False
) -> Published:
    """Put a bundle on the hub. What the bundle that was there before had, and this has not, goes.

    Raises:
        HubError: see `Hub.publish`.
    """

    def stale(there: Mapping[str, RepoFile], head: str) -> list[str]:
        if META not in there:
            return []
        with tempfile.TemporaryDirectory() as folder:
            hub.download(repo, head, [there[META]], Path(folder))
            try:
                return list(read_manifest(folder))
            except BundleError:  # of no rlsvc that is known here
                return []

    return hub.publish(repo, contents, message=message, private=private, stale=stale)


def pull_policy(hub: Hub, repo: Repo, target: Path) -> tuple[Bundle, str]:
    """A bundle from the hub, verified; and the commit that it is of.

    Args:
        hub: where it is.
        repo: and what revision of it.
        target: the folder that becomes the bundle; not there yet, or empty.

    Raises:
        HubError: no such repository or revision, no bundle in it, or a file that is not as its manifest says.
        BundleError: the bundle does not verify. Nothing is left at the target.
    """
    refuse_in_the_way(target)
    commit = hub.resolve(repo)
    there = hub.files(repo, commit)
    if META not in there:
        raise HubError(_no_bundle(repo, there))
    if there[META].size > MAX_META_BYTES:
        raise BundleError(f"{repo}: {META} has {there[META].size} bytes, at most {MAX_META_BYTES} are read")
    with new_folder(target) as folder:
        try:
            hub.download(repo, commit, [there[META]], folder)
            manifest = read_manifest(folder)
            _refuse_odd_files(folder, manifest)
            for name, entry in manifest.items():
                found = there.get(name)
                if found is None:
                    raise BundleError(f"'{name}' is in its manifest, but not in the repository")
                if found.size != entry.bytes or (found.lfs is not None and found.lfs.sha256 != entry.sha256):
                    raise BundleError(f"'{name}' is not the file that its manifest names; the repository was changed")
            hub.download(repo, commit, [there[name] for name in manifest], folder)
            bundle = read_bundle(folder)
        except BundleError as error:
            told = str(error).replace(f"{folder}/", "").replace(str(folder), "the bundle")
            raise BundleError(f"{repo} (commit {commit[:12]}): {told}") from error
    return replace(bundle, path=target), commit


@contextlib.contextmanager
def pulled_lerobot(hub: Hub, repo: Repo, target: Path) -> Iterator[tuple[Path, str]]:
    """A folder of LeRobot's from the hub for as long as the context lasts, beside the target; and its commit.

    Only numbers and texts are taken; of both the hub's sums are checked.

    Raises:
        HubError: no such repository or revision, or no policy of LeRobot's in it.
    """
    refuse_in_the_way(target)
    commit = hub.resolve(repo)
    there = hub.files(repo, commit)
    if META in there:
        raise HubError(f"{repo}: is a bundle already, which knows its rate; leave --rate out")
    if not _is_lerobot(there):
        raise HubError(_no_bundle(repo, there))
    wanted = [entry for name, entry in there.items() if LEROBOT_FILES.fullmatch(name)]
    with contextlib.ExitStack() as stack:
        # Its own name becomes the bundle's `converted_from`.
        parent = stack.enter_context(_scratch(target))
        folder = parent / repo.name.partition("/")[2]
        hub.download(repo, commit, wanted, folder)
        yield folder, commit


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); choose another place") from error
    with made as name:
        yield Path(name)


def _locate(source: str, root: str, store: str | None) -> tuple[Path, Path | None]:
    """Folder of the bundle, and of the run as far as the source says it."""
    if source.startswith("models:"):
        registry = open_registry(root, store)
        return registry.resolve(source), registry.run_folder(registry.find(source))
    path = fetch_bundle(source) if is_url(source) else Path(source)
    if not path.is_dir():
        raise UserError(f"'{source}': expected the folder of a bundle or of a run, or models:/NAME@ALIAS")
    if (path / META).is_file():
        return path, None
    if (path / SPEC).is_file():
        return best_bundle(path), path
    raise BundleError(f"{path}: is neither a policy bundle (it has no {META}) nor a run (it has no {SPEC})")


def _candidates(bundle: Bundle, root: str) -> list[Path]:
    """Where the run may lie: the bundle is in it, or the run has its usual place."""
    project, name = bundle.run.get("project"), bundle.run.get("name")
    path = bundle.path.absolute()
    found = [path.parents[1]] if len(path.parents) > 1 else []
    if isinstance(project, str) and isinstance(name, str):
        found += [path.parent / project / name, Path(root) / project / name]
    return found


def _made_by(run: Path, bundle: Bundle) -> bool:
    """Whether this run folder's specification is that of the run that the bundle names."""
    stored = stored_spec(run)
    if stored is None or not isinstance(stored.get("policy"), dict):
        return False
    mine = {name: stored.get(name) for name in ("project", "name", "seed")}
    return (
        mine == {name: bundle.run.get(name) for name in mine} and stored["policy"].get("name") == bundle.policy["name"]
    )


def _described(spec: RunSpec, given: Sequence[str]) -> tuple[Described, ...]:
    datasets = () if spec.data is None else spec.data.datasets
    names = [parse_repo(text, "dataset") for text in given]
    if names and len(names) != len(datasets):
        raise UserError(
            f"--dataset: got {len(names)}, but the run has {len(datasets)} "
            f"({', '.join(d.path for d in datasets) or 'none'}); name each once, in this order"
        )
    found = [describe(Path(dataset.path)) for dataset in datasets]
    return tuple(
        replace(each, hub=repo.name, commit=repo.revision or "") for each, repo in zip(found, names, strict=True)
    ) if names else tuple(found)  # fmt: skip


def _refuse_odd_files(path: Path, manifest: Mapping[str, object]) -> None:
    for name in manifest:
        if PurePosixPath(name).suffix not in SUFFIXES:
            raise BundleError(
                f"{path}: its manifest names '{name}', and a shared bundle has {', '.join(SUFFIXES)} files alone"
            )


def _is_lerobot(there: Mapping[str, RepoFile]) -> bool:
    return LEROBOT_CONFIG in there and LEROBOT_MODEL in there


def _no_bundle(repo: Repo, there: Mapping[str, RepoFile]) -> str:
    if _is_lerobot(there):
        return (
            f"{repo}: has no {META}, so it is no bundle, but a policy of LeRobot's, as it seems; --rate HZ makes a "
            "bundle of it, as `rlsvc policies import` does of a folder"
        )
    listed = ", ".join(sorted(there)[:5]) or "nothing"
    return f"{repo}: is no policy of rlsvc, since it has no {META}; it holds {listed}"
