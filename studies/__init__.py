"""Analyses of finished runs and their data, and the tables of results/."""
