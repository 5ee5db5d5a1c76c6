"""The published step that the benchmarks measure against."""

import torch

import taf_dt as taf
from benchmarks import published
from benchmarks.bench_train import synthetic
from dynashift import runs


def test_the_published_step_runs_the_policy_once(monkeypatch):
    passes, forward = [], published.PlainPolicy.forward

    def counted(self, *inputs):
        passes.append(self)
        return forward(self, *inputs)

    monkeypatch.setattr(published.PlainPolicy, "forward", counted)
    args = runs.compose(taf.Args, **taf.QUICK | dict(K=5, eta_reg=0.4, target_batch=8))
    data = synthetic(11, 3, rows=2_000, target=1_000)
    update = published.published_update(data, taf.build(args, 11, 3, "cpu")["cvae"], args)
    update()
    policy_bar, policy = passes  # the target policy once, the policy once
    assert policy_bar is not policy
    before = [torch.clone(net.action.weight.detach()) for net in (policy_bar, policy)]
    update()
    assert len(passes) == 4
    assert (policy.action.weight != before[1]).any()
