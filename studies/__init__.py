"""What finished runs and their data say: scripts that read them, and the tables of results/."""
