"""The account of the data: nothing is read without being counted here."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# Reasons that the settings ask for; they do not count as faults of the data.
WANTED = ("score too low", "also in the held-out text")
EXAMPLES_KEPT = 3
_MAX_DETAIL = 300


def visible(text: str) -> str:
    """Control characters written out; they would act on the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass
class FileAccount:
    """One file, or those of a pattern: rows == trained + held_out + refused.

    path: as the user wrote it. role: "sft", "replay" or "heldout_replay".
    files: how many; None where `path` names the file itself.
    refused, examples: reason -> rows, and "file:line: detail" of the first few.
    notes: what was accepted but is worth telling -> how often.
    formats: name -> rows. truncated: SFT rows cut at the window. tokens: kept.
    """

    path: str
    role: str
    sha256: str
    rows: int = 0
    trained: int = 0
    held_out: int = 0
    truncated: int = 0
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    files: int | None = None

    def refuse(self, line: int, reason: str, detail: str) -> None:
        """Count a refused row and keep the first few of each reason."""
        self.refused[reason] += 1
        kept = self.examples.setdefault(reason, [])
        if len(kept) < EXAMPLES_KEPT:
            # Details quote the row, which may be of any length and content.
            detail = visible((detail or reason)[:_MAX_DETAIL])
            kept.append(f"{self.path}:{line}: {detail}")

    def check(self) -> None:
        """Every row is in one of the three places, once."""
        placed = self.trained + self.held_out + sum(self.refused.values())
        assert self.rows == placed, f"{self.path}: {self.rows} rows, {placed} placed"

    @property
    def faults(self) -> int:
        """Refused rows that no setting asked for."""
        return sum(n for reason, n in self.refused.items() if reason not in WANTED)


def together(path: str, accounts: Sequence[FileAccount]) -> FileAccount:
    """The account of all files of a pattern; its sha256 is over theirs, with names."""
    names = [f"{a.sha256} {a.path.rpartition('/')[2]}\n" for a in accounts]
    sha256 = hashlib.sha256("".join(names).encode()).hexdigest()
    made = FileAccount(path, accounts[0].role, sha256, files=len(accounts))
    for one in accounts:
        for name in ("rows", "trained", "held_out", "truncated", "tokens"):
            setattr(made, name, getattr(made, name) + getattr(one, name))
        for name in ("refused", "notes", "formats"):
            getattr(made, name).update(getattr(one, name))
        for reason, kept in one.examples.items():
            mine = made.examples.setdefault(reason, [])
            mine += kept[: EXAMPLES_KEPT - len(mine)]
    return made


@dataclass(frozen=True, kw_only=True)
class CategoryAccount:
    """One category of the plan.

    documents, held_out: documents (long text: pieces) trained, and kept for evaluation.
    tokens: of its documents once. copies: times each is seen in an epoch, on average.
    planned_tokens, planned_share: what the run will see, and its share of all.
    trained_tokens: those of the planned tokens that carry loss.
    """

    name: str
    documents: int
    held_out: int
    tokens: int
    copies: float
    planned_tokens: int
    planned_share: float
    trained_tokens: int


@dataclass(frozen=True, kw_only=True)
class DataAccount:
    """Everything the start screen tells about data.

    fill_share: tokens / (windows * window). epochs: passes over the SFT examples,
        replay_epochs: over the replay text, both as a number with a fraction.
    replay_share: realised share of replay in the planned tokens.
    template: "built-in" or "jinja".
    """

    files: tuple[FileAccount, ...]
    categories: tuple[CategoryAccount, ...]
    window: int
    windows: int
    tokens: int
    trained_tokens: int
    fill_share: float
    epochs: float
    replay_epochs: float
    replay_share_asked: float
    replay_share: float
    eval_sft_windows: int
    eval_replay_windows: int
    template: str

    def lines(self) -> list[str]:
        """The account as plain lines."""
        made = self.file_lines()
        for c in self.categories:
            seen = f", {c.copies:.2f} times an epoch" if c.copies != 1 else ""
            made.append(
                f"category {c.name}: {c.documents:,} documents ({c.held_out:,} held "
                f"out), {c.tokens:,} tokens{seen}, {c.planned_share:.1%} of the plan"
            )
        made.append(
            f"plan: {self.windows:,} windows of {self.window}, {self.fill_share:.1%} "
            f"full, {self.tokens:,} tokens, {self.trained_tokens:,} trained; "
            f"SFT epochs {self.epochs:.2f}, replay epochs {self.replay_epochs:.2f}"
        )
        made.append(
            f"replay: {self.replay_share:.2%} of the tokens "
            f"(asked {self.replay_share_asked:.2%}); evaluation windows: "
            f"{self.eval_sft_windows} SFT, {self.eval_replay_windows} replay; "
            f"template: {self.template}"
        )
        return made

    def file_lines(self) -> list[str]:
        """What was read, without what a run would make of it."""
        return [line for file in self.files for line in _file_lines(file)]


def _file_lines(file: FileAccount) -> list[str]:
    refused = sum(file.refused.values())
    formats = ", ".join(f"{name} {n:,}" for name, n in sorted(file.formats.items()))
    cut = f", {file.truncated:,} cut at the window" if file.truncated else ""
    many = f" ({file.files:,} files)" if file.files is not None else ""
    made = [
        f"{file.role} {file.path}{many}: {file.rows:,} rows = {file.trained:,} trained "
        f"+ {file.held_out:,} held out + {refused:,} refused; {file.tokens:,} tokens"
        f"{cut} ({formats or 'no rows'})"
    ]
    for reason, n in file.refused.most_common():
        made.append(f"  refused {n:,}: {reason}; first: {file.examples[reason][0]}")
    made += [f"  note: {note}: {n:,}" for note, n in sorted(file.notes.items())]
    return made
