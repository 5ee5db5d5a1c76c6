"""The paper's experiments: which runs there are, the runner, and the report of what they found."""
