#!/usr/bin/env bash
# All tables and figures of the paper: `bash run_all.sh`, `bash run_all.sh --quick`, `bash run_all.sh --help`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" # so the paths in --out and --data-dir count from here
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
exec "$python" run_all.py "$@" # exec: signals reach the runner itself
