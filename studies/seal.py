"""Give older results, which stored their summaries and no hash, today's form:

    python -m studies.seal FOLDER

Each summary is compared with the evaluations before it is dropped, so what is sealed is at least
consistent. Files that have a hash are left alone.
"""

import json
from pathlib import Path

import tyro

from dynashift.errors import UserError, one_line_errors
from dynashift.files import write_json
from dynashift.results import summaries


def seal(folder: tyro.conf.Positional[Path]) -> int:
    """The number of files that were given a hash."""
    sealed = 0
    for path in sorted([*folder.rglob("result.json"), *folder.rglob("args.json")]):
        record = json.loads(path.read_bytes())
        if "sha256" in record:
            continue
        stored = record.pop("summaries", None)
        if path.name == "result.json" and stored != summaries(record["evaluations"]):
            raise UserError(f"{path}: its summaries are not those of its evaluations")
        write_json(path, record)
        sealed += 1
    return sealed


if __name__ == "__main__":
    with one_line_errors():
        print(f"{tyro.cli(seal, description=__doc__)} files sealed")
