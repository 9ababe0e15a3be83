"""Pictures of measured numbers.

Here belong plots (and, as they come, tables, reports and traces) made from plain numbers. What was
measured, and what its figures mean, is known only to the caller; nothing here measures or computes a metric.
Importing this package imports no plotting library: that is an extra, loaded when a picture is drawn.
"""

from shoal.measure.plots import Panel, Series, require_plots, save_plot

__all__ = ["Panel", "Series", "require_plots", "save_plot"]
