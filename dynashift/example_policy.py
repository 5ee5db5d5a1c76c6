"""Steps an exported policy with NumPy and onnxruntime alone: python example.py"""

import json
from pathlib import Path

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent
about = json.loads((HERE / "policy.json").read_text())
session = onnxruntime.InferenceSession(str(HERE / "policy.onnx"))

n = 1  # robots side by side
# Zeros are the memory of a robot before its first step. To start robot i again, zero its rows.
memory = {k: np.zeros([n, *x["shape"][1:]], x["dtype"]) for k, x in about["memory"].items()}
for _ in range(3):
    # Your robot: observation [n, d_s] and, where policy.json lists it, the last step's reward [n].
    inputs = {k: np.zeros([n, *x["shape"][1:]], x["dtype"]) for k, x in about["inputs"].items()}
    inputs["observation"][:] = about["state_mean"]
    action, *after = session.run(None, inputs | memory)
    memory = dict(zip(memory, after, strict=True))
    print(action.tolist())
