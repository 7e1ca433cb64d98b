"""Learning curves as PNG."""

from __future__ import annotations

from pathlib import Path

from rlsvc.store.tracking import read_metrics

LOSSES = ("train/loss", "train/total_loss", "validation/loss")
SCORES = ("eval/max_reward", "eval/success")
RETURNS = ("collect/return", "eval/return")


def write_learning_curve(metrics: Path, path: Path, title: str, *, returns: bool, online: bool) -> Path | None:
    """Losses (log scale) and scores over the run's clock; None when nothing was logged yet.

    Args:
        metrics: the run's metrics.jsonl.
        path: of the picture.
        title: above it.
        returns: scores are returns, else the largest reward and success.
        online: the clock counts environment steps, else updates.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # A run that is stopped before its first log has no file.
    rows = read_metrics(metrics) if metrics.exists() else []
    panels = [
        [name for name in names if any(name in row for row in rows)]
        for names in (LOSSES, RETURNS if returns else SCORES)
    ]
    panels = [names for names in panels if names]
    if not panels:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.5), squeeze=False, layout="constrained")
    for axis, names in zip(axes[0], panels, strict=True):
        for name in names:
            points = [
                (row["step"], row[name], row.get(f"{name}_low"), row.get(f"{name}_high")) for row in rows if name in row
            ]
            steps = [p[0] for p in points]
            (line,) = axis.plot(steps, [p[1] for p in points], marker="." if len(points) < 40 else None, label=name)
            banded = [p for p in points if p[2] is not None and p[3] is not None]
            axis.fill_between(
                [p[0] for p in banded],
                [p[2] for p in banded],
                [p[3] for p in banded],
                color=line.get_color(),
                alpha=0.2,
            )
        axis.set_xlabel("environment steps" if online else "gradient updates")
        axis.legend(frameon=False)
        if names[0].endswith("loss"):
            axis.set_yscale("log")
        elif not returns:
            axis.set_ylim(0, 1)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
