"""SFT rows of the three formats, made from the public texts; rules in README.md."""

import collections
import re

from bitmamba.assets.sources import SENSITIVE, sentences, stable_hash, tidy

MAX_ANSWER_CHARS = 360

# The rule with most hits wins; an entry with no hit is "slang".
CATEGORY_WORDS = {
    "software": r"program|code|compil|unix|software|algorithm|debug|bugs?\b|kernel|"
    r"languages?\b|lisp|file|variable|function|syntax|loop|pointer|version",
    "hardware": r"hardware|machine|disks?\b|memory|chip|keyboard|printer|terminal|"
    r"cpu|micro|pdp|vax|ibm|wire|board|circuit|mainframe|tape|electr|bits?\b|bytes?\b",
    "networks": r"internet|network|usenet|newsgroup|e?mail|irc|mud\b|muds\b|ftp|web|"
    r"post(?:ed|ing|er)|packet|site|server|spam|mailing|bbs|on-line|hosts?\b",
    "culture": r"hacker|culture|story|fiction|novel|legend|mit\b|tolkien|humor|joke|"
    r"game|music|food|person|people|community|named|author|tradition|student",
}
JARGON_CATEGORIES = (*CATEGORY_WORDS, "slang")
PER_CATEGORY = {"prompt_response": 10, "scored": 36, "thought_answer": 36}
CHATTERBOT_COUNTS = {"trivia": 80, "ai": 40}
SOTU_COUNT = 50
JARGON_PROMPTS = (
    'What does the hacker term "{}" mean?',
    'Define the term "{}".',
    'What do hackers mean by "{}"?',
    'Explain the jargon term "{}".',
)
SOTU_PROMPTS = (
    "Which president gave the State of the Union message of {}?",
    "Who reported to Congress on the State of the Union in {}?",
    "Whose State of the Union message is dated {}?",
)
DOUBTFUL = re.compile(  # trivia whose answer is wrong or folklore
    r"unit of memory|tick bite|rain diamonds|vending machine|shown to help plants|"
    r"ph level|babies born without|loudest animal|mona lisa in|invented scissors"
)


def definition(entry: dict) -> str:
    """The first sense of an entry: whole sentences, no cross-references."""
    body = re.sub(r"^\[[^\[\]]*\]\s*", "", entry["body"])
    body = re.sub(r"^1\.\s*(?:\[[^\[\]]*\]\s*)?", "", body)
    body = re.sub(r"^(?:[a-z]{1,6}\.,? )+(?=[A-Z])", "", body.split("\n")[0])
    answer = ""
    for sentence in sentences(body):
        if re.match(r"\s*(?:See|Compare|Contrast|Cf\.|Also)\b", sentence):
            break
        if len(answer) + len(sentence) > MAX_ANSWER_CHARS:
            break
        answer += sentence
    answer = answer.strip()
    balanced = answer.count("(") == answer.count(")") and answer.count('"') % 2 == 0
    starts = re.match(r"[A-Z0-9\"']", answer)
    return answer if balanced and starts and not re.search(r"\w@\w", answer) else ""


def thought(entry: dict) -> str:
    """What the entry itself says around its definition."""
    parts = [f"Part of speech: {entry['pos']}."] if entry["pos"] else []
    parts += [f"Origin: {entry['origin']}."] if entry["origin"] else []
    parts += [f"Related: {', '.join(entry['see'][:4])}."] if entry["see"] else []
    return " ".join(parts)


def category(entry: dict) -> str:
    """The rule with the most hits in the entry; "slang" when none hits."""
    text = f"{entry['head']} {entry['body']}".lower()
    hits = {k: len(re.findall(rf"\b(?:{v})", text)) for k, v in CATEGORY_WORDS.items()}
    best = max(hits, key=hits.get)
    return best if hits[best] else "slang"


def score(answer: str) -> float:
    """0 to 1: half for length, 0.3 for a finished sentence, 0.2 for plain text."""
    length = min(1.0, len(answer) / 160)
    finished = float(answer.endswith((".", "!", "?", '."', ".)")))
    odd = sum(not (c.isalnum() or c in " .,;:'\"()?!-") for c in answer)
    plain = max(0.0, 1.0 - 10 * odd / max(1, len(answer)))
    return round(0.5 * length + 0.3 * finished + 0.2 * plain, 2)


def phrase(templates: tuple[str, ...], value: str) -> str:
    """A template chosen by the value's hash."""
    return templates[stable_hash("phrase/" + value) % len(templates)].format(value)


def sft_jargon(entries: list[dict]) -> tuple[dict[str, list], set[str]]:
    """Rows from the jargon file for the three formats, and the entries they use."""
    order = sorted(entries, key=lambda e: stable_hash("sft/" + e["name"]))
    groups = collections.defaultdict(list)
    for entry in order:
        if definition(entry):
            groups[category(entry)].append(entry)
    rows, used = {kind: [] for kind in PER_CATEGORY}, set()
    for name in JARGON_CATEGORIES:
        for kind, quota in PER_CATEGORY.items():
            picked = [
                e for e in groups[name] if e["name"] not in used and _fits(e, kind)
            ]
            for entry in picked[:quota]:
                used.add(entry["name"])
                rows[kind].append(_row(entry, name, kind))
    return rows, used


def _fits(entry: dict, kind: str) -> bool:
    """Scored rows may be stubs; a thought needs a part of speech and one thing more."""
    if kind == "scored":
        return True
    rich = bool(entry["pos"] and (entry["origin"] or entry["see"]))
    return len(definition(entry)) >= 60 and (kind != "thought_answer" or rich)


def _row(entry: dict, group: str, kind: str) -> dict:
    """One SFT row in the fields of its format."""
    answer, prompt = definition(entry), phrase(JARGON_PROMPTS, entry["head"])
    if kind == "thought_answer":
        tail = {"thought": thought(entry), "answer": answer, "category": group}
        return {"prompt": prompt, **tail}
    row = {"prompt": prompt, "teacher_response": answer, "category": group}
    return {**row, "score": score(answer)} if kind == "scored" else row


def sft_sotu(addresses: list[dict]) -> list[dict]:
    """Who spoke in which year; years with two addresses are left out."""
    years = collections.Counter(a["year"] for a in addresses)
    rows = [a for a in addresses if years[a["year"]] == 1]
    rows = sorted(rows, key=lambda a: stable_hash("sft/" + a["name"]))[:SOTU_COUNT]
    return [_sotu_row(a) for a in sorted(rows, key=lambda a: a["year"])]


def _sotu_row(address: dict) -> dict:
    party = "" if address["party"] == "none" else f" ({address['party']})"
    answer = f"{address['president']}{party} gave it in {address['year']}."
    prompt = phrase(SOTU_PROMPTS, str(address["year"]))
    return {"prompt": prompt, "teacher_response": answer, "category": "history"}


def sft_chatterbot(conversations: dict[str, list]) -> list[dict]:
    """The first answer to each clean question, by file name: trivia, ai."""
    rows = []
    for name, count in CHATTERBOT_COUNTS.items():
        pairs = {}
        for turns in conversations[name]:
            if isinstance(turns, list) and len(turns) == 2:
                prompt, answer = (tidy(str(turn)) for turn in turns)
                pairs.setdefault(prompt.rstrip("?. "), (prompt, answer))
        clean = [p for p in pairs.values() if not SENSITIVE.search(" ".join(p))]
        clean = [p for p in clean if not DOUBTFUL.search(p[0].lower())]
        clean = [p for p in clean if 12 <= len(p[0]) <= 160 and 2 <= len(p[1]) <= 200]
        clean.sort(key=lambda p: stable_hash("sft/" + p[0]))
        rows += [_chat_row(p, name) for p in clean[:count]]
    return rows


def _chat_row(pair: tuple[str, str], group: str) -> dict:
    """Questions get their question mark, answers a capital and a full stop."""
    prompt, answer = pair
    asks = r"(?:what|who|which|where|when|how|can|will|are|is|do|in|on)\b"
    if re.match(asks, prompt, re.IGNORECASE) and prompt[-1].isalnum():
        prompt += "?"
    answer = answer[0].upper() + answer[1:] + "." * (answer[-1].isalnum())
    return {"prompt": prompt, "teacher_response": answer, "category": group}
