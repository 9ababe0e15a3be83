"""The papers' experiments, run again with Shoal's own code, and their figures beside ours.

Here belongs one module for each experiment: its workload, its set-up, what it takes from the paper, what it
assumes, where it differs and why. Policies, engines and the simulator are rooms below; a reproduction
only puts them together. A new one is a module that has ``REPRODUCTION``, entered in ``registry``.
"""

from experiments.registry import REPRODUCTIONS, Reproduction, find
from experiments.result import FULL, Effort, Result, Row, between

__all__ = ["FULL", "REPRODUCTIONS", "Effort", "Reproduction", "Result", "Row", "between", "find"]
