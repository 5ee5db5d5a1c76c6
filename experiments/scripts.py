"""Arguments of the training scripts, by the names of their flags."""

import importlib
from pathlib import Path
from types import ModuleType

# Arguments that are paths, which JSON has as strings.
PATHS = ("out", "data_dir", "reference", "export")


def module_of(script: str) -> ModuleType:
    """baselines/bc.py -> the module baselines.bc"""
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


def read_args(module: ModuleType, words):
    """What the script reads from these words of its command line."""
    runs = importlib.import_module("dynashift.runs")  # here, because it imports torch
    return runs.read_args(module.Args, module.defaults, "", list(words))


def from_json(values: dict) -> dict:
    """Arguments from a JSON file, with the types that the scripts expect."""
    return {k: Path(v) if k in PATHS and v else v for k, v in values.items()}
