"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path


def plot_loss(
    path: Path,
    steps: list[int],
    losses: list[float],
    levels: dict[str, float],
) -> None:
    """Draw training loss by step, with horizontal lines for the named levels, and save a PNG.

    Args:
        path: where the picture goes; written aside, then renamed.
        steps: step numbers.
        losses: training loss of each step, in nats a byte.
        levels: name and height of each line, such as the bigram's loss.
    """
    # Only the first rank draws; the others need not spend seconds on this import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="#1f5fa8", linewidth=1.0, label="training loss")
    for (name, level), style in zip(levels.items(), ("--", ":", "-."), strict=False):
        axes.axhline(level, color="#555555", linestyle=style, label=f"{name} {level:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss in nats a byte")
    axes.grid(alpha=0.25)
    axes.legend()
    aside = path.with_suffix(".tmp.png")
    figure.savefig(aside, dpi=130)
    aside.replace(path)
