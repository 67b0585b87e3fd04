# ruff: noqa: E501  # patterns are long
"""Places whose language needs a second reading: prose without nouns, names without a verb or noun.

A check of patterns: it points at places and does not judge them. A relative "who" after a person and
"whose" after a noun are plain English, as are "asked for" of arguments and "say" as an example.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize

# Words that stand where the field has a noun or a verb. A relative "who" after a person and "whose" after a noun are plain English,
# as are "asked for" of arguments, "say" as an example, and a pronoun whose noun the sentence before in the same text names.
PEOPLE = r"(?:users?|people|persons?|engineers?|readers?|authors?|developers?|researchers?|operators?|attackers?|scripts?|you|we)"
PROSE = {
    "person for a program part": r"(?<!user )(?<!users )(?<!people )(?<!person )(?<!readers )(?<!authors )(?<!developers )\b(who|whoever|whom|somebody|nobody|anybody|everybody|someone|anyone)\b|^[Ww]hose\b|\b(?:of|from|to|by|in|and|or|that|at) whose\b",
    "verb of people for a program state": r"\b(asks?|asked|says?|said|told|tells?|hears?|heard|wish(es|ed)?|heeds?|wants?|wanted|knows?|believes?|brings?|brought|obeys?|owes?|begs?)\b",
    "pronoun without its noun": r"^(What(?! follows\b)|Those(?! [a-z-]+s\b)|That which|Whatever|These(?! [a-z-]+s\b))\b|\bthose (that|who)\b|^[Tt]hose of\b|(?<!, )(?<!and )\bwhat (is|was|has|they|the others)\b|\bwhat (is|was|has|they|the others)\b.* (is|are|was|has|have)\b",
    "number or time without its name": r"\bso (many|long(?! as)|often|much(?! as))\b",
}
OPENING = re.compile(
    r"^(They|It|Them)\b"
)  # a text's first sentence has none before it to name the noun
PERSON = re.compile(
    rf"\b{PEOPLE}\b[^.;:]{{0,40}}\b(ask|say|tell|hear|wish|want|know|believe|bring)(s|ed)?\b|\b(said|asked|told)(?= (by|for by) (the )?{PEOPLE}\b)|\b(columns?|tables?|pages?|profiles?|papers?|docs|logs?|reports?) (says?|(do|does) not know)\b|, say[,)]|\(say\b|\bthat is to say\b"
)
NOISE = re.compile(
    r"^(type|noqa|pyright|pragma|fmt|ruff|ignore\[|!/)|^[\W\d_]*$"
)  # directives and rulers are no sentences

PARTICIPLES = {
    "said",
    "told",
    "heard",
    "met",
    "kept",
    "known",
    "found",
    "given",
    "chosen",
    "taken",
    "held",
    "lost",
    "made",
    "left",
    "led",
    "sent",
    "spent",
    "bound",
    "begun",
    "broken",
    "drawn",
    "driven",
    "shown",
    "seen",
    "worn",
    "gone",
    "done",
    "had",
    "meant",
    "felt",
    "brought",
    "thought",
    "sought",
    "won",
    "shut",
}
LONE = {
    "again",
    "alone",
    "also",
    "about",
    "alike",
    "apart",
    "some",
    "others",
    "other",
    "who",
    "where",
    "when",
    "what",
    "why",
    "how",
    "so",
    "many",
    "much",
    "few",
    "twice",
    "two",
    "one",
    "three",
    "together",
    "since",
    "until",
    "without",
    "with",
    "rest",
    "mine",
    "theirs",
    "ours",
    "own",
    "none",
    "nothing",
    "nobody",
    "somebody",
    "now",
    "then",
    "of",
    "on",
    "off",
    "in",
    "out",
    "by",
    "for",
    "to",
    "from",
    "up",
    "down",
    "over",
    "under",
    "around",
    "beside",
    "beneath",
    "between",
    "among",
    "before",
    "after",
    "early",
    "late",
    "later",
    "here",
    "there",
    "away",
    "along",
    "as",
    "it",
    "be",
    "any",
    "every",
    "each",
    "both",
    "either",
    "same",
    "else",
    "even",
    "ever",
    "never",
    "only",
    "just",
    "very",
    "too",
    "than",
    "that",
    "this",
    "these",
    "those",
    "such",
    "like",
    "unlike",
    "anew",
    "halfway",
    "beyond",
    "within",
    "into",
    "onto",
    "upon",
    "per",
    "plain",
    "brisk",
    "quiet",
    "busy",
    "stuck",
    "odd",
    "tidy",
}
FINE = {
    "set",
    "read",
    "put",
    "split",
    "cut",
    "all",
    "any",
    "next",
    "at",
    "to",
    "of",
    "bound",
    "done",
}


def unnamed(name):
    """Whether a function's name has no noun and no verb in its base form."""
    words = [w for w in name.strip("_").split("_") if w and w not in ("s", "ms", "bps", "bytes")]
    if not words or (len(words) == 1 and words[0] in FINE):
        return False

    def past(w):
        return (
            w.endswith("ed")
            and len(w) > 4
            and w not in ("speed", "need", "seed", "feed", "embed", "shed")
        )

    return all(w in LONE or w in PARTICIPLES or past(w) for w in words)


def functions(path):
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef)
            ) and not node.name.startswith("__"):
                yield node.lineno, node.name


def places(path):
    text = path.read_text()
    if path.suffix == ".md":
        yield from of_markdown(text)
        return
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc:
                first = getattr(node, "lineno", 1)
                yield first, getattr(node, "name", path.stem), doc
    first, last, lines = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            own = not token.line[: token.start[1]].strip()
            if lines and not (
                own and token.start[0] == last + 1
            ):  # whole-line comments below each other are one text
                yield first, "#", " ".join(lines)
                lines = []
            if not lines:
                first = token.start[0]
            lines.append(token.string.lstrip("# "))
            last = token.start[0] if own else -1
    if lines:
        yield first, "#", " ".join(lines)


def of_markdown(text):
    """Paragraphs and list items, without code, tables, headings and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    start, lines = 1, []
    for n, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip() or line.lstrip().startswith(("#", "|", "- ", "* ", ">")):
            if lines:
                yield start, "", " ".join(lines)
            start, lines = n, []
            if line.lstrip().startswith(("- ", "* ")):
                lines.append(line.lstrip("-* "))
        else:
            lines.append(line.strip())


def sentences_of(prose):
    """Sentences of one text, without code spans, quotations, rulers and directives."""
    prose = re.sub(r"``[^`]+``|`[^`]+`", "`x`", " ".join(prose.split()))
    prose = re.sub(r"^(noqa|type|pyright|pragma|fmt|ruff):.*|[-=*_]{3,}", "", prose)
    return [
        s.strip()
        for s in re.split(r"(?<=[.:;])\s+", prose)
        if s.strip() and not NOISE.match(s.strip())
    ]


def found(path):
    for line, name, prose in places(path):
        for n, sentence in enumerate(sentences_of(prose)):
            if n == 0 and OPENING.search(sentence):
                yield line, name, "pronoun without its noun", sentence
                continue
            for kind, pattern in PROSE.items():
                if kind.startswith("verb"):
                    if not re.search(pattern, PERSON.sub("", sentence)):
                        continue
                elif not re.search(pattern, sentence):
                    continue
                yield line, name, kind, sentence
                break
