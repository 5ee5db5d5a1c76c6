"""Arguments of the training scripts, by the names of their flags."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import tyro


def module_of(script: str) -> ModuleType:
    """baselines/bc.py -> the module baselines.bc"""
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


def read_args(module: ModuleType, words):
    """What the script reads from these words of its command line."""
    args = tyro.cli(module.Args, args=words)
    if not hasattr(module, "defaults"):
        return args
    return tyro.cli(module.Args, args=words, default=module.defaults(args))


def flatten(args) -> dict:
    return dataclasses.asdict(args)


def replace(args, **values):
    return dataclasses.replace(args, **values)


def compose(Args, **values):
    """The inverse of `flatten`. Values may come from a JSON file, where a path is a string."""
    paths = {field.name for field in dataclasses.fields(Args) if "Path" in str(field.type)}
    values = {k: Path(v) if k in paths and v else v for k, v in values.items()}
    return Args(**values)
