"""The table that `python -m dynashift.datasets` prints."""

from pathlib import Path

from dynashift import download
from dynashift.checksums import identify
from dynashift.episodes import read_hdf5
from dynashift.errors import UserError
from dynashift.files import progress_bar


def listing(data_dir: Path | None = None) -> str:
    """All datasets in data_dir, $DYNASHIFT_DATA, ~/.d4rl/datasets and ~/.cache/dynashift.

    Args:
        data_dir: a further folder to look in.
    """
    folders = [*download.data_folders(data_dir), download.cache_folder()]
    found = [sorted([*folder.glob("*.hdf5"), *folder.glob("*/*.hdf5")]) for folder in folders]
    paths = dict.fromkeys(path for part in found for path in part)
    head = f"{'rows':>8} {'episodes':>8} {'return':>7} {'min':>7} {'max':>7} {'score':>6}"
    lines = [f"{'file':58} {head}  sha256"]
    for path in progress_bar(paths, unit="file", leave=False, disable=len(paths) < 5):
        try:
            if download.task_of(path) is None:
                raise UserError(
                    f"{path}: not a name like hopper_medium-v2.hdf5 or hopper_morph_medium.hdf5"
                )
            data = read_hdf5(path, *download.task_of(path))
        except UserError as error:
            lines.append(f"{path.name:58} {str(error).removeprefix(f'{path}: ')}")
            continue
        returns = data.returns[data.complete] if data.complete.any() else data.returns
        row = f"{len(data):8} {len(data.starts):8}"
        row += f" {returns.mean():7.0f} {returns.min():7.0f} {returns.max():7.0f}"
        states = {"published": "as published", "generated": "as generated"}
        status = states.get(identify(path)[0], "unknown file")
        lines.append(f"{path.name:58} {row} {data.score:6.1f}  {data.sha256[:12]} {status}")
    if not paths:
        lines.append(f"(none in {', '.join(map(str, folders))})")
    return "\n".join(lines)
