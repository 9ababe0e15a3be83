"""Entry point of ``python -m experiments``."""

import sys

from experiments.command import app
from shoal.cli import exit_with
from shoal.cli.app import run

exit_with(lambda: run(sys.argv[1:], app))
