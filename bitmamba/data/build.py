"""One call from the settings to everything that the training loop needs of data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitmamba.config import DataConfig
from bitmamba.data import shards
from bitmamba.data.account import WANTED, DataAccount, FileAccount
from bitmamba.data.chat import DataTokenizer, Segment, Template, load_template
from bitmamba.data.encode import encode_prompt
from bitmamba.data.evaluation import eval_replay_windows, eval_sft_windows
from bitmamba.data.example import Message, Refused
from bitmamba.data.loading import Loader
from bitmamba.data.plan import Plan, make_plan, plan_digest
from bitmamba.data.store import DocumentStore
from bitmamba.data.summary import make_account
from bitmamba.data.token_cache import TokenCache
from bitmamba.data.tokenise import read_corpus
from bitmamba.data.windows import process_rows
from bitmamba.types import Batch

ROLES = ("sft", "heldout_replay", "replay")
_BESIDE = TokenCache(Path("tokens"))


@dataclass(frozen=True, kw_only=True)
class DataBundle:
    """The data of a run.

    account: what was read, what became of it, what the run will see.
    categories: names; `Batch.source_ids` are indices into it; the last is "replay".
    plan_digest: with the step, determines every global batch.
    fingerprints: of each file, the tokenizer and the template.
    eval_sft, eval_replay: held-out windows, (B, L) batches; empty lists if there are
        no held-out examples or texts. The same for every run on the same data.
    plan, stores: the plan, and the tokens by stream ("sft", "sft_heldout", …).
    """

    account: DataAccount
    categories: tuple[str, ...]
    plan_digest: str
    fingerprints: dict[str, str]
    eval_sft: list[Batch]
    eval_replay: list[Batch]
    plan: Plan
    stores: dict[str, DocumentStore]
    template: Template
    tokenizer: DataTokenizer
    window: int
    steps: int
    batch_size: int
    accumulation: int

    def batches(
        self, start_step: int = 0, *, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        """Training batches from a step on, (M, B, L) fields, M even if it is 1.

        Args:
            start_step: number of updates done; what follows is the same as in a run
                that was never stopped.
            process_index, process_count: serve only this process's share of the rows.

        Raises:
            ValueError: the step is not within the run.
        """
        if not 0 <= start_step <= self.steps:
            raise ValueError(
                f"start_step: got {start_step}; expected 0 to {self.steps} "
                "(train.steps); the run to be continued was longer"
            )
        # grain takes more than a second to import; a wrong path must not wait for it.
        from bitmamba.data.pipeline import StepSource, iterate

        source = StepSource(
            self.plan,
            (self.stores["sft"], self.stores["replay"]),
            window=self.window,
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            rows=process_rows(self.batch_size, process_index, process_count),
        )
        return iterate(source, start_step=start_step)

    def n_tokens(self, step: int) -> int:
        """Tokens, padding not counted, that the update after `step` others reads."""
        n = self.batch_size * self.accumulation
        first, last = self.plan.offsets[[step * n, (step + 1) * n]]
        spans = self.plan.spans[first:last]
        return int((spans[:, 2] - spans[:, 1]).sum())

    def text_ids(self, text: str) -> list[int]:
        """Tokens of a plain text that a model of plain text continues."""
        return encode_prompt([Segment(text, False)], self.tokenizer)

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokens that an answer of the trained form continues."""
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        try:
            return encode_prompt(self.template.prompt(messages), self.tokenizer)
        except Refused as refused:
            raise ValueError(f"prompt {prompt!r}: {refused}") from None


def build_data(
    cfg: DataConfig,
    tokenizer: DataTokenizer,
    *,
    vocab_size: int,
    steps: int,
    batch_size: int,
    accumulation: int = 1,
    max_eval_windows: int = 64,
    cache: TokenCache = _BESIDE,
) -> DataBundle:
    """Read, check, encode and plan everything, once.

    Args:
        cfg: which rows, and how.
        tokenizer: from `bitmamba.io.tokenizer`.
        vocab_size: of the model.
        steps, batch_size, accumulation: the run; its plan has
            steps * batch_size * accumulation windows.
        max_eval_windows: of held-out SFT and of held-out replay each.
        cache: where the tokens of large text are kept; `cfg.token_cache` comes first.

    Raises:
        ValueError: something that the user can fix, in one line.
    """
    if cfg.token_cache is not None:
        cache = cache._replace(folder=Path(cfg.token_cache).expanduser())
    template, loader, stores, categories = _load(cfg, tokenizer, vocab_size, cache)
    _check_trained(loader.files, stores, cfg)
    plan = make_plan(
        sft_lengths=stores["sft"].lengths,
        sft_sources=stores["sft"].sources,
        replay_lengths=stores["replay"].lengths,
        n_windows=steps * batch_size * accumulation,
        window=cfg.window,
        replay_share=cfg.replay_share,
        balance=cfg.balance,
        seed=cfg.seed,
    )
    evaluation = {"window": cfg.window, "batch_size": batch_size}
    eval_sft, n_sft = eval_sft_windows(
        stores["sft_heldout"], max_windows=max_eval_windows, **evaluation
    )
    eval_replay, n_replay = eval_replay_windows(
        stores["heldout_replay"], max_windows=max_eval_windows, **evaluation
    )
    return DataBundle(
        account=make_account(
            loader.files,
            categories,
            stores,
            plan,
            cfg,
            template=template.name,
            eval_windows=(n_sft, n_replay),
        ),
        categories=categories,
        plan_digest=_digest(cfg, stores, categories, batch_size, accumulation),
        fingerprints={
            "tokenizer": tokenizer.fingerprint,
            "template": template.fingerprint,
            **{f"file {f.path}": f.sha256 for f in loader.files},
        },
        eval_sft=eval_sft,
        eval_replay=eval_replay,
        plan=plan,
        stores=stores,
        template=template,
        tokenizer=tokenizer,
        window=cfg.window,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
    )


def _load(
    cfg: DataConfig, tokenizer: DataTokenizer, vocab_size: int, cache: TokenCache
) -> tuple[Template, Loader, dict[str, DocumentStore], tuple[str, ...]]:
    """Every file read, encoded and accounted for; the streams, and the categories."""
    found = _find_files(cfg)
    _check_tokenizer(tokenizer, vocab_size)
    template = load_template(cfg.template, tokenizer)
    loader = Loader(cfg, template, tokenizer, vocab_size)
    large = any(shards.is_large(name) for name in cfg.replay)
    try:
        for role, name, paths in found:
            if role != "replay" or not large:
                loader.load_all(name, paths, role=role)
        stores, categories = loader.stores()
        if large:
            replay = [(name, paths) for role, name, paths in found if role == "replay"]
            stores["replay"], accounts = read_corpus(
                replay, loader=loader, cache=cache, source=len(categories) - 1
            )
            loader.files += accounts
    finally:
        template.close()
    check_refused(loader.files, cfg.max_refused_share)
    return template, loader, stores, categories


def _digest(
    cfg: DataConfig,
    stores: dict[str, DocumentStore],
    categories: tuple[str, ...],
    batch_size: int,
    accumulation: int,
) -> str:
    """Without the number of steps: a longer run has the same plan, continued."""
    return plan_digest(
        {
            "window": cfg.window,
            "replay_share": cfg.replay_share,
            "balance": cfg.balance,
            "seed": cfg.seed,
            "batch": [batch_size, accumulation],
            "categories": categories,
            "sft": stores["sft"].digest(),
            "replay": stores["replay"].digest(),
        }
    )


def _find_files(cfg: DataConfig) -> list[tuple[str, str, list[Path]]]:
    """(role, name, paths) of all files, all looked for before any is read."""
    found: list[tuple[str, str, list[Path]]] = []
    role_of: dict[Path, str] = {}
    for role in ROLES:
        for name in getattr(cfg, role):
            paths = shards.find(name, where=f"data.{role}")
            for path in paths:
                if clash := role_of.get(path.resolve()):
                    which = f" ({path})" if len(paths) > 1 else ""
                    raise ValueError(
                        f"data.{role}: {name!r}{which} is in data.{clash} already; "
                        "expected every file once; remove one"
                    )
                role_of[path.resolve()] = role
            found.append((role, name, paths))
    if not cfg.sft and not cfg.replay:
        raise ValueError(
            "data: got neither sft nor replay files; expected at least one file to "
            "train on"
        )
    return found


def _check_tokenizer(tokenizer: DataTokenizer, vocab_size: int) -> None:
    if tokenizer.eot_id >= vocab_size:
        raise ValueError(
            f"data.tokenizer: end-of-text has id {tokenizer.eot_id}; expected < "
            f"{vocab_size} (model.vocab_size); use the model's own tokenizer"
        )


def check_refused(files: Sequence[FileAccount], max_share: float) -> None:
    """Stop if more of a role's rows than `max_share` were refused as faulty.

    Each role by itself: thousands of good replay texts do not make up for bad examples.
    """
    for role in ROLES:
        mine = [f for f in files if f.role == role]
        rows, faults = sum(f.rows for f in mine), sum(f.faults for f in mine)
        if faults and faults / rows > max_share:
            raise ValueError(
                f"data.{role}: {faults:,} of {rows:,} rows refused "
                f"({faults / rows:.0%}); expected at most {max_share:.0%} "
                f"(data.max_refused_share); {_most_common_refusal(mine, but=WANTED)}"
            )


def _check_trained(
    files: list[FileAccount], stores: dict[str, DocumentStore], cfg: DataConfig
) -> None:
    for role in ("sft", "replay"):
        if getattr(cfg, role) and not len(stores[role].sources):
            mine = [f for f in files if f.role == role]
            counts = (
                f"{sum(f.rows for f in mine):,} rows read, "
                f"{sum(f.held_out for f in mine):,} held out, "
                f"{sum(sum(f.refused.values()) for f in mine):,} refused"
            )
            raise ValueError(
                f"data.{role}: nothing left to train: {counts}; "
                f"{_most_common_refusal(mine) or 'lower data.heldout_share'}"
            )


def _most_common_refusal(
    files: Sequence[FileAccount], *, but: Sequence[str] = ()
) -> str:
    """The commonest reason and its first row; where windows are short, the cure."""
    reasons = [(n, reason, f) for f in files for reason, n in f.refused.items()]
    reasons = [r for r in reasons if r[1] not in but]
    if not reasons:
        return ""
    n, reason, file = max(reasons, key=lambda r: r[0])
    cure = "; raise data.window" if "window" in reason else ""
    return f"most often ({n:,}) {reason!r}: {file.examples[reason][0]}{cure}"
