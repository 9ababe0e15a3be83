"""Experiments of the papers that Shoal's policies come from, simulated with Shoal's code.

A folder for each paper, with a module for each experiment: its workload and set-up, what it takes from the
paper, what it assumes, and where its figures differ and why. A new experiment is a module with a
``REPRODUCTION``, entered in ``registry``.
"""

from experiments.registry import REPRODUCTIONS, Reproduction, find
from experiments.result import FULL, Effort, Result, Row, between

__all__ = ["FULL", "REPRODUCTIONS", "Effort", "Reproduction", "Result", "Row", "between", "find"]
