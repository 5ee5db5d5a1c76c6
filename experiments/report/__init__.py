"""Reads all result.json files, and writes one page with all tables and figures.

    python -m experiments.report                 runs/ -> results/report.html, tables/ and figures/
    python -m experiments.report --runs runs --out results

Each cell shows our score beside the paper's (experiments/paper.json). Runs on different data or
with different budgets never meet in one table. The page has a section for every "setting", which is
the kind of data and everything that was changed from a method's defaults, except for the one factor
that an ablation varies. A line under every table says what its ± means. Methods that were run with
reduced budgets of their own meet in one table with --own-budgets, which names these budgets."""
