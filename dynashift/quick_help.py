"""Makes --help fast: scripts import this first, and slow libraries become placeholders.

No help text needs these libraries, and after --help a script does nothing else. Without --help this
module does nothing.
"""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

SLOW = {"torch", "ot", "matplotlib", "mujoco", "gymnasium", "h5py", "scipy"}


class Placeholder(ModuleType):
    """A module and everything in it: can be called, derived from, and asked for more."""

    __file__, __path__ = "", ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(name)

    def __call__(self, *arguments, **options):
        return self

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):  # in annotations
        return self


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Finder) if name.split(".")[0] in SLOW else None

    @staticmethod
    def create_module(spec):
        return Placeholder(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def is_ours() -> bool:
    """Whether the program is a script of this project, and not one that imports the package."""
    root = Path(__file__).resolve().parents[1]
    return root in Path(sys.argv[0]).resolve().parents and (root / "taf_dt.py").exists()


WANTED = bool({"-h", "--help"} & set(sys.argv[1:])) and is_ours()
# A library half of which is loaded already would not work with the other half as a placeholder.
if WANTED and not SLOW & sys.modules.keys():
    sys.meta_path.insert(0, Finder)
