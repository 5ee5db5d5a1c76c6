"""Files that are there whole or not at all."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: str | Path):
    """Yields a temporary path in the same folder; what was written there gets its name when the block ends well.

    A kill at any moment leaves the old file or the new one, never a mixture.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
