"""What keeps a run safe: when it is saved, and what it does when numbers go bad.

`bitmamba.config` has everything else and re-exports these.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving every `every` steps and at the end, the newest `keep` stay.

    Nothing is saved while numbers are bad, so that every step kept is a good one.

    init_from: a checkpoint folder of another run, a step folder in one, or
        "assets:base"; only its parameters are taken. None starts from scratch.
    """

    every: int = 50
    keep: int = 2
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What a run does about bad steps, signals, and steps that do not end.

    A step is bad when its loss, a gradient or its update is not finite, or when its
    loss is a spike: above the mean of the last 128 good losses by more than
    `spike_sigmas` of their standard deviations and by more than `spike_rise`, once 64
    of them are known. A bad step is skipped: it leaves no trace but a count. After
    `TrainConfig.max_bad_steps` in a row the run goes back to its last good checkpoint
    and on with the data that come next, at `lr_cut` of the learning rate, as it does
    when a held-out loss is not finite. After `max_rollbacks` of that it stops with
    exit code 3 and leaves a bundle for `scripts/replay_step.py`. These settings may
    change on resume.

    spike_sigmas: 0 calls no loss a spike. spike_rise: in nats a token; a floor for
        data that are known by heart, whose losses hardly vary.
    stop_code: exit code after SIGTERM, SIGUSR1 or Ctrl-C, once saved.
    stuck_s: seconds without a step, an evaluated window or a sample after which the
        run writes the stacks of its threads and ends with code 1; 0 is never.

    Source: six standard deviations over 128 steps, counted from half of them on:
        OLMo-core's SkipStepOptimizer. Differs: it looks at gradient norms too, and
        takes skipped losses into its mean. The way back to a checkpoint and past the
        data: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1, without its cut.
        Half an hour is three times what torch.distributed gives a collective on GPUs.
    """

    spike_sigmas: float = 6.0
    spike_rise: float = 0.5
    lr_cut: float = 0.5
    max_rollbacks: int = 2
    stop_code: int = 143
    stuck_s: float = 1800.0
