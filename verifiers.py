"""Judge a model's text against a known answer: word-problem numbers, mathematics, Python programs.

    verify_gsm8k(response, gold)      is the final number the gold number?
    verify_math(response, gold)       is the final expression equal to the gold one?     (pip install math-verify)
    verify_code(response, tests)      does the program pass every test?
    close()                           stop the workers; after it nothing is left

Each verdict is True (right), False (wrong, or nothing to judge) or None: the judge itself failed, which pays nothing and is to be counted
apart. A policy is an adversary that finds every false positive, and every false negative is a lost rollout, so each rule below is written
down where it is applied. The file reads from easy to hard: extract the answer, compare it, run what has to be run. It imports nothing but
the standard library and can be copied away as it is.

Nothing a model writes is evaluated in the calling process. Expressions and programs go to workers: small processes started by exec that
keep a warm interpreter, fork one child for each program (for each couple of hundred expressions), and kill whatever the child left behind.

What a worker's child cannot do, on Linux:
  - outlive its time limit (an outside clock, which kills), use more than `MEMORY` bytes, write files over 64 MiB, keep more than 128 open
    files or some hundred processes; its output is discarded, its stdin is empty, and its environment is built from nothing;
  - see the expected values: programs and tests run in two processes, and only call arguments and results pass between them;
  - read the memory or the descriptors of the test process, or of its own worker, through /proc or ptrace: capabilities are dropped
    for good, workers are not dumpable.
Where `unshare` works as well (root, or a user allowed to make user namespaces; `isolation()` says what was found):
  - see or signal any process but its own and its worker (pid namespace); reach any network, this machine's own ports included (network
    namespace); see or change any file but the Python installation and /usr, both read-only, and an empty scratch folder of its own,
    64 MiB, which disappears (mount namespace). So neither the caller's files nor a data set on the disk can be read or written.
Elsewhere, where the kernel has Landlock: open any other file (since 5.19), connect by TCP (6.7), signal a process outside (6.12).
What is not covered: with neither of the two, a child can read, write and kill whatever the calling user may, and use the network; as root
that is the whole machine. With Landlock alone UDP is open, file names can be seen, and a process that hides in a session of its own may
live on if its worker is killed. A root user's process limit is enforced by counting ten times a second, in namespaces only. The kernel is
shared: this is no virtual machine. The tests' behaviour is the tests': one that calls a helper which the program itself has to define
believes that helper. Whole programs that read stdin and print are not judged here, only what tests can call.
"""
import ast
import atexit
import builtins
import collections
import contextlib
import ctypes
import datetime
import importlib.util
import json
import operator
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from decimal import Decimal
from fractions import Fraction

MEMORY = 2 << 30     # address space of a worker's child, bytes
LARGEST = 16 << 20   # one message between two processes, bytes


# --------------------------------------------------------------------------------------------------------- extract: which text is the answer

def visible(response: str) -> str:
    """What the reader sees: the text outside the thinking part, which may lack its opening tag (it was in the prompt) or its closing one.

    >>> visible("<think>Perhaps 7?</think> It is 8."), visible("Perhaps 7?</think> It is 8."), visible("<think>Perhaps 7?")
    (' It is 8.', ' It is 8.', '')
    """
    return response.rsplit("</think>", 1)[-1].split("<think>", 1)[0]


BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(?P<brace>\{)|(?P<bare>[^\s${}]+))?|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> tuple[int, str | None] | None:
    r"""(position, content) of the last box that is not empty; the content is None if it is never closed: the text was cut off.

    >>> last_box(r"I get \boxed{2}. No: \boxed{\frac{1}{3}}, within \boxed{}."), last_box(r"$x = \boxed 2$"), last_box(r"\fbox{4")
    ((21, '\\frac{1}{3}'), (5, '2'), (0, None))
    """
    open_braces, boxes = [], []  # one entry per open brace: (start of its box or None, start of its content)
    for token in BOX.finditer(text):
        if token["brace"]:
            open_braces.append((token.start(), token.end()))
        elif token.group() == "{":
            open_braces.append((None, token.end()))
        elif token.group() == "}" and open_braces:
            start, inside = open_braces.pop()
            if start is not None and (content := text[inside:token.start()].strip()):
                while boxes and boxes[-1][0] > start:  # a box in a box: the outer one is the answer
                    boxes.pop()
                boxes.append((start, content))
        elif token["bare"]:
            boxes.append((token.start(), token["bare"].rstrip(".,;:")))
    unclosed = max((start for start, _ in open_braces if start is not None), default=-1)
    if boxes and boxes[-1][0] > unclosed:
        return boxes[-1]
    return (unclosed, None) if unclosed >= 0 else None


ANSWER_PHRASE = re.compile(r"\banswer\b[^\S\n]*(?:to [^.\n]{0,60}? )?(?:is\b|:|=)[*\s]*(?::|(?:therefore|thus|simply|just)\b,?)?", re.IGNORECASE)
CLAUSE_END = re.compile(r"\n|[.!?](?=\s+[A-Z]|\s*$)|,?\s(?:because|since|as|which|where|so|given|after|when|if)\b")


def explicit_phrases(text: str) -> list[str]:
    """The clauses that follow "the answer is", the last one first.

    >>> explicit_phrases("The answer is 41. Final Answer: **42** because 6*7 fills 2 rows.")
    ['42**', '41']
    """
    clauses = []
    for phrase in list(ANSWER_PHRASE.finditer(text))[-20:]:
        rest = text[phrase.end():phrase.end() + 1000].lstrip()
        formula = re.match(r"\$(?:\\.|[^$\\])*\$", rest)  # a formula may hold line breaks and full stops
        end = CLAUSE_END.search(rest, formula.end() if formula else 0)
        clauses.append(rest[:end.start()] if end else rest)
    return clauses[::-1]


def extract_math(response: str) -> str | None:
    r"""The final answer of a MATH response: its last box, else what follows an explicit "answer is", else None: a mere mention is no answer.

    >>> extract_math(r"So it is \boxed{\frac{1}{2}}."), extract_math("The answer is $3x$."), extract_math("It mentions 42.")
    ('\\frac{1}{2}', '3x', None)
    """
    text = visible(response)
    if box := last_box(text):
        return box[1]
    for clause in explicit_phrases(text):
        clause = re.sub(r"(?<!\\)\$|\\[()]|\*\*", "", clause).strip()
        if clause:
            return clause
    return None


# All that is glued to a digit: sign, grouping, decimals, fraction. Greedy on purpose: "12,34" is one malformed number, not two good ones. A
# minus behind a digit or a bracket is a subtraction.
NUMBER = re.compile(r"(?:(?<![\w)\]}.%])-)?(?:[0-9]{0,9}\s?\\frac\{[^{}]{1,50}\}\{[^{}]{1,50}\}|[0-9]{1,9} [0-9]{1,9}/[0-9]{1,9}(?![0-9./])"
                    r"|\.?[0-9](?:[0-9.,:/]*[0-9])?(?:[eE][+-]?[0-9]+(?![A-Za-z0-9]))?)")
# What stands between two numbers of which the writer has not chosen one: "10, 11", "5-6"; and with the unit between them, "10 dollars or 12".
# ("or" and "and" are commas in a normal text.)
CHOICE = r"\W*(?:[,;|&~\u2013\u2014/-]|\bto\b)\W*(?:(?:maybe|perhaps|possibly|either|even)\W+)*"
BARE_CHOICE, CHOICE_WITH_UNIT = re.compile(CHOICE, re.IGNORECASE), re.compile(r"\W*(?:[A-Za-z%]+\W+){0,3}?" + CHOICE, re.IGNORECASE)


def one_number(text: str) -> str | None:
    """The one number that a short text commits to, behind its last "=" if it has one; None if different ones are offered.

    >>> [one_number(text) for text in ("$12 for apples", "6*7 = 42", "10, 11 or 12", "5 dollars or 6", "12,34", r"\\\\frac{1}{2}")]
    ['12', '42', None, None, None, '\\\\frac{1}{2}']
    """
    text = re.sub(r"(^|=)\s*-\s+", r"\1-", normal(text[:1000]))
    matches = list(NUMBER.finditer(text, text.rfind("=") + 1)) or list(NUMBER.finditer(text))
    for one, other in zip(matches, matches[1:]):
        if CHOICE_WITH_UNIT.fullmatch(text[one.end():other.start()][:80]) and value_of(one.group()) != value_of(other.group()):
            return None
    return matches[0].group() if matches and value_of(matches[0].group()) is not None else None


MARKER = re.compile(r"####[^\S\n]{0,9}(?=(?:[$*\\-]|boxed\{|[^\S\n]){0,9}\.?[0-9])([^\n]*)")  # "#### Step 2" is a heading, not an answer


def extract_gsm8k(response: str) -> str | None:
    """The final number of a response, or None: what follows the last "####", or the last box, whichever comes later; else what follows "the
    answer is"; else the last number, unless the text offers several there.

    >>> extract_gsm8k("48 + 24 = <<48+24=72>>72\\n#### 72"), extract_gsm8k("The total is $29.00."), extract_gsm8k("It is 10, 11 or 12.")
    ('72', '29.00', None)
    """
    text = visible(response)
    explicit = [(mark.start(), mark[1]) for mark in MARKER.finditer(text)][-1:] + [box for box in [last_box(text)] if box]
    if explicit:
        answer = max(explicit, key=lambda found: found[0])[1]
        return answer and one_number(answer)
    for clause in explicit_phrases(text):
        if NUMBER.search(clause):
            return one_number(clause)
    text = normal(text[-4000:])
    *before, last = [None, *NUMBER.finditer(text)][-2:]
    if last is None or value_of(last.group()) is None:
        return None
    if before[0] and BARE_CHOICE.fullmatch(text[before[0].end():last.start()][-80:]) and value_of(before[0].group()) != value_of(last.group()):
        return None
    return last.group()


def gold_gsm8k(answer: str) -> str:
    """The gold number of a raw GSM8K answer field, which ends in "#### N".

    >>> gold_gsm8k("He sold 48/2 = <<48/2=24>>24 clips.\\n#### 70,000")
    '70000'
    """
    found = re.findall(r"####\s*([^\n]*)", answer)
    number = one_number(found[-1]) if found else None
    if number is None:
        raise ValueError("no '#### number' in this answer field")
    return number.replace(",", "")


def gold_math(solution: str) -> str:
    r"""The gold answer of a MATH solution: its last box.

    >>> gold_math(r"First $\boxed{2}$ balls, then $\fbox{42}$.")
    '42'
    """
    box = last_box(solution)
    if not box or box[1] is None:
        raise ValueError("no box in this solution")
    return box[1]


def extract_code(response: str) -> str:
    """The program in a response: its last block tagged as Python, else its last untagged block of code, else, without any fence, all of it.

    A block that is opened and not closed counts (the text stopped right after the code), and so does code before a lone closing fence (the
    prompt had opened it).

    >>> extract_code("A draft:\\n```py\\nx = 1\\n```\\nFinal:\\n```Python3\\nx = 2\\n```\\nIt prints:\\n```\\n2\\n```")
    'x = 2\\n'
    """
    text = visible(response).replace("\r\n", "\n").replace("~~~", "```")
    blocks, lines, tag, indent = [], [], None, 0  # blocks: (tag, code); tag: None outside a block
    for line in text.split("\n"):
        before, fence, after = line.partition("```")
        word = re.match(r"[`{.\s]*(\w*)", after)[1].lower()
        if tag is not None and fence and (not before.strip() or not after.strip()):
            blocks.append((tag, "\n".join([*lines, before] if before.strip() else lines) + "\n"))
            tag, lines = None, []
            if before.strip() or not word:
                continue  # closed; a fence with a tag opens the next block at once
        if tag is None and fence and "`" not in after.strip("`") and (word or not before.strip()):  # not `inline` code in a sentence
            if not word and not blocks and any(re.match(r"(?:def|class|import|from)\s|@", one) for one in lines):
                blocks.append(("python", "\n".join(lines) + "\n"))
            else:
                tag, indent = word, len(before) - len(before.lstrip()) if not before.strip() else 0
            lines = []
            continue
        lines.append(line[indent:] if tag is not None and not line[:indent].strip() else line)
    if tag is not None and any(map(str.strip, lines)):
        blocks.append((tag, "\n".join(lines)))
    if not blocks:
        return text.replace("```", "")
    tagged = [code for tag, code in blocks if re.fullmatch(r"py(?:thon)?[0-9]*", tag)]
    untagged = [code for tag, code in blocks if not tag]
    programs = [code for code in untagged if re.search(r"^\s*(?:def|class|import|from)\b|=|\blambda\b", code, re.MULTILINE)]
    return (tagged or programs or untagged or [code for _, code in blocks])[-1]


# ----------------------------------------------------------------------------------------------------------------- compare: numbers, mathematics

def verify_gsm8k(response: str, gold: str) -> bool | None:
    """Is the final number of `response` the number `gold`, exactly? Pure text work.

    The final number is behind the last "####" or in the last box, whichever comes later, else behind an explicit "the answer is", else the
    last number of the text. Currency, units, a trailing .00 and well-formed grouping are no difference; a sign, a factor of 100 and
    "12,34" are. Two numbers offered as alternatives are no answer. A gold that is no number matches nothing.

    >>> verify_gsm8k("so 9 * 2 = $18 a day.\\n#### $18.00", "18"), verify_gsm8k("10, 11 or 12", "12"), verify_gsm8k("#### 0.5", "50")
    (True, False, False)
    """
    answer, wanted = extract_gsm8k(response), one_number(gold)
    return answer is not None and wanted is not None and value_of(answer) == value_of(wanted)


TEXT = r"\\(?:text(?:bf|it|rm|sf)?|mbox|mathrm|mathbf|operatorname)\s*"  # the command in front of a {group of words}
# A word of prose inside an answer: three letters in a row that are neither a LaTeX command nor a function. Words are compared as text: to an
# algebra system "Evelyn" is a product of letters, equal to "evenly".
WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|sec|csc|cot|log|exp|sqrt|arcsin|arccos|arctan|min|max|gcd|lcm|frac|infty)(?![A-Za-z]))[A-Za-z]{3,}")
FUNCTIONS = {"sin", "cos", "tan", "log", "exp", "sqrt", "pi", "and", "or", "to", "theta", "alpha", "beta", "phi", "inf", "infinity", "mod"}


def normal(text: str) -> str:
    r"""One spelling for what LaTeX can spell in many ways, without changing any value. Words in \text{} become bare words.

    >>> normal(r"$\left( \dfrac12, 10{,}000\text{ or }\tfrac{1}{3} \right)$."), normal(r"90^\circ"), normal(r"2516_{8}")
    ('( \\frac{1}{2}, 10,000 , \\frac{1}{3} )', '90', '2516_8')
    """
    text = text.replace("\u2212", "-").replace("\u00d7", "\\times ").replace("\u03c0", "\\pi ").replace("\u00b0", "").replace("\u00b7", "\\cdot ")
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "%").replace("{,}", ",").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = text.replace("\\(", "").replace("\\)", "").replace("\\[", "").replace("\\]", "").replace("**", "")
    text = re.sub(r"\\[!,;:]|\\(?:left|right|displaystyle|textstyle|limits|bigl|bigr|big|Big)(?![A-Za-z])", "", text)
    text = re.sub(r"(?<!\\)\\\s|~|\\q?quad(?![A-Za-z])|\s+", " ", text)
    text = re.sub(r"\\f?box(?:ed)?\s*\{(.*)\}", r"\1", text)
    text = re.sub(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", "", text)
    text = re.sub(TEXT + r"\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])(?![A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*([0-9A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9A-Za-z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\s*\{([0-9A-Za-z])\}", r"\1\2", text)
    text = re.sub(r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"(?<![\\A-Za-z]),?\s*(?:or|and)(?![A-Za-z])\s*", " , ", text)
    return text.strip().rstrip(".,;: ").strip()


UNIT_IN_TEXT = re.compile(r"(?P<value>[^A-Za-z]*(?:\\(?:[dt]?frac|sqrt|pi)[^A-Za-z]*)*(?<=[0-9}i )%$]))"
                          rf"(?P<unit>(?:{TEXT}\{{[^{{}}]*\}}[\s./]*(?:\^\s*\{{?[0-9]\}}?[\s./]*)?)+)[$.]*")
UNIT_BARE = re.compile(r"(?P<value>[$]?-?[0-9][0-9.,/]*)\s+(?P<unit>(?:[A-Za-z]{3,}|[ckm]m|[km]g|ft|sq|mph)\b[A-Za-z .]*(?:\^\{?[0-9]\}?)?)[$.]*")


def without_unit(text: str) -> tuple[str, str]:
    r"""(value, unit): words in \text{}, or three letters and more, that trail a number.

    >>> without_unit(r"80 \text{ cm}^2"), without_unit("80 square units"), without_unit("2 pi"), without_unit(r"\text{Evelyn}")
    (('80 ', 'cm2'), ('80', 'squareunit'), ('2 pi', ''), ('\\text{Evelyn}', ''))
    """
    match = UNIT_IN_TEXT.fullmatch(text) or UNIT_BARE.fullmatch(text) if len(text) < 500 else None
    if not match or not re.search(r"[0-9]", match["value"]):
        return text, ""
    unit = re.sub(TEXT, "", match["unit"].lower())
    words = set(re.findall(r"[a-z]+", unit))
    return (text, "") if not words or words & FUNCTIONS else (match["value"], re.sub(r"[^a-z0-9]", "", unit).rstrip("s"))


DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
SIGNED_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?:(?P<whole>[0-9]*)\s*\\frac\s*\{{\s*(?P<top>-?{DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>{DECIMAL})\s*\}}"
                           rf"|(?:(?P<whole2>[0-9]+)\s)?\s*(?P<top2>{DECIMAL})(?:\s*/\s*(?P<bottom2>{DECIMAL}))?"
                           rf"(?:(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*|[eE])(?P<power>[+-]?[0-9]{{1,2}})\s*\}}?)?)")


def value_of(text: str) -> Fraction | None:
    r"""The exact value of a normal text that is a plain number: integer, decimal, fraction, mixed number, scientific notation; a % is dropped.

    >>> [str(value_of(text)) for text in ("1,500", r"-\frac{1}{2}", r"2\frac{1}{2}", "11 5/6", r"1.5 \times 10^{3}", "28%", "2516_8", "1/0")]
    ['1500', '-1/2', '5/2', '71/6', '1500', '28', 'None', 'None']
    """
    match = SIGNED_NUMBER.fullmatch(text.rstrip("% ")) if len(text) <= 400 else None
    if not match:
        return None
    read = lambda digits: Fraction(Decimal(digits.replace(",", "")))
    whole, top, bottom = (match[name] or match[name + "2"] for name in ("whole", "top", "bottom"))
    if (whole and (not bottom or top.startswith("-"))) or (bottom and read(bottom) == 0):
        return None  # two numbers side by side are no mixed number; 1/0 is none at all
    value = (int(whole) if whole else 0) + read(top) / read(bottom or "1")
    value *= Fraction(10) ** int(match["power"] or 0)
    return -value if match["sign"] == "-" else value


OPENING, CLOSING = ("\\{", "(", "[", "{"), {"\\{": "\\}", "(": ")", "[": "]", "{": "}"}


def parts(text: str) -> tuple[str, str, list[str]]:
    r"""(opening bracket, closing bracket, items): a tuple or interval keeps its brackets, a {set} and a bare list have none, `\pm` is two.

    >>> parts("[2,5)"), parts(r"\{1, 2\}"), parts("1,000"), parts(r"\pm 3"), parts("(x+1)(x+2)")
    (('[', ')', ['2', '5']), ('', '', ['1', '2']), ('', '', ['1,000']), ('', '', ['3', '-3']), ('', '', ['(x+1)(x+2)']))
    """
    if value_of(text) is not None:
        return "", "", [text]
    if matrix := re.fullmatch(r"\\begin\s*\{([a-zA-Z]*matrix)\}(.*)\\end\s*\{\1\}", text):
        rows = [row.split("&") for row in matrix[2].split("\\\\") if row.strip()]
        return matrix[1], str([len(row) for row in rows]), [entry.strip() for row in rows for entry in row]
    depth, commas, closed_at = 0, {0: [], 1: []}, None
    for token in re.finditer(r"\\[A-Za-z]+|\\.|[\[\](){},]", text):
        if token.group() in OPENING:
            depth += 1
        elif token.group() in CLOSING.values():
            depth -= 1
            closed_at = token.end() if depth == 0 and closed_at is None else closed_at
        elif token.group() == "," and depth in commas:
            commas[depth].append(token.start())
    opening, closing = re.match(r"\\\{|[\[({]?", text).group(), re.search(r"(?:\\\}|[\])}]?)$", text).group()
    wrapped = opening and closing and closed_at == len(text) and depth == 0
    cuts = commas[1] if wrapped else commas[0]
    inside = text[len(opening):len(text) - len(closing)] if wrapped else text
    offset = len(opening) if wrapped else 0
    edges = [-1, *(cut - offset for cut in cuts), len(inside)]
    items = [inside[left + 1:right].strip() for left, right in zip(edges, edges[1:])]
    if not wrapped or opening in ("\\{", "{") or (len(items) == 1 and (opening, closing) == ("(", ")")):
        opening = closing = ""
    if not opening:
        items = [half for item in items for half in
                 ([re.sub(r"^\+\s*", "", item.replace("\\pm", "+")), item.replace("\\pm ", "-").replace("\\pm", "-")] if item.count("\\pm") == 1 else [item])]
    return opening, closing, items


LEFT_SIDE = re.compile(r"((?:[A-Za-z](?:_[0-9A-Za-z])?(?:\([A-Za-z]\))?|\([A-Za-z](?:\s*,\s*[A-Za-z])*\))\s*(?:=|\\in(?![A-Za-z])))\s*(?=[^=]*$)")


def same_value(gold: str, answer: str, symbolic) -> bool:
    """Are two texts the same answer? `symbolic(gold, answer)` is asked only about what cannot be settled by reading.

    Equal as normal text; else equal as exact numbers; else lists of equal length, item by item (tuples and intervals in order and with the
    same brackets, sets and bare lists in any order); else words as words; else equal expressions. A percent sign or a unit that only one side
    gives is dropped, a different one is a difference; the factor 100 is never bridged. A leading "x =" that only one side gives is dropped.
    """
    if squeeze(normal(gold)) == squeeze(normal(answer)) != "":
        return True
    (gold, gold_unit), (answer, unit) = without_unit(gold.strip()), without_unit(answer.strip())
    if gold_unit and unit and gold_unit != unit:
        return False
    return same_normal(normal(gold), normal(answer), symbolic)


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def same_normal(gold: str, answer: str, symbolic) -> bool:
    if squeeze(gold) == squeeze(answer) and gold:
        return True
    left, left_answer = LEFT_SIDE.match(gold), LEFT_SIDE.match(answer)
    if left and left_answer and squeeze(left[1]) != squeeze(left_answer[1]):
        return False
    if left and (left_answer or "=" not in answer):
        gold = gold[left.end():]
    if left_answer and (left or "=" not in gold):
        answer = answer[left_answer.end():]
    number, number_answer = value_of(gold), value_of(answer)
    if number is not None and number_answer is not None:
        return number == number_answer
    opening, closing, items = parts(gold)
    opening_answer, closing_answer, items_answer = parts(answer)
    if len(items) != len(items_answer) or (opening, closing) != (opening_answer, closing_answer):
        return False
    if len(items) > 50:
        return False
    if opening:
        return all(same_normal(one, other, symbolic) for one, other in zip(items, items_answer))
    if len(items) > 1:
        for item in items:
            match = next((other for other in items_answer if same_normal(item, other, symbolic)), None)
            if match is None:
                return False
            items_answer.remove(match)
        return True
    gold, answer = items[0], items_answer[0]
    if squeeze(gold) == squeeze(answer):
        return bool(gold)
    if not gold or not answer:
        return False
    prose = lambda text: WORD.search(re.sub(r"\\(?:begin|end)\s*\{[a-z]+\*?\}(?:\{[a-z|]+\})?", "", text))
    if prose(gold) or prose(answer):
        fold = lambda text: re.sub(r"[\s().'\"]", "", text.casefold())
        return fold(gold) == fold(answer)
    if re.search(r"[0-9]_", gold + " " + answer) or gold.count("=") != answer.count("="):  # 12_8 is no 12: a base is part of the text
        return False
    letters, others = (set(re.findall(r"(?<![\\A-Za-z])[A-Za-z]", side)) for side in (gold, answer))
    if any(letter.swapcase() in others - letters for letter in letters - others):  # to math-verify x and X are one symbol
        return False
    return bool(symbolic(gold.replace("%", ""), answer.replace("%", "")))


def verify_math(response: str, gold: str, timeout: float = 2.0) -> bool | None:
    r"""Is the final answer of `response` (its last box, or what follows "the answer is") mathematically equal to `gold`?

    Equality of expressions is math-verify's, asked in a worker that may take `timeout` seconds for the whole answer; longer is False, as is
    anything else that goes wrong over the model's text. A gold that cannot be parsed matches its own text only. None: the package is absent
    or its worker does not start.

    >>> verify_math(r"Thus \boxed{0.5}.", r"\frac{1}{2}"), verify_math(r"\boxed{1, 2, 3}", "3"), verify_math("It mentions 3.", "3")
    (True, False, False)
    """
    answer = extract_math(response)
    if not answer or len(answer) > 5_000:  # no gold is that long
        return False
    deadline = time.monotonic() + timeout
    worker = None

    def symbolic(gold, answer):
        nonlocal worker, deadline
        if not math_verify_installed():
            raise WorkerFailed("math-verify is not installed")
        if worker is None:
            worker = stack.enter_context(POOLS["math"].worker())
            deadline = time.monotonic() + timeout  # waiting for a free worker is not the answer's fault
        return worker.ask([gold, answer], deadline)

    with contextlib.ExitStack() as stack:
        try:
            return same_value(gold, answer, symbolic)
        except WorkerFailed:
            return None
        except ConnectionError:  # the child died over this text, unless somebody stopped the whole worker
            return False if worker.process.poll() is None else None
        except (TimeoutError, RecursionError):
            return False
        except OSError:  # no process, no descriptor to be had
            return None


def math_verify_installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def expressions_equal(gold: str, answer: str) -> bool:
    """math-verify's verdict on two expressions; of two numbers it compares six digits, so those are looked at again: 6.283185 is not 2 pi."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import Expr

    def read(text):
        exact = lambda match: "{\\frac{%s}{1%s}}" % ((match[1] + match[2]).lstrip("0") or "0", "0" * len(match[2]))  # 0.5 -> 5/10: no floats
        text = re.sub(r"(?<![0-9.])([0-9]*)\.([0-9]+)", exact, text)
        return parse(f"${text}$", [LatexExtractionConfig(), ExprExtractionConfig()], fallback_mode="no_fallback", extraction_mode="first_match",
                     parsing_timeout=None)  # its own limits are signals; ours is the clock outside

    gold, answer = read(gold), read(answer)
    if not gold or not answer or not verify(gold, answer, timeout_seconds=None):
        return False
    one, other = gold[0], answer[0]
    if isinstance(one, Expr) and isinstance(other, Expr) and not one.free_symbols | other.free_symbols:
        return bool(abs((one - other).evalf(50, maxn=200)) < 1e-30)
    return True


def math_child(talk: socket.socket) -> None:
    """In a worker: answer "are these two expressions equal?" until told to stop."""
    while True:
        gold, answer = receive(talk)
        try:
            verdict = expressions_equal(gold, answer)
        except Exception:
            verdict = False
        send(talk, verdict)


# --------------------------------------------------------------------------------------------------------- run: tests here, the program there

def verify_code(response: str, tests: list[str], timeout: float = 10.0) -> bool | None:
    """Does the program in `response` pass every one of `tests` within `timeout` seconds (imports and all)?

    `tests` are texts of Python, asserts mostly, run one after the other in one namespace; a setup is simply the first of them. They run in a
    trusted process that never holds the program. The names of the program are stand-ins there: a call sends its arguments as plain data to
    the process that holds the program, and the result comes back as plain data. So the program never sees an expected value, and no code of
    its own (no `__eq__`, no patched builtin) takes part in a comparison. True only if all tests ran to their end.

    Plain data keeps its exact type: numbers, text, the builtin and `collections` containers, namedtuples, Decimal, Fraction, dates. Anything
    else (functions, classes, instances, iterators) is a stand-in that can be called, iterated, and asked for attributes and items, and is
    equal to itself only. Arguments that the program changes in place are changed for the test too; exceptions arrive with their type.
    numpy scalars arrive as numbers; arrays and objects with overloaded operators stay stand-ins, which no comparison accepts.

    Names mean: what the tests define, else the builtin (a program cannot lend the tests its own `abs`, unless all that the tests name is
    builtin, as in `assert sum(10, 15) == 6`), else the module of that name, else what the program defines.

    None: the judge failed. A test does not compile, or did not end by itself, there are no tests, a worker did not start.

    >>> verify_code("```python\\ndef add(a, b):\\n    return a + b\\n```", ["assert add(1, 2) == 3"])
    True
    """
    code = extract_code(response)
    if not code.strip() or len(code) > 1_000_000:
        return False
    try:
        with POOLS["tests"].worker() as judge, POOLS["program"].worker() as runner, contextlib.ExitStack() as stack:
            talk, talk_end, link, link_end = (stack.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair)
            judge.fork(timeout, talk_end, link)
            runner.fork(timeout, link_end)
            for end in (talk_end, link, link_end):
                end.close()
            deadline = time.monotonic() + timeout
            send(talk, [code, list(tests)])
            try:
                return receive(talk, deadline)
            except TimeoutError:
                runner.sweep()  # if the tests wait for the program, they end now
                return False if receive(talk, time.monotonic() + 1) is not None else None
    except (WorkerFailed, OSError, OverflowError):
        return None


def send(channel: socket.socket, message) -> None:
    """JSON, because reading it can do nothing but make plain data (unlike pickle and marshal)."""
    data = json.dumps(message).encode()
    if len(data) > LARGEST:
        raise OverflowError("this message is too large")
    channel.sendall(struct.pack(">I", len(data)) + data)


def receive(channel: socket.socket, deadline: float | None = None):
    """The next message; ConnectionError if the other side is gone, TimeoutError at the deadline."""
    def exactly(count):
        data = bytearray()
        while len(data) < count:
            if deadline is not None and (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            channel.settimeout(left if deadline is not None else None)
            piece = channel.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise ConnectionError("the other side is gone")
            data += piece
        return data

    (length,) = struct.unpack(">I", exactly(4))
    if length > LARGEST:
        raise ConnectionError("too large a message")
    return json.loads(exactly(length))


# Types whose values are written as JSON and read back exactly: type -> (write, read).
ATOMS = {
    bytes: (bytes.hex, bytes.fromhex), complex: (lambda z: [z.real, z.imag], lambda pair: complex(*pair)),
    range: (lambda r: [hex(r.start), hex(r.stop), hex(r.step)], lambda ends: range(*(int(end, 16) for end in ends))),
    Decimal: (str, Decimal), Fraction: (lambda q: [hex(q.numerator), hex(q.denominator)], lambda pair: Fraction(*(int(part, 16) for part in pair))),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat), datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.timedelta: (lambda d: [d.days, d.seconds, d.microseconds], lambda parts: datetime.timedelta(*parts)),
}
DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
CONTAINERS = (list, set, bytearray, collections.deque, *DICTS)  # can be changed in place, so each one keeps its identity within a call
TYPES = {kind.__name__: kind for kind in (*ATOMS, *CONTAINERS, tuple, frozenset)}
OPERATIONS = {  # what one side can ask of an object of the other one
    "call": lambda target, args, kwargs: target(*args, **kwargs), "instancecheck": lambda target, thing: isinstance(thing, target),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "len": len, "bool": bool, "iter": iter, "next": next, "str": str, "repr": repr,
}


class ProgramGone(BaseException):
    """The program's process ended, or answered nonsense. No `except Exception` of a test shall take it for the program's own exception."""


class StandIn:
    """What one process holds in place of an object of the other one. Equal to itself only."""
    __slots__ = ("_link", "_key")

    def __init__(self, link, key):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_key", key)

    def __call__(self, *args, **kwargs):
        return self._link.ask("call", self, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__", "__wrapped__", "__enter__", "__exit__"):
            raise AttributeError(name)
        return self._link.ask("getattr", self, name)

    __instancecheck__ = lambda self, thing: type(thing) is StandIn and self._link.ask("instancecheck", self, thing)
    __enter__ = lambda self: self._link.ask("getattr", self, "__enter__")()
    __exit__ = lambda self, *error: self._link.ask("getattr", self, "__exit__")(None, None, None)
    __copy__ = __deepcopy__ = lambda self, memo=None: self


for name in ("setattr", "delattr", "getitem", "setitem", "delitem", "len", "bool", "iter", "next", "str", "repr"):
    setattr(StandIn, f"__{name}__", lambda self, *values, operation=name: self._link.ask(operation, self, *values))


class Link:
    """One end of the line between the tests and the program. Both ends can ask and be asked (a test may pass a function).

    One question and its answer share `table`, the containers in the order in which they were first written: a container that occurs twice
    is written once, and the answer first tells what the containers of the question hold by now.
    """
    def __init__(self, channel: socket.socket, trusted: bool):
        self.channel, self.trusted, self.gone = channel, trusted, False
        self.objects, self.keys, self.stand_ins, self.exceptions = [], {}, {}, {}  # ours that they hold, by number; theirs that we hold

    # ---- asking and being asked

    def ask(self, operation: str, *values):
        table, nonce = Table(), os.urandom(8).hex()  # the nonce: an answer written before its question was asked counts for nothing
        self.tell(["ask", nonce, operation, [self.write(value, table) for value in values]])
        held = len(table)
        while True:
            message = self.hear()
            if message[0] != "ask":
                break
            self.answer(message)
        try:
            kind, echo, states, result = message
            if echo != nonce:
                raise ValueError("an answer to another question")
            for container, state in zip(table[:held], states):
                self.fill(container, state, table)
            result = self.read(result, table)
            if kind == "raise" and not isinstance(result, BaseException):
                raise ValueError("not an exception")
        except Exception as error:  # whatever is wrong with it, the other side wrote it
            self.gone = True
            raise ProgramGone(str(error)) from None
        if kind == "raise":
            raise result
        return result

    def answer(self, message) -> None:
        table, kind, held = Table(), "answer", 0
        try:
            _, nonce, operation, values = message
            values = [self.read(value, table) for value in values]
            held = len(table)
            result = self.perform(operation, *values)
        except ProgramGone:
            raise
        except BaseException as error:
            if self.trusted and not isinstance(error, Exception):
                raise
            kind, result = "raise", error
        try:
            states = [self.body(container, table) for container in table[:held]]
            made = operation == "call" and isinstance(values[0], type)  # an instance of a class that the tests call by its name
            self.tell([kind, nonce, states, self.write(result, table, stay=made) if kind == "answer" else self.write_exception(result, table)])
        except (RecursionError, OverflowError, ValueError, MemoryError, TypeError) as error:  # a result that cannot be sent
            self.tell(["raise", nonce, [], ["exception", ["builtin", type(error).__name__], [], None, []]])

    def perform(self, operation: str, target=None, *values):
        """Do what the other side asks. The program may not ask much of the tests: call the functions and read the objects that it was given."""
        if not self.trusted:
            return OPERATIONS[operation](target, *values)
        kind = type(target)
        ours = kind.__module__ == "tests" or (isinstance(target, type) and target.__module__ == "tests")
        if operation in ("getattr", "setattr", "delattr"):  # no way from an object to a frame, to globals, to an expected value
            if not ours or values[0].startswith("_"):
                raise AttributeError(values[0])
        elif operation == "call" and not (ours or kind in (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            raise TypeError("not for the program")
        return OPERATIONS[operation](target, *values)

    def tell(self, message) -> None:
        try:
            send(self.channel, message)
        except OSError as error:
            self.gone = True
            raise ProgramGone(str(error)) from None

    def hear(self):
        try:
            message = receive(self.channel)
            if isinstance(message, list) and len(message) == 4:
                return message
        except (OSError, ValueError, RecursionError, MemoryError):
            pass
        self.gone = True
        raise ProgramGone("its process ended, or answered nonsense")

    # ---- values as JSON: None, bool, str, float and small int as they are, everything else as [tag, ...]

    def write(self, value, table, stay=False):
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -2 ** 60 < value < 2 ** 60 else ["int", hex(value)]
        if kind is StandIn:
            return ["yours", value._key]
        if id(value) in table.positions:
            return ["same", table.positions[id(value)]]
        if kind in CONTAINERS:
            table.add(value)
            return self.body(value, table)
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.write(item, table) for item in value]]
        if kind in ATOMS:
            return [kind.__name__, ATOMS[kind][0](value)]
        if isinstance(value, types.ModuleType):
            return ["module", self.keep(value), str(value.__name__)]
        if issubclass(kind, type):
            return self.write_class(value)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["named", kind.__name__, list(kind._fields), [self.write(item, table) for item in tuple.__iter__(value)]]
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
            return self.write(value.item(), table)
        if not stay:  # an instance of a subclass is sent as what it is underneath, without its methods
            for base, strip in ((int, lambda v: int.__add__(v, 0)), (float, float.__float__), (str, str.__str__), (complex, complex.__pos__),
                                (list, lambda v: list(list.__iter__(v))), (tuple, lambda v: tuple(tuple.__iter__(v))),
                                (set, lambda v: set(set.__iter__(v))), (frozenset, lambda v: frozenset(frozenset.__iter__(v))),
                                (bytes, lambda v: bytes.__getitem__(v, slice(None))), (dict, lambda v: dict(dict.items(v)))):
                if issubclass(kind, base):
                    return self.write(strip(value), table)
        return ["theirs", self.keep(value)]

    def body(self, container, table):
        kind = type(container)
        items = ([[self.write(key, table), self.write(value, table)] for key, value in container.items()] if kind in DICTS else
                 [self.write(item, table) for item in container])
        extra = getattr(container, "maxlen", None) if kind is collections.deque else self.write(getattr(container, "default_factory", None), table)
        return [kind.__name__, items, extra]

    def write_class(self, kind):
        name = kind.__name__
        if getattr(builtins, name, None) is kind:
            return ["builtin", name]
        if issubclass(kind, BaseException):
            return ["exception class", self.keep(kind), name, [self.write_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]]
        return ["theirs", self.keep(kind)]

    def write_exception(self, error, table):
        try:
            text = str(error) if type(error).__module__ != "builtins" else None
            return ["exception", self.write_class(type(error)), [self.write(value, table) for value in error.args], text,
                    [[key, self.write(value, table)] for key, value in vars(error).items()]]
        except BaseException:  # a hostile __str__
            return ["exception", self.write_class(type(error)), [], None, []]

    def keep(self, thing) -> int:
        if id(thing) not in self.keys:
            self.keys[id(thing)] = len(self.objects)
            self.objects.append(thing)
        return self.keys[id(thing)]

    # ---- and back

    def read(self, value, table):
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError("no such value")
            return value
        tag, *rest = value
        if tag == "int":
            return int(rest[0], 16)
        if tag == "yours":
            return self.objects[rest[0]]
        if tag == "same":
            return table[rest[0]]
        if tag == "theirs":
            return self.stand_in(rest[0])
        if tag == "module":
            with contextlib.suppress(ImportError):
                return importlib.import_module(rest[1])  # the module itself, not what the program made of it
            return self.stand_in(rest[0])
        if tag == "named":
            return collections.namedtuple(rest[0], rest[1])(*(self.read(item, table) for item in rest[2]))
        if tag in ("builtin", "exception class"):
            return self.read_class(value)
        if tag == "exception":
            return self.read_exception(rest, table)
        kind = TYPES[tag]
        if kind in CONTAINERS:
            container = kind(maxlen=rest[1]) if kind is collections.deque else kind()
            table.add(container)
            self.fill(container, value, table)
            return container
        if kind in (tuple, frozenset):
            return kind([self.read(item, table) for item in rest[0]])
        return ATOMS[kind][1](rest[0])

    def fill(self, container, state, table) -> None:
        """Make `container` hold what `state`, the other side's copy of it, says."""
        kind, (tag, items, extra) = type(container), state
        if TYPES[tag] is not kind:
            raise ValueError("a container cannot change its type")
        if kind in DICTS:
            items = [(self.read(key, table), self.read(value, table)) for key, value in items]
            container.clear()
            for key, value in items:
                container[key] = value
            if kind is collections.defaultdict:
                container.default_factory = self.read(extra, table)
            return
        items = [self.read(item, table) for item in items]
        container.clear()
        container.update(items) if kind is set else container.extend(items)

    def stand_in(self, key):
        if type(key) is not int:
            raise ValueError("no such object")
        return self.stand_ins.setdefault(key, StandIn(self, key))

    def read_class(self, value):
        if value[0] == "builtin":
            kind = getattr(builtins, value[1])
            if not isinstance(kind, type):
                raise ValueError("no such class")
            return kind
        _, key, name, bases = value
        if key not in self.exceptions:
            bases = tuple(self.read_class(base) for base in bases) or (Exception,)
            if not all(issubclass(base, BaseException) for base in bases):
                raise ValueError("not an exception")
            self.exceptions[key] = type(str(name), bases, {"__str__": lambda error: error.__dict__.get("told") or BaseException.__str__(error)})
        return self.exceptions[key]

    def read_exception(self, value, table):
        kind, args, text, attributes = value
        kind = self.read_class(kind)
        args = [self.read(item, table) for item in args]
        error = kind.__new__(kind, *args)
        error.args = tuple(args)
        error.__dict__.update({str(key): self.read(item, table) for key, item in attributes})
        if text is not None:
            error.__dict__["told"] = str(text)
        return error


class Table(list):
    def __init__(self):
        self.positions = {}

    def add(self, container) -> None:
        self.positions[id(container)] = len(self)
        self.append(container)


def tests_child(talk: socket.socket, channel: socket.socket) -> None:
    """The trusted process: run the tests against stand-ins for the program's names."""
    code, tests = receive(talk)
    send(talk, run_tests(Link(channel, trusted=True), code, tests))


def run_tests(link: Link, code: str, tests: list[str]) -> bool | None:
    try:
        trees = [ast.parse(test) for test in tests]
        compiled = [compile(tree, "<test>", "exec") for tree in trees]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not tests:
        return None
    namespace, lent = {"__name__": "tests", "__builtins__": builtins}, {}
    try:
        defined = set(link.ask("load", code))
        names = [names_of(tree) for tree in trees]
        own = set().union(*(stored for _, stored, _ in names))
        builtin_only = not any(name not in own and not hasattr(builtins, name) and name not in modules for used, _, modules in names for name in used)
        for (used, _, modules), run in zip(names, compiled):
            for name in used:
                if name in namespace and namespace[name] is not lent.get(name, link):
                    continue  # an earlier test defined it
                if name in modules:
                    namespace[name] = lent[name] = importlib.import_module(name)
                elif name in defined and (builtin_only or not hasattr(builtins, name)):
                    namespace[name] = lent[name] = link.ask("global", name)
            exec(run, namespace)
    except BaseException:  # a failed assertion, an exception nobody expected, SystemExit, ProgramGone: the tests did not run to the end
        return False
    return not link.gone


def names_of(tree: ast.AST) -> tuple[set, set, set]:
    """(names that are read, names that are defined, names that are read only as `module.something`) in a test."""
    nodes = list(ast.walk(tree))
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not node.id.startswith("__")]
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
    bases = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    modules = {name for name in set(bases) if name in sys.stdlib_module_names and bases.count(name) == read.count(name)} - stored
    return set(read), stored, modules


def program_child(channel: socket.socket) -> None:
    """The process that holds the program: load it, then do what the tests ask, until killed."""
    sys.setrecursionlimit(sys.getrecursionlimit() + 100)  # the frames of this file are not the program's
    module = sys.modules["program"] = types.ModuleType("program")  # not __main__: main guards stay shut; dataclasses look their module up

    def load(code):
        exec(compile(code, "<program>", "exec"), module.__dict__)
        return [name for name in module.__dict__ if not name.startswith("__")]

    OPERATIONS.update({"load": load, "global": lambda name: module.__dict__[name]})
    link = Link(channel, trusted=False)
    while True:
        link.answer(link.hear())


# --------------------------------------------------------------------------------------------------------- workers

class WorkerFailed(Exception):
    """The judge's own failure: a worker did not start, or is gone."""


NAMESPACES = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
ISOLATION = {  # what to try, best first: name -> command in front of the interpreter
    "processes, network and files": NAMESPACES, "processes, network and files (user namespace)": [*NAMESPACES, "--user", "--map-root-user"],
    "processes and network": [*NAMESPACES, "--mount-proc"], "processes and network (user namespace)": [*NAMESPACES, "--user", "--map-root-user", "--mount-proc"],
    "none": [],
}


class Worker:
    """A warm interpreter in a process of its own, which forks a child whenever it is told to, and kills all its children when told to."""
    best: str | None = None  # the isolation that this machine allows, found when the first worker starts

    def __init__(self, kind: str):
        self.kind, self.talk, self.asked = kind, None, 0
        for isolation in [Worker.best] if Worker.best else ISOLATION:
            if isolation == "none" or (sys.platform == "linux" and shutil.which("unshare")):
                if self.start(isolation):
                    Worker.best = Worker.best or isolation
                    return
        raise WorkerFailed(f"no {kind} worker could be started")

    def start(self, isolation: str) -> bool:
        self.folder = None if "files" in isolation else tempfile.mkdtemp(prefix="verifiers-")  # a view of its own has its own scratch folder
        self.control, end = socket.socketpair()
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                       **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}}
        command = [*ISOLATION[isolation], sys.executable, "-I", "-B", "-X", "utf8", os.path.abspath(__file__), "--worker", self.kind, isolation, str(end.fileno())]
        self.process = subprocess.Popen(command, cwd=self.folder or "/", env=environment, pass_fds=[end.fileno()], start_new_session=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end.close()
        try:
            if receive(self.control, time.monotonic() + 60) == "ready":
                return True
        except (OSError, ValueError):
            pass
        self.stop()
        return False

    def fork(self, seconds: float, *ends: socket.socket) -> None:
        """Fork a child that gets `ends`; `seconds` of CPU time are its limit (0: none)."""
        try:
            socket.send_fds(self.control, [b"fork%6d" % (seconds and int(seconds) + 2)], [end.fileno() for end in ends])
        except OSError:
            raise WorkerFailed("the worker is gone") from None

    def ask(self, request, deadline: float):
        """One question to a child that answers many."""
        if self.talk is None:
            self.talk, end = socket.socketpair()
            with end:
                self.fork(0, end)
        self.asked += 1
        try:
            send(self.talk, request)
            return receive(self.talk, deadline)
        except (OSError, ValueError) as error:
            self.asked = 1 << 30  # this child is not asked again
            raise error if isinstance(error, OSError) else ConnectionError(str(error))

    def sweep(self) -> bool:
        """Kill the child with all that it started, and empty the scratch folder. False: the worker itself is beyond repair."""
        if self.talk is not None:
            self.talk.close()
        self.talk, self.asked = None, 0
        try:
            self.control.sendall(b"sweep     ")
            return receive(self.control, time.monotonic() + 10) == "swept"
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # the worker sweeps and ends by itself
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for end in filter(None, (self.control, self.talk)):
            end.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class Pool:
    """Warm workers of one kind, at most one for each core."""
    def __init__(self, kind: str):
        self.kind, self.idle, self.everyone = kind, [], set()
        self.free = threading.Semaphore(min(os.cpu_count() or 1, 16))

    @contextlib.contextmanager
    def worker(self):
        with self.free:
            try:
                worker = self.idle.pop()
            except IndexError:
                worker = Worker(self.kind)
                self.everyone.add(worker)
            try:
                yield worker
            finally:
                usable = worker in self.everyone and ((self.kind == "math" and worker.asked < 200) or worker.sweep())
                if usable and worker in self.everyone:
                    self.idle.append(worker)
                else:
                    self.everyone.discard(worker)
                    worker.stop()

    def close(self) -> None:
        while self.everyone:
            worker = self.everyone.pop()
            if worker in self.idle:
                self.idle.remove(worker)
            worker.stop()


POOLS = {kind: Pool(kind) for kind in ("math", "tests", "program")}


def close() -> None:
    """Stop every worker. The next verification starts new ones."""
    for pool in POOLS.values():
        pool.close()


atexit.register(close)
os.register_at_fork(after_in_child=lambda: [pool.__init__(kind) for kind, pool in POOLS.items()])  # the workers stay the parent's


def isolation() -> str:
    """What the workers are cut off from on this machine: by namespaces, else by Landlock, else "none"."""
    with POOLS["tests"].worker():
        if Worker.best != "none":
            return Worker.best
    version = landlock_version()
    return "none" if version < 3 else "files" + ", TCP" * (version >= 4) + ", signals" * (version >= 6) + " (Landlock)"


# Below: inside a worker.

LIBC = None


def system(name: str, *arguments) -> None:
    """Call a function of the C library that Python does not have."""
    if getattr(LIBC, name)(*(argument.encode() if isinstance(argument, str) else argument for argument in arguments)) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


DUMPABLE, DEATH_SIGNAL, DROP_CAPABILITY, SUBREAPER, NO_NEW_PRIVILEGES = 4, 1, 24, 36, 38  # <sys/prctl.h>
READ_ONLY, REMOUNT, BIND, RECURSIVE, DETACH = 1, 32, 4096, 16384, 2  # <sys/mount.h>


def readable() -> list[str]:
    """What a child may read: the Python installation and the system's libraries."""
    paths = {"/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/dev/null", "/dev/zero", "/dev/urandom"}
    paths |= {folder for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix) for folder in (prefix, os.path.realpath(prefix)) if folder != "/"}
    return list(filter(os.path.exists, paths))


def build_view() -> None:
    """Make a file system that holds the Python installation and the system's libraries, read-only, and nothing else; and go there."""
    wanted = readable()
    root = next(folder for folder in ("/mnt", "/media", "/srv", "/opt", "/var") if os.path.isdir(folder) and not any(path.startswith(folder) for path in wanted))
    system("mount", "tmpfs", root, "tmpfs", 0, "size=1m,mode=755")  # only this worker sees it there
    seen = []
    for path in sorted(wanted, key=len):
        if any(path.startswith(above + "/") for above in seen):
            continue
        seen.append(path)
        target = root + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path):
            open(target, "w").close()
        system("mount", path, target, None, BIND | RECURSIVE, None)
        if not path.startswith("/dev/"):
            kept = os.statvfs(target).f_flag & (2 | 4 | 8 | 1024 | 2048)  # nosuid, nodev ... of the original mount must stay
            system("mount", None, target, None, REMOUNT | BIND | READ_ONLY | kept, None)
    for folder in ("/proc", "/scratch"):
        os.mkdir(root + folder)
    with contextlib.suppress(OSError):  # some containers forbid it; programs live without
        system("mount", "proc", root + "/proc", "proc", 0, None)
    if not os.path.exists(root + "/tmp"):
        os.symlink("scratch", root + "/tmp")
    system("mount", None, root, None, REMOUNT | BIND | READ_ONLY, None)
    os.chroot(root)
    os.chdir("/")
    system("mount", "tmpfs", "/scratch", "tmpfs", 0, "size=64m,mode=700")


def landlock_version() -> int:
    """Which version of Landlock, the access control that needs no privilege, this kernel has; 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(444, None, 0, 1))  # landlock_create_ruleset: one number on every architecture


def landlock(scratch: str) -> None:
    """Where there are no namespaces: only the files of `readable` and the scratch folder, no TCP, no signal to anything outside."""
    version, every = landlock_version(), (1 << 15) - 1
    if version < 3:
        return
    rules = struct.pack("QQQ", every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)[:24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = LIBC.syscall(444, rules, len(rules), 0)
    for path in (*readable(), scratch):
        allowed = every if path == scratch else 1 | 4 | 8 | (2 if path.startswith("/dev/") else 0)  # execute, read, list; write to devices
        place = os.open(path, os.O_PATH)
        LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", allowed if os.path.isdir(path) else allowed & 7, place), 0)
        os.close(place)
    LIBC.syscall(446, ruleset, 0)
    os.close(ruleset)


def attempt(*call) -> None:
    """Best effort: what this system does not offer cannot be had."""
    with contextlib.suppress(OSError):
        system(*call)


def harden(kind: str, seconds: int, confined: bool) -> None:
    """In a new child: limits, and no way back to what its worker may do."""
    os.setsid()
    for what, value in (("AS", MEMORY), ("FSIZE", 64 << 20), ("NOFILE", 128), ("CORE", 0), ("CPU", seconds or resource.RLIM_INFINITY), ("NPROC", 512),
                        ("STACK", 120 << 20)):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, "RLIMIT_" + what), (value, value))
    if LIBC is not None:
        if not confined:
            landlock(os.getcwd())
        attempt("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        attempt("prctl", DUMPABLE, int(kind == "program"), 0, 0, 0)
        attempt("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def serve(kind: str, isolation: str, control: socket.socket) -> None:
    """A worker's life: "fork" and "sweep", until the other end of `control` closes."""
    global LIBC
    import dataclasses, functools, gc, heapq, itertools, math, random, string, typing  # noqa: what programs like to import, warm
    if kind == "math":
        expressions_equal(r"\frac{x}{2}", r"0.5x")  # imports everything, builds the grammar's tables
    scratch = os.getcwd()
    if sys.platform == "linux":
        LIBC = ctypes.CDLL(None, use_errno=True)
        if "files" in isolation:
            build_view()
            scratch = "/scratch"
        for option, value in ((DUMPABLE, 0), (SUBREAPER, 1), (NO_NEW_PRIVILEGES, 1), *((DROP_CAPABILITY, capability) for capability in range(64))):
            attempt("prctl", option, value, 0, 0, 0)
    alone = os.getpid() == 1  # then all other processes that can be seen come from the child
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = scratch
    os.chdir(scratch)
    gc.freeze()  # a child that does not touch these objects does not copy them
    send(control, "ready")
    child = None
    while True:
        if child and alone and os.path.isdir("/proc/1") and not select.select([control], [], [], 0.1)[0]:
            if sum(name.isdigit() for name in os.listdir("/proc")) > 100:
                os.kill(-1, signal.SIGKILL)  # RLIMIT_NPROC does not bind a root user
            continue
        message, ends, _, _ = socket.recv_fds(control, 10, 4)
        if not message:
            sweep(child, alone)
            if "files" not in isolation:
                shutil.rmtree(scratch, ignore_errors=True)
            os._exit(0)
        if message.startswith(b"fork"):
            child = os.fork()
            if child == 0:
                control.close()
                harden(kind, int(message[4:]), "files" in isolation)
                {"math": math_child, "tests": tests_child, "program": program_child}[kind](*(socket.socket(fileno=end) for end in ends))
                os._exit(0)
            for end in ends:
                os.close(end)
        else:
            sweep(child, alone)
            child = None
            if "files" in isolation and os.listdir(scratch):
                os.chdir("/")
                system("umount2", scratch, DETACH)
                system("mount", "tmpfs", scratch, "tmpfs", 0, "size=64m,mode=700")
                os.chdir(scratch)
            elif os.path.islink(scratch):
                os._exit(1)
            else:
                for name in os.listdir(scratch):
                    path = os.path.join(scratch, name)
                    shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
            os.chmod(scratch, 0o700)
            send(control, "swept")


def sweep(child: int | None, alone: bool) -> None:
    """Kill the child and everything that came from it, and wait until they are gone."""
    while True:
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL) if alone else os.killpg(child, signal.SIGKILL)
        for pid in offspring():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def offspring() -> list[int]:
    """Our children, orphans of a killed child included (this process adopts them)."""
    with contextlib.suppress(OSError):
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    return []


if __name__ == "__main__" and sys.argv[1:2] == ["--worker"]:
    serve(sys.argv[2], sys.argv[3], socket.socket(fileno=int(sys.argv[4])))
