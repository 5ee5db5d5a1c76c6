"""Makes data: trains a behaviour policy, or rolls out a stored one into a dataset.

    python collect.py train --env hopper --shift morph
    python collect.py rollout --policy POLICY.npz --env hopper --out x.hdf5

experiments/collect.py has the code.
"""

from experiments.collect import main

if __name__ == "__main__":
    main()
