#!/usr/bin/env bash
# All tables and figures of the paper: `bash run_all.sh --help`. The work is in experiments/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" # paths in --out and --data-dir are relative to this folder
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
exec "$python" -m experiments.runner "$@" # exec: signals reach the runner itself
