"""The loads of `tierfs report` as a picture: bytes by where they came from over time, and where readers stalled.

The only importer of matplotlib, which the extra ``report`` brings. Loads come as control/report.py makes them.
"""

import io
from collections.abc import Sequence
from typing import Any

from tierfs.blocks.errors import ControlError
from tierfs.blocks.text import printable

_MIB = 1 << 20
_SERIES = (  # key of a slice, label, colour; colours that the colour-blind can tell apart (Okabe and Ito)
    ("source_bytes", "from the source", "#0072B2"),
    ("warm_bytes", "from warm", "#E69F00"),
    ("hot_bytes", "from hot", "#D55E00"),
    ("read_bytes", "given to readers", "#000000"),
)


def png(loads: Sequence[dict[str, Any]]) -> bytes:
    """One panel for each load. Raises ControlError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ControlError("a picture needs matplotlib: pip install 'tierfs[report]'") from error
    figure = Figure(figsize=(10, 3.2 * len(loads)), layout="constrained")
    for position, load in enumerate(loads):
        _draw(figure.add_subplot(len(loads), 1, position + 1), load)
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=100)
    return made.getvalue()


def _draw(axes: Any, load: dict[str, Any]) -> None:
    times = [0.0, *((position + 1) * load["slice_s"] for position in range(len(load["slices"])))]
    for key, label, colour in _SERIES:
        total = 0
        heights = [0.0]
        for one in load["slices"]:
            total += one[key]
            heights.append(total / _MIB)
        if total:
            axes.plot(times, heights, label=label, color=colour, linestyle="--" if key == "read_bytes" else "-")
    for stall in load["stalls"]:
        axes.axvspan(stall["at_s"], stall["at_s"] + stall["seconds"], color="#CC79A7", alpha=0.25, linewidth=0)
    # A path is no mathematics: a dollar sign in it is one.
    name = printable(load["path"]).replace("$", r"\$")
    axes.set_title(f"load {load['number']}: {name} ({load['end']})", loc="left", fontsize=10)
    axes.set_xlabel("s (shaded: reads that took more than 0.1 s)")
    axes.set_ylabel("MiB")
    if axes.lines:
        axes.legend(loc="upper left", fontsize=8)
