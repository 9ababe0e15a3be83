"""Device maps: layers of one model over unequal devices that compute one after another (UELLM, section 4.3).

``search`` picks an algorithm: exact ones for small or regular problems, else heuristics with a lower bound.
"""

from shoal.place.device_maps.from_model import problem_of
from shoal.place.device_maps.greedy import greedy_map
from shoal.place.device_maps.objectives import OBJECTIVES, Objective
from shoal.place.device_maps.problem import DeviceMap, MapProblem, Stage, evaluate, stages_of
from shoal.place.device_maps.search import DEVICE_MAPS, FoundMap, find_map

__all__ = [
    "DEVICE_MAPS",
    "OBJECTIVES",
    "DeviceMap",
    "FoundMap",
    "MapProblem",
    "Objective",
    "Stage",
    "evaluate",
    "find_map",
    "greedy_map",
    "problem_of",
    "stages_of",
]
