"""Kept for those who know this command; the same as `python -m experiments.report`."""

from experiments.report.__main__ import main

if __name__ == "__main__":
    main()
