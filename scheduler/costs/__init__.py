"""How long a step takes: fixed, from datasheets, or learnt from a real run. Standard library only.

`load_cost` finds a model by its spec or in a file; `fit_cost` learns one from the steps of a run.
"""

from scheduler.costs.constant import ConstantCost
from scheduler.costs.fit import FitErrors, FitReport, evaluate, fit_cost, format_report
from scheduler.costs.fitted import FittedCost, Program, SecondsPer
from scheduler.costs.learning import Learnt, learn_cost
from scheduler.costs.roofline import Machine, ModelShape, RooflineCost, preset_machines, preset_models
from scheduler.costs.samples import parse_sample, read_samples, sample_line, write_samples
from scheduler.costs.stored import StoredCost, format_cost, load_cost, parse_cost, save_cost

__all__ = [
    "ConstantCost",
    "FitErrors",
    "FitReport",
    "FittedCost",
    "Learnt",
    "Machine",
    "ModelShape",
    "Program",
    "RooflineCost",
    "SecondsPer",
    "StoredCost",
    "evaluate",
    "fit_cost",
    "format_cost",
    "format_report",
    "learn_cost",
    "load_cost",
    "parse_cost",
    "parse_sample",
    "preset_machines",
    "preset_models",
    "read_samples",
    "sample_line",
    "save_cost",
    "write_samples",
]
