"""Analyses of finished runs and their data, and the tables of results/."""

from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded
