"""Readers of the public texts behind the bundled assets: README.md names them.

Each reader returns documents as dicts with a `name` ("sotu/1862_abraham_lincoln_r") and
cleaned `text`; choices are made by the sha256 of a name, never by a random generator.
"""

import gzip
import hashlib
import json
import pathlib
import re

# Entries that touch these matters are left out, of the corpus too: humour of its time
# about groups of people, bodies, violence, faith. Speeches and chapters stay whole.
SENSITIVE = re.compile(
    r"\b(?:fuck|shit|piss|crap|damn|sex|nazi|hitler|rap(?:e|ist)|bitch|whore|slut|"
    r"racis|racial|negro|asian|jew|gay|homo|queer|lesbian|cripp|retard|moron|idiot|"
    r"stupid|luser|lamer|loser|genital|penis|vagin|breast|porn|masturb|orgas|condom|"
    r"erot|naked|nude|prostitut|vomit|excre|fece|turd|fart|ass\b|asshole|arse|bastard|"
    r"hell\b|suck|screw|drug|drunk|marijuana|lsd\b|beer|suicid|murder|kill|dead\b|"
    r"death|die\b|dies\b|testic|bend over|mate\b|terroris|islam|muslim|scientolog|"
    r"brain[- ]?dam|cunt|dyke|tits?\b|bondage|virgin|castrat|shot\b|stewardess|"
    r"fatal|illegal|crotch|butt\b|wank|bugger|shame|dick(?:s|less)?\b|oriental|"
    r"cretin|viagra|barf|womb\b|rubber.hose|organ not|digitus|pubert|christ|"
    r"fundamentalis|victim|pervert|obscen|lavator|toilet|urin|fag)",
    re.IGNORECASE,
)
PARTS_OF_SPEECH = {
    "n": "noun",
    "pl.n": "plural noun",
    "v": "verb",
    "vt": "transitive verb",
    "vi": "intransitive verb",
    "adj": "adjective",
    "adv": "adverb",
    "interj": "interjection",
    "excl": "exclamation",
    "pref": "prefix",
    "suff": "suffix",
    "prov": "proverb",
    "imp": "imperative",
}
SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][)\"']))(?<![ (][A-Z]\.)(?<!Mr\.)(?<!esp\.)"
    r"(?=\s+[A-Z\"'(\[])"
)
PLAIN = str.maketrans(  # typographic quotes, no-break space, soft hyphen, BOM
    {
        0x201C: '"',
        0x201D: '"',
        0x2018: "'",
        0x2019: "'",
        0xA0: " ",
        0xAD: "",
        0xFEFF: "",
    }
)


def stable_hash(name: str) -> int:
    """First 8 bytes of the sha256 of a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def tidy(text: str) -> str:
    """ASCII quotes, one space between words, one newline between paragraphs."""
    paragraphs = re.split(r"\n\s*\n", text.translate(PLAIN))
    return "\n".join(p for p in (" ".join(p.split()) for p in paragraphs) if p)


def sentences(text: str) -> list[str]:
    """Split before a capital after a full stop (not an initial); lossless."""
    return re.split(SENTENCE_END, text)


def read_sotu(folder: pathlib.Path) -> list[dict]:
    """Addresses as {name, year, president, party, text}, in file order."""
    rows = []
    for path in sorted(folder.glob("[12][0-9][0-9][0-9]_*.json")):
        raw = json.loads(path.read_text("utf-8"))
        president = re.sub(r"\bMc ", "Mc", raw["name"])
        president = re.sub(r"\b([A-Z])(?= )", r"\1.", president)
        fields = {"year": raw["year"], "president": president, "party": raw["party"]}
        rows.append({"name": f"sotu/{path.stem}", "text": tidy(raw["text"]), **fields})
    return rows


def read_moby(folder: pathlib.Path) -> list[dict]:
    """Chapters, extracts and epilogue as {name, text}."""
    names = [p for p in sorted(folder.glob("*.txt")) if p.stem not in ("contents",)]
    names = [p for p in names if p.stem != "data"]
    return [
        {"name": f"moby/{p.stem}", "text": tidy(p.read_text("utf-8"))} for p in names
    ]


def read_dictd(path: pathlib.Path) -> list[str]:
    """Entries of a dictd database, in file order, by the offsets of its index."""
    digits = {c: i for i, c in enumerate(_BASE64)}
    data = gzip.decompress(path.read_bytes())
    index = path.with_name(path.name.split(".")[0] + ".index").read_text("utf-8")
    spans = set()
    for line in index.splitlines():
        numbers = line.split("\t")[1:3]
        spans.add(tuple(_from_base64(number, digits) for number in numbers))
    return [data[start : start + size].decode("utf-8") for start, size in sorted(spans)]


_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def _from_base64(number: str, digits: dict[str, int]) -> int:
    """Number in dictd's base-64 notation, most significant digit first."""
    value = 0
    for char in number:
        value = value * 64 + digits[char]
    return value


def parse_jargon(entry: str) -> dict | None:
    """One entry as {name, head, pos, origin, see, body}; None if unusable."""
    lines = entry.strip("\n").split("\n")
    if len(lines) < 3 or lines[0].startswith(("00-database", " ")):
        return None
    body = tidy("\n".join(lines[2:]))
    if not body or SENSITIVE.search(lines[0] + "\n" + body):
        return None
    see = [" ".join(x.split()) for x in re.findall(r"\{([^{}]+)\}", body)]
    body = re.sub(r"\{\s*([^{}]+?)\s*\}", r"\1", body)
    origin = re.match(r"\[([^\[\]]{12,160})\](?:\s|$)", body)
    tag = lines[1].split(",")[-1].strip().rstrip(".")
    return {
        "name": f"jargon/{lines[0].strip()}",
        "head": lines[0].strip().translate(PLAIN),
        "pos": PARTS_OF_SPEECH.get(tag, ""),
        "origin": origin.group(1) if origin else "",
        "see": list(dict.fromkeys(see)),
        "body": body,
    }


def jargon_text(entry: dict) -> str:
    """An entry as plain prose for the corpus."""
    pos = f" ({entry['pos']})" if entry["pos"] else ""
    return f"{entry['head']}{pos}: {entry['body']}"
