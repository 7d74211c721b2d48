"""The picture of a stress run: each request on the time axis, how long first tokens took, and the rate of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpilot_tools.bench.load import LoadResult
from kvpilot_tools.bench.sample_statistics import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAIT, _DECODE, _FAILED = "#d9a441", "#3b76b0", "#b03b3b"
_RATE_BINS = 60


def write_picture(result: LoadResult, path: Path, title: str) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_requests(figure.add_subplot(grid[0, :]), result)
    _draw_first_tokens(figure.add_subplot(grid[1, 0]), result)
    _draw_rate(figure.add_subplot(grid[1, 1]), result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_requests(axes: Axes, result: LoadResult) -> None:
    for row, record in enumerate(result.records):
        if record.error is not None or not record.text_s:
            axes.barh(row, record.ended_s - record.sent_s, left=record.sent_s, color=_FAILED, height=0.8)
            continue
        axes.barh(row, record.text_s[0] - record.sent_s, left=record.sent_s, color=_WAIT, height=0.8)
        axes.barh(row, record.ended_s - record.text_s[0], left=record.text_s[0], color=_DECODE, height=0.8)
    if len(result.records) <= 40:
        labels = [f"{record.prompt_tokens or record.wanted_prompt_tokens} tokens" for record in result.records]
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("requests: waiting for the first token, then streaming (failed ones in red)", fontsize=10)
    axes.legend(
        handles=[axes.barh(0, 0, color=color, label=label) for color, label in ((_WAIT, "waiting"), (_DECODE, "text"))],
        fontsize=8,
        loc="lower right",
    )


def _draw_first_tokens(axes: Axes, result: LoadResult) -> None:
    for size in sorted(set(result.plan.prompt_tokens)):
        times = sorted(
            record.ttft_s
            for record in result.successes
            if record.wanted_prompt_tokens == size and record.ttft_s is not None
        )
        if times:
            shares = [(i + 1) / len(times) for i in range(len(times))]
            label = f"{size} tokens (median {percentile(times, 0.5):.2f} s)"
            axes.step(times, shares, where="post", marker=".", label=label)
    axes.set_xlabel("time to first token, seconds")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=0)
    if axes.has_data():
        axes.legend(fontsize=8)


def _draw_rate(axes: Axes, result: LoadResult) -> None:
    times = [at for record in result.records for at in record.text_s]
    width = max(result.duration_s / _RATE_BINS, 1e-9)
    if times:
        axes.hist(
            times,
            bins=[i * width for i in range(_RATE_BINS + 1)],
            weights=[1 / width] * len(times),
            color=_DECODE,
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s (stream events)")
