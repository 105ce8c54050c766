"""What is said of a run where text stands in for held-out examples."""

from bitmamba.config import DataConfig
from bitmamba.data.account import DataAccount


def held_out_name(cfg: DataConfig, account: DataAccount) -> str:
    """What "eval/loss" is the loss of: see `evaluate.held_out_losses`."""
    if account.eval_sft_windows:
        return "held-out examples"
    return "held-out replay text (no examples)" if cfg.sft else "held-out text"


def held_out_hints(cfg: DataConfig, account: DataAccount) -> list[str]:
    """One line where there are examples, and none of them is held out."""
    if not cfg.sft or account.eval_sft_windows:
        return []
    rows = sum(f.rows for f in account.files if f.role == "sft")
    text = account.eval_replay_windows
    instead = "eval/loss is that of held-out replay text" if text else "no eval/loss"
    return [
        f"no SFT example is held out ({rows:,} rows, heldout_share "
        f"{cfg.heldout_share:g}): {instead}; raise data.heldout_share or add examples"
    ]
