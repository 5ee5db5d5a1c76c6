"""A command: the words after `python`, and a short name for them in the names of files."""

import hashlib
import itertools
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dynashift.errors import UserError


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    after: str | None = None  # the name of a command that has to end first

    @cached_property
    def flags(self) -> dict[str, str]:
        """Every word and the one that follows it, so that flags["--seed"] is the seed."""
        return dict(itertools.pairwise(self.words))

    @cached_property
    def name(self) -> str:
        """Script, task and seed for the reader, and 8 hex digits of a hash of all words."""
        digest = hashlib.sha256("\0".join(self.words).encode()).hexdigest()[:8]
        values = [self.flags.get(f"--{name}") for name in ("env", "shift", "source", "target")]
        parts = [Path(self.words[0]).stem, *(Path(value).stem for value in values if value)]
        if "--seed" in self.flags:
            parts.append(f"seed{self.flags['--seed']}")
        return re.sub(r"[^\w.+-]", "_", "-".join([*parts, digest]))

    def __str__(self) -> str:
        return "python " + shlex.join(self.words)


def read_commands(path: Path) -> list[Command]:
    """The lines of a file as --list prints them. A line may end in `# after NAME`."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; --commands is a file") from None
    commands = []
    for line in lines:
        words = shlex.split(line, comments=True)
        after = re.search(r"# after (\S+)$", line)
        if words and Path(words[0]).name.startswith("python"):
            words = words[1:]
        if words:
            commands.append(Command(tuple(words), after[1] if after else None))
    return commands


def write_commands(commands: list[Command]) -> str:
    """The text of a file that `read_commands` reads."""
    return "".join(f"{c}  # after {c.after}\n" if c.after else f"{c}\n" for c in commands)
