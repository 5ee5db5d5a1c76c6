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
        values = [self.flags.get(f"--{name}") for name in ("env", "shift", "source", "target")]
        parts = [Path(self.words[0]).stem, *(Path(value).stem for value in values if value)]
        if "--seed" in self.flags:
            parts.append(f"seed{self.flags['--seed']}")
        return re.sub(r"[^\w.+-]", "_", "-".join([*parts, digest("\0".join(self.words))]))

    def __str__(self) -> str:
        return "python " + shlex.join(self.words)


def read_commands(path: Path) -> list[Command]:
    """The lines of a file as --list prints them. A line may end in `# after NAME`."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape")  # paths may hold any bytes
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; --commands is a file") from None
    own = re.fullmatch(r"run_all-\d+-([0-9a-f]{8})\.txt", path.name)  # of `slurm.Submission`
    if own and own[1] != digest(text):
        raise UserError(f"{path}: damaged since it was submitted; delete it and submit again")
    commands = []
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}: {error} in the line {line!r}; correct it") from None
        after = re.search(r"# after (\S+)$", line)
        if words and Path(words[0]).name.startswith("python"):
            words = words[1:]
        if words:
            commands.append(Command(tuple(words), after[1] if after else None))
    return commands


def digest(text: str) -> str:
    """Of a command or a file of commands, for its name."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def write_commands(commands: list[Command]) -> str:
    """The text of a file that `read_commands` reads."""
    return "".join(f"{c}  # after {c.after}\n" if c.after else f"{c}\n" for c in commands)
