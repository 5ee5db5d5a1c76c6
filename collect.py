"""Kept for those who know this command; the same as `python -m experiments.collect`."""

from experiments.collect import main

if __name__ == "__main__":
    main()
