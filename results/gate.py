"""What the gate's score measures, at several bandwidths:  python results/gate.py --sources data --targets data/target

For the first 20,000 source transitions of each task of results/README.md: correlation of d_m with the fragment's own
self term k(S, S), rank correlation with the distance from the fragment's first state to the nearest target state, and
how much of the gate is kept when the bandwidth changes: 1 / median squared distance of target states (the default), of
as many source and target states together, 1 / d, a tenth of the first. Sources are SOURCES/ROBOT/medium.hdf5, targets
the published files.
"""

import sys
from pathlib import Path

import numpy as np
import tyro
from scipy.spatial import cKDTree
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import taf_preprocess as taf
from dynashift.datasets import load_pair

TASKS = ["ant kinematic", "halfcheetah gravity", "halfcheetah morph", "hopper kinematic", "walker2d gravity"]


def main(sources: Path, targets: Path, size: int = 20_000) -> None:
    print("| task | gamma | corr(d, k(S, S)) | rank corr. with distance | kept as with the median rule |")
    print("|---|---|---|---|---|")
    for task in TASKS:
        env, shift = task.split()
        file = str(sources / env / "medium.hdf5")
        source, target = load_pair(env, shift, file, "medium", data="d4rl", data_dir=targets, source_size=size)
        mu, sd = taf.statistics(target.observations)
        z_s, z_t = taf.normalise(source.observations, mu, sd), taf.normalise(target.observations, mu, sd)
        distance, _ = cKDTree(z_t).query(z_s)  # [N]
        some = min(len(z_s), len(z_t), 2500)
        both = np.concatenate([z[np.linspace(0, len(z) - 1, some).astype(int)] for z in (z_s, z_t)])
        median, pooled = (taf.bandwidth(z, "median") for z in (z_t, both))
        rules = {"median": median, "median of both": pooled, "1 / d": 1 / z_s.shape[1], "median / 10": median / 10}
        K, first = taf.PAPER_K[shift][env], None
        for name, gamma in rules.items():
            d, own = taf.mmd_scores(z_s, source.lengths, z_t, target.lengths, K, gamma)
            gate = taf.keep_mask(d, len(d) // 2)
            first = gate if first is None else first
            corr, rank = np.corrcoef(d, own)[0, 1], spearmanr(d, distance)[0]
            print(f"| {task} | {name} = {gamma:.4f} | {corr:.2f} | {rank:.2f} | {gate[first].mean():.2f} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
