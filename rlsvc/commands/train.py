"""`rlsvc train` and `rlsvc evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlsvc.core.errors import UserError

if TYPE_CHECKING:
    from rlsvc.spec.env import EnvBase
    from rlsvc.spec.run import RunSpec
    from rlsvc.train.evaluate import Evaluation
    from rlsvc.train.run import RunResult

INTERRUPTED = 130
METRICS = ("max_reward", "success", "return", "length")


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="experiment=NAME or a YAML file, then key=value, such as algo.learning_rate=3e-4."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="One process, without Ray.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in its folder.")] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="As --resume where the run has begun, else begin: for jobs tried again.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in its folder first; asks.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the resolved specification and end.")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Write a JAX profiler trace to this folder (with --local).")
    ] = None,
) -> None:
    """Train a policy from demonstrations or rollouts, evaluate it, register its bundle."""
    from rlsvc.spec.compose import compose, to_yaml

    spec = compose(words or [])
    if go_on and (resume or overwrite):
        raise UserError("--continue, --resume, --overwrite: choose one")
    if resume or overwrite:
        spec = spec.replace(resume=resume or spec.resume, overwrite=overwrite or spec.overwrite)
    console = Console()
    if cfg:
        console.print(to_yaml(spec), markup=False, highlight=False, end="", soft_wrap=True)
        return
    if profile is not None and not local:
        raise UserError("--profile: traces this process; add --local")
    from rlsvc.train.run import has_begun, run_dir

    if go_on:
        spec = spec.replace(resume=has_begun(spec))
    if spec.overwrite and has_begun(spec) and not yes:
        where = f"{spec.root}/{spec.project}/{spec.name}" if "://" in spec.root else run_dir(spec)
        if not typer.confirm(f"Delete {where} and all that it holds?"):
            raise typer.Exit(1)

    result = run_with_progress(spec, console, local=local, profile=profile)
    rows = {
        "run": result.run_dir,
        "bundle": result.bundle,
        "registered as": result.registered,
        "learning curve": result.plot,
    }
    rows |= {f"video, {name}": path for name, path in result.videos.items()}
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value), style="default")
    console.print(table)
    if result.interrupted:
        console.print(f"Stopped at step {result.step}. Go on with the same command and --resume.")
        raise typer.Exit(INTERRUPTED)


def run_with_progress(
    spec: RunSpec, console: Console, *, local: bool = False, profile: Path | None = None
) -> RunResult:
    """`rlsvc.train.run.train` with a progress bar and a line for each evaluation."""
    from rlsvc.train.run import train as run_training

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    score = "return" if spec.evaluation.metric == "return" else "max_reward"
    digits = 1 if score == "return" else 3
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=spec.length)

        def show(step: int, metrics: dict[str, float]) -> None:
            progress.update(task, completed=step)
            loss = metrics.get("train/loss", metrics.get("train/total_loss"))
            if loss is not None:
                progress.update(task, description=f"loss {loss:.4f}")
            if f"eval/{score}" in metrics:
                value, low, high = (metrics.get(f"eval/{score}{end}", float("nan")) for end in ("", "_low", "_high"))
                progress.console.print(
                    f"step {step}: {score.replace('_', ' ')} {value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}], "
                    f"success {100 * metrics['eval/success']:.0f} % of {metrics['eval/episodes']:.0f} episodes",
                    highlight=False,
                    markup=False,
                )

        return run_training(spec, local=local, on_metrics=show, profile=profile)


def evaluate(
    bundle: Annotated[
        str, typer.Argument(help="Folder of a policy bundle, models:/name@alias, or the baseline: random.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the environment, such as task=walker-walk action_repeat=2."),
    ] = None,
    env: Annotated[str, typer.Option(help="Environment: pusht, gymnasium, dm_control, ...")] = "pusht",
    observation: Annotated[
        str | None, typer.Option(help="What the environment shows, such as keypoints, state or pixels.")
    ] = None,
    episodes: Annotated[int | None, typer.Option(help="Episodes, one seed each; 50 when left out.")] = None,
    trials: Annotated[
        int | None, typer.Option(help="Episodes of every task of a suite, such as the 50 of LIBERO's evaluations.")
    ] = None,
    first_seed: Annotated[int, typer.Option(help="Episode i uses first_seed + i.")] = 100_000,
    workers: Annotated[int, typer.Option(help="Rollout workers; the result does not depend on it.")] = 1,
    parallel: Annotated[int, typer.Option(help="Episodes side by side over all workers.")] = 50,
    sample_steps: Annotated[int | None, typer.Option(help="Denoising steps; the policy's own when left out.")] = None,
    videos: Annotated[
        Path | None, typer.Option(help="Write videos of the best, median and worst episode here.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write every episode's scores here, as JSON, while the evaluation goes on.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over the episodes that --output has.")] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another policy, on the same starts: the difference, with the interval of pairs of episodes."
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Without Ray.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    group: Annotated[
        str | None, typer.Option(help="The environment's normaliser group, for a bundle that has several.")
    ] = None,
    root: Annotated[str, typer.Option(help="Where runs and the model registry live.")] = "runs",
) -> None:
    """Evaluate a policy on episodes, with 95 % confidence intervals."""
    from omegaconf import OmegaConf

    from rlsvc.spec.compose import validate
    from rlsvc.spec.env import spec_class

    if wrong := next((word for word in words or [] if "=" not in word), None):
        raise UserError(f"got '{wrong}', expected key=value of the environment, such as task=walker-walk")
    given = OmegaConf.to_container(OmegaConf.from_dotlist(words or []))
    assert isinstance(given, dict)
    given = {str(key): value for key, value in given.items()}
    shows = {} if observation is None else {"observation": observation}
    env_spec: Any = validate(spec_class(env), {"name": env, **shows, **given})

    from rlsvc.train.standalone import evaluate_bundle

    def scored(policy: str, output: Path | None) -> Evaluation:
        return evaluate_bundle(
            policy,
            env_spec,
            episodes=_count(env_spec, episodes, trials),
            first_seed=first_seed,
            workers=workers,
            parallel=parallel,
            sample_steps=sample_steps,
            local=local,
            device=device,
            group=group,
            root=root,
            output=output,
            resume=resume,
        )

    console = Console()
    evaluation = scored(bundle, output)
    _print_scores(console, bundle, evaluation)
    if against is not None:
        beside = None if output is None else output.with_name(f"{output.stem}_against{output.suffix}")
        other = scored(against, beside)
        _print_scores(console, against, other)
        table = Table("metric", "difference", "95 % interval of pairs", title=f"{bundle} minus {against}, seed by seed")
        for metric in METRICS:
            interval = evaluation.minus(other, metric)
            table.add_row(metric, f"{interval.mean:+.3f}", f"{interval.low:+.3f} to {interval.high:+.3f}")
        console.print(table)
        if beside is not None:
            console.print(f"scores of {against}: {beside}")
    if output is not None:
        console.print(f"scores: {output}")
    if videos is not None:
        from rlsvc.train.evaluate import write_video

        for name, episode in evaluation.extremes("max_reward").items():
            console.print(f"video, {name}: {write_video(episode, env_spec, videos / f'{name}_seed{episode.seed}.mp4')}")


def _print_scores(console: Console, policy: str, evaluation: Evaluation) -> None:
    table = Table("metric", "mean", "95 % interval", title=f"{policy}, {len(evaluation.episodes)} episodes")
    for metric in METRICS:
        interval = evaluation.interval(metric)
        table.add_row(metric, f"{interval.mean:.3f}", f"{interval.low:.3f} to {interval.high:.3f}")
    console.print(table)
    tasks = evaluation.by_task()
    if len(tasks) > 1:
        table = Table("task", "success", "95 % interval", "episodes")
        for name, part in sorted(tasks.items()):
            interval = part.interval("success")
            row = (f"{interval.mean:.3f}", f"{interval.low:.3f} to {interval.high:.3f}", str(len(part.episodes)))
            table.add_row(name, *row)
        console.print(table)


def _count(env: EnvBase, episodes: int | None, trials: int | None) -> int:
    """Episodes of an evaluation."""
    if trials is None:
        return 50 if episodes is None else episodes
    if episodes is not None:
        raise UserError("--episodes, --trials: choose one; trials are the episodes of every task")
    if env.task_count is None:
        raise UserError("--trials: it is not known how many tasks this suite has; give --episodes, or task=")
    return trials * env.task_count
