"""Line charts from the rows of a result."""

from collections.abc import Mapping, Sequence

from experiments.result import Row, Value
from shoal.measure import Panel, Series


def line_panel(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    by: str,
    where: Mapping[str, Value],
    x_label: str,
    y_label: str,
    title: str = "",
) -> Panel:
    """A line for each value of the configuration's ``by``, over the rows whose configuration has ``where``.

    x: a name of the configuration. y: a metric; rows without it are left out. A single point is a dot.
    """
    chosen = [row for row in rows if all(row.config[name] == value for name, value in where.items())]
    series = []
    for colour, name in enumerate(dict.fromkeys(row.config[by] for row in chosen)):
        points = [
            (float(row.config[x] or 0), float(row.metrics[y] or 0))
            for row in chosen
            if row.config[by] == name and row.metrics.get(y) is not None
        ]
        xs, ys = [at for at, _ in points], [value for _, value in points]
        series.append(Series(str(name), xs, ys, line=len(xs) > 1, colour=colour))
    return Panel(title=title, x_label=x_label, y_label=y_label, series=series)
