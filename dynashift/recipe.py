"""What --preset recommended of taf_dt.py stands for: choices where the paper's text is silent."""

RECOMMENDED = {"dropout": 0.0, "time_embedding": False, "cosine": True}


def recommended(shift: str) -> dict:
    """Values of flags for this shift."""
    return RECOMMENDED
