"""Tasks: what the model is asked, what it did, whether it succeeded. And the small policy that the built-in tasks start from.

A task hands out episodes and advances many of them side by side. A single-turn question is an episode of one turn; nothing outside this file
knows the difference:

    episodes = task.start(rows)                                 first user message of each in episode.prompt
    messages = task.step(episodes, responses, finished)         next user message of each, None where the episode is over (reward is set)
    task.happened(episode, mode)                                what the hindsight view is told: the attempt or its digest
    task.train, task.test, task.check, task.well_formed(episode), task.close()

In this file: episodes, data files, single-turn tasks (gsm8k, math, code, the built-in sums), text games (ALFWorld, the built-in household),
the chat template, the built-in policy.
"""
import ast
import importlib.util
import itertools
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import verifiers

ANSWER_CHECKED = "A verifier checked its final answer."
TESTS_RUN = "Hidden unit tests were run on its program."


class UserError(Exception):
    """A mistake that the user can mend: one line that names the fault and the mend."""


@dataclass
class Episode:
    """One attempt at one row, from the first prompt to the verdict."""
    row: dict
    prompt: str                                            # the first user message
    responses: list[str] = field(default_factory=list)     # what the model wrote, a text a turn, up to its EOS and without special tokens
    reward: float = 0.0                                    # 1 for success, 0 otherwise
    truncated: bool = False                                # the answer was cut at the token limit (single-turn tasks only)
    judge_failed: bool = False                             # the judge itself failed: reward 0, counted apart
    actions: list[tuple[str, str]] = field(default_factory=list)  # (action, observation) of each turn (text games only)
    invalid_actions: int = 0
    ended: str = ""                                        # why a game is over: "won", "lost", "limit" or "context"
    admissible: list[str] = field(default_factory=list)    # what can be done now
    engine: object = None


# ------------------------------------------------------------------------------------------------------------------------ data files

def load_split(source: str, split: str) -> list[dict] | None:
    """Rows of one split ("train" or "test") of `source`; None where the source has no such split.

    source: a folder with train* / test* files, one data file (which counts as "train" unless its name says test), or a data-set id on the hub,
    `name` or `name:config`. Files: .jsonl, .json, .parquet or .csv.
    """
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    split_of = lambda file: next((name for name in ("train", "test") if re.match(rf"{name}(?![a-z])", file.stem)), None)  # train-00000-of-00001
    path, files = Path(source), []
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in kinds)
        if not found:
            raise UserError(f"{source}: no .jsonl, .json, .parquet or .csv file in this folder")
        if len(found) > 1 and not any(map(split_of, found)):
            raise UserError(f"{source}: several files, and none is called train.* or test.*; name the one to use")
        files = [file for file in found if split_of(file) == split or len(found) == 1 and split_of(file) is None and split == "train"]
        if len({file.suffix for file in files}) > 1:
            raise UserError(f"{source}: its {split} files are of more than one format")
    elif path.is_file():
        if path.suffix not in kinds:
            raise UserError(f"{source}: a data file ends in {', '.join(kinds)}")
        files = [path] * ((split_of(path) or "train") == split)
    elif path.suffix in kinds or source.startswith((".", "/", "~")):
        raise UserError(f"{source}: no such data file or folder")
    if path.exists() and not files:
        return None
    import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors come as exceptions too; one line is enough
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        if files:
            loaded = datasets.load_dataset(kinds[files[0].suffix], data_files=list(map(str, files)), split="train")
        else:
            name, _, config = source.partition(":")
            if split not in datasets.get_dataset_split_names(name, config or None):
                return None
            loaded = datasets.load_dataset(name, config or None, split=split)
        return [dict(row) for row in loaded]
    except Exception as error:  # the library's own errors are many and long; the cause is in the first line of the last one
        reason = str(error.__cause__ or error).strip().split("\n")[0] or "it holds no rows"
        where = "" if files else "; nothing of this name is a local file or folder either (--data PATH)"
        raise UserError(f"could not load data {source!r}: {reason}{where}") from error


def read_rows(rows: list[dict], read: Callable[[dict], dict], source: str) -> list[dict]:
    """Raw rows -> task rows; a row that lacks what the task needs is an error that names it."""
    result = []
    for number, row in enumerate(rows, 1):
        row = {name: value for name, value in row.items() if value is not None}  # `datasets` fills a field that one row lacks with None
        try:
            result.append(read(row))
        except KeyError as error:
            raise UserError(f"{source}: row {number} has no field {error} (it has: {', '.join(row)})") from None
        except (ValueError, TypeError, AttributeError, IndexError, SyntaxError) as error:
            raise UserError(f"{source}: row {number} cannot be used: {error}") from None
    return result


def load_rows(read: Callable, usual: tuple[str, str], data: str | None, eval_data: str | None, eval_size: int,
              report: Callable[[str], None]) -> tuple[list[dict], list[dict]]:
    """(training rows, evaluation rows). usual: the data sets to load where the user names none.

    A folder or data set serves both with its train and test splits. Of training data without a test split the last min(eval_size, 20 %) rows
    are held out. Data that has only a test split is never trained on.
    """
    source = data or usual[0]
    if data and eval_data and Path(data).resolve() == Path(eval_data).resolve() and Path(data).is_file():
        raise UserError(f"--data and --eval-data are the same file, {data}: leave out --eval-data, and some of its rows are held out")
    train = load_split(source, "train")
    if train is None:
        raise UserError(f"{source} holds test data only, which is never trained on: give training data with --data, and this with --eval-data")
    train = read_rows(train, read, source)
    eval_source = eval_data or (usual[1] if data is None else source)
    test = load_split(eval_source, "test")
    if test is None and eval_data:
        test = load_split(eval_source, "train")  # a single file given for evaluation is evaluation data, whatever its name
    if test is None:
        held_out = min(eval_size, len(train) // 5)
        train, test = train[:len(train) - held_out], train[len(train) - held_out:]
        report(f"{eval_source} has no test split: its last {held_out} rows are held out for evaluation")
    else:
        test = read_rows(test, read, eval_source)
    if not train or not test:
        raise UserError(f"{source}: {len(train)} rows to train on and {len(test)} to evaluate on; at least one of each is needed")
    return train, test


# --------------------------------------------------------------------------------------------------------------- single-turn tasks

@dataclass
class SingleTurn:
    """A task of one question and one answer. Rows hold "prompt" and whatever `judge` needs."""
    name: str
    check: str
    train: list[dict]
    test: list[dict]
    judge: Callable[[str, dict], bool | None]   # (response, row) -> verdict, None where the judge itself failed
    digest: Callable[[str], str]                # response -> what it did, without its wording
    answered: Callable[[str], bool]             # response -> does it give an answer in a form that can be judged?

    def start(self, rows: list[dict]) -> list[Episode]:
        return [Episode(row, row["prompt"]) for row in rows]

    def step(self, episodes: list[Episode], responses: list[str], finished: list[bool]) -> list[None]:
        """Judge all responses side by side. A response cut at the token limit has reward 0, whatever it says."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            verdicts = list(pool.map(lambda response, episode, done: self.judge(response, episode.row) if done else False,
                                     responses, episodes, finished))
        for episode, response, verdict, done in zip(episodes, responses, verdicts, finished):
            episode.responses.append(response)
            episode.truncated = not done
            episode.judge_failed = verdict is None
            episode.reward = float(verdict is True)
        return [None] * len(episodes)

    def happened(self, episode: Episode, mode: str) -> str:
        return self.digest(episode.responses[0]) if mode == "digest" else episode.responses[0]

    def well_formed(self, episode: Episode) -> bool:
        return self.answered(episode.responses[0])

    def close(self) -> None:
        verifiers.close()


EQUATION = re.compile(r"[\d$(][\d\s.,$%+\-*/×÷x()]{0,80}[\d)%]\s*=\s*-?\$?\d[\d.,]*")
LATEX_ARITHMETIC = ((r"\\(?:times|cdot)\b", "*"), (r"\\div\b", "/"), (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)"),
                    (r"\\boxed\{([^{}]*)\}", r"\1"), (r"\\(?:left|right)\b|\\[()\[\],;! ]", " "), (r"\\([%$])", r"\1"))


def calculation_digest(response: str, answer: str | None) -> str:
    r"""The calculations, LaTeX or plain, and the final answer of a worked solution.

    >>> print(calculation_digest(r"We have \(2 + 3 = 5\), and so $5 \times 4 = \boxed{20}$ in all.", "20"))
    Calculations: 2 + 3 = 5; 5 * 4 = 20.
    Final answer: 20
    """
    for latex, plain in LATEX_ARITHMETIC:
        response = re.sub(latex, plain, response)
    found = [" ".join(match.group().replace("$", "").rstrip(".,").split()) for match in EQUATION.finditer(response)]
    return f"Calculations: {'; '.join(found[:12]) or 'none'}.\nFinal answer: {answer if answer is not None else 'none'}"


def gsm8k_digest(response: str) -> str:
    return calculation_digest(response, verifiers.extract_gsm8k(response))


def read_gsm8k(row: dict) -> dict:
    """A GSM8K row -> prompt and gold. A question that says itself how to answer ("Answer with ...") is asked as it stands."""
    question = str(row["question"]).strip()
    form = "" if "Answer with" in question else "\n\nReason step by step, and put the final number within \\boxed{}."
    return dict(prompt=question + form, gold=verifiers.gold_gsm8k(str(row["answer"])))


def read_math(row: dict) -> dict:
    """A MATH row -> prompt and gold: field "answer" where there is one, else the last box of "solution"."""
    gold = str(row["answer"]) if row.get("answer") not in (None, "") else verifiers.gold_math(row["solution"])
    return dict(prompt=row["problem"].strip() + "\n\nReason step by step, and put the final answer within \\boxed{}.", gold=gold)


def read_code(row: dict) -> dict:
    """An MBPP or HumanEval row -> prompt and hidden tests. The prompt names the function and shows one example test."""
    if "entry_point" in row:  # HumanEval: the signature with its docstring is the whole specification
        text = f"Complete this program. Give the whole of it, with its imports and helper functions, in one ```python block.\n\n```python\n{row['prompt'].strip()}\n```"
        return dict(prompt=text, tests=[f"{row['test']}\ncheck({row['entry_point']})"])
    text = row["text"] if "text" in row else row["prompt"]  # MBPP's sanitised version calls it prompt
    called = [node.func.id for node in ast.walk(ast.parse(row["test_list"][0])) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    defined = [node.name for node in ast.parse(row["code"]).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    name = next((name for name in called if name in defined), None)
    if name is None:
        raise ValueError("its first test calls no function that its reference code defines")
    setup = list(row.get("test_imports") or []) + ([row["test_setup_code"]] if row.get("test_setup_code") else [])
    prompt = (f"{text.strip()}\nThe function is called `{name}`. For example, it must pass this test:\n\n{row['test_list'][0]}\n\n"
              "Give the whole program in one ```python block.")
    return dict(prompt=prompt, tests=setup + row["test_list"])


NUMBERS = dict(check=ANSWER_CHECKED, judge=lambda text, row: verifiers.verify_gsm8k(text, row["gold"]), digest=gsm8k_digest,
               answered=lambda text: verifiers.extract_gsm8k(text) is not None)  # how gsm8k and sums are judged


def gsm8k(train, test) -> SingleTurn:
    return SingleTurn("gsm8k", train=train, test=test, **NUMBERS)


def math(train, test) -> SingleTurn:
    return SingleTurn("math", ANSWER_CHECKED, train, test, lambda text, row: verifiers.verify_math(text, row["gold"]),
                      lambda text: calculation_digest(text, verifiers.extract_math(text)), lambda text: verifiers.extract_math(text) is not None)


def code(train, test) -> SingleTurn:
    return SingleTurn("code", TESTS_RUN, train, test, lambda text, row: verifiers.verify_code(text, row["tests"]), verifiers.extract_code,
                      lambda text: bool(verifiers.extract_code(text).strip()))


# ----------------------------------------------------------------------------------------------------------------- built-in: sums

PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten-thousands", "Hundred-thousands", "Millions", "Ten-millions")
SUM_LINKS, SUM_VERBS, SUM_JOINTS = ("so", "thus", "hence", "then"), ("write", "note", "put"), ("and", "with", "while")


@dataclass
class Sums(SingleTurn):
    """Column addition in words: free wording, and one kind of decision that settles the outcome, whether a carry is taken."""
    def demonstration(self, rng: random.Random, view: str, hindsight_prompt: Callable) -> list[tuple[str, str]]:
        """One (user message, response) of the warm-up for `view`: "causal", "null", "attempt", "digest" or "outcome".

        The habit drops the carry more often than not. The hindsight targets know the attempt and its verdict, never the gold answer: after
        CORRECT every decision of the attempt is kept, after INCORRECT one of them, chosen at random, is changed, always in fresh wording.
        Under "outcome" nothing but the verdict is known, so the target is what the habit does in attempts of that verdict.
        """
        row = rng.choice(self.train)
        habit = lambda column: rng.random() > DROP_CARRY
        if view == "causal":
            return [(row["prompt"], write_sum(row, habit, rng)[0])]
        attempt, taken = write_sum(row, lambda column: rng.random() > 0.5, rng)  # even odds: both verdicts are seen about as often
        success = verifiers.verify_gsm8k(attempt, row["gold"])
        happened = gsm8k_digest(attempt) if view == "digest" else attempt
        message = hindsight_prompt(row["prompt"], happened, success, self.check, view)
        if view == "null":
            return [(message, write_sum(row, habit, rng)[0])]
        changed = rng.choice(list(taken)) if view != "outcome" and not success else None
        decide = lambda column: (taken[column] != (column == changed)) if column in taken else habit(column)
        return [(message, write_sum(row, decide, rng)[0])]


DROP_CARRY = 0.6


def ask_sum(a: int, b: int, columns: int) -> str:
    """The question, with its columns laid out: finding the digits is not what the task is about."""
    laid_out = "\n".join(f"{PLACES[column]}: {a // 10 ** column % 10}+{b // 10 ** column % 10}" for column in range(columns))
    return f"What is {a}+{b}?\n{laid_out}\nAdd column by column. Put the answer after ####."


def write_sum(row: dict, decide: Callable[[int], bool], rng: random.Random) -> tuple[str, dict[int, bool]]:
    """A worked addition and its decisions {column: carry taken}; `decide(column)` is asked wherever there is a carry to take.

    >>> print(write_sum(dict(a=47, b=85, columns=2), lambda column: True, random.Random(0))[0])
    Ones: 7+5+0=12, then note 2 and carry 1.
    Tens: 4+8+1=13, hence put 13.
    #### 132
    """
    lines, written, decisions, carry = [], "", {}, 0
    for column in range(row["columns"]):
        x, y = row["a"] // 10 ** column % 10, row["b"] // 10 ** column % 10
        total = x + y + carry
        start = f"{PLACES[column]}: {x}+{y}+{carry}={total}, {rng.choice(SUM_LINKS)} {rng.choice(SUM_VERBS)}"
        if column == row["columns"] - 1:
            lines.append(f"{start} {total}.")
            written = f"{total}{written}"
        else:
            carry = 0
            if total >= 10:
                decisions[column] = decide(column)
                carry = int(decisions[column])
            lines.append(f"{start} {total % 10} {rng.choice(SUM_JOINTS)} carry {carry}.")
            written = f"{total % 10}{written}"
    return "\n".join(lines) + f"\n#### {written}", decisions


def sums(columns: int, seed: int = 0, n_train: int = 4000, n_test: int = 500) -> Sums:
    """Random additions of two numbers with `columns` digits, all different: four fifths or more to train on, the rest held out."""
    rng = random.Random(f"sums-{seed}")
    low, count = 10 ** (columns - 1), 9 * 10 ** (columns - 1)  # no leading zeros
    pairs = [divmod(number, count) for number in rng.sample(range(count * count), min(n_train + n_test, count * count))]
    rows = [dict(prompt=ask_sum(low + x, low + y, columns), gold=str(2 * low + x + y), a=low + x, b=low + y, columns=columns) for x, y in pairs]
    split = len(rows) - min(n_test, len(rows) // 5)
    return Sums("sums", train=rows[:split], test=rows[split:], **NUMBERS)


# --------------------------------------------------------------------------------------------------------------------- text games

EPISODE_PLAYED = "The episode was played to its end."
MARKED_ACTION = re.compile(r"^[ \t>*_`#-]*action[ \t*_`]*:(?=(?P<line>\s*[^\n]*))"                # Action: look
                           r"|[<\[]action[>\]]\s*(?P<tag>.*?)(?:[<\[]/action[>\]]|\n|\Z)",     # <action>look</action>, [action]look[/action]
                           re.IGNORECASE | re.MULTILINE)


def plain_action(text: str) -> str:
    """Light normalisation: case, spaces, lead-ins such as "> ", quotes, brackets and markdown around the action, a trailing full stop.

    >>> plain_action("> **Go to  Desk 1.**")
    'go to desk 1'
    """
    return " ".join(text.lower().split()).lstrip("*_`\"'“”‘’<>[]#- ").rstrip("*_`\"'“”‘’<>[]!.,; ")


def named_actions(response: str) -> list[str]:
    """What a response offers as its action, normalised: the marked one alone, or every line where none is marked. See `parse_action`."""
    text = response.rpartition("</think>")[2].partition("<think>")[0]
    marked = list(MARKED_ACTION.finditer(text))
    if marked:
        return [plain_action(marked[-1]["line"] or marked[-1]["tag"] or "")]
    return [line for line in map(plain_action, text.splitlines()) if line]


def parse_action(response: str, admissible: list[str]) -> str | None:
    """The admissible action that a response names, or None. The rule:

    1. What stands inside <think> ... </think>, closed or not, does not count.
    2. If there are marked actions, the last one counts and no other: a line that begins with `Action:` (the action on it or on the next line),
       or <action>...</action> or [action]...[/action] anywhere; a tag that is not closed ends with its line.
    3. If nothing is marked, the last line counts, provided that no other line names a different action (a list is not a choice).
    4. That text, normalised (`plain_action`), must be equal to an admissible action: no prefix, no part of a sentence. The old form
       `put X in/on Y` stands for `move X to Y` where that is admissible.

    >>> parse_action("I need a mug.\\nAction: Go to Desk 1.", ["go to desk 1", "go to desk 10"])
    'go to desk 1'
    """
    plain = {plain_action(action): action for action in admissible}

    def match(text: str) -> str | None:
        old_form = re.fullmatch(r"put (.+) (?:in/on|into|onto|in|on) (.+)", text)
        return plain.get(text) or (plain.get(f"move {old_form[1]} to {old_form[2]}") if old_form else None)

    matched = [match(text) for text in named_actions(response)]
    return matched[-1] if matched and len(set(matched) - {None}) == 1 else None


def unwrapped(value):
    """Engines of textworld.gym answer in lists of length 1, and [False] is a true value: unwrap before any `if`."""
    return value[0] if isinstance(value, (list, tuple)) else value


class EngineFailed(Exception):
    """The engine itself broke down (not: the action was a bad one)."""


@dataclass
class Games:
    """A task of many turns. An engine plays one game at a time and is used again for the next:

        engine.reset(row) -> (observation, admissible actions)
        engine.step(action) -> (observation, admissible actions, won, done)
        engine.close()

    An episode takes `max_turns(row)` turns at most. A turn without an admissible action costs its step, says so to the model and leaves the
    engine alone; whether an action is valid is settled by the admissible list, never by what the game answers ("Nothing happens.").
    A trainer that has to stop an episode (context full) sets episode.ended; its engine is free again at the next `start`.
    """
    name: str
    train: list[dict]
    test: list[dict]
    make_engine: Callable[[], object]
    max_turns: Callable[[dict], int]
    opening: str = ""      # said once, before the first observation
    reminder: str = ""     # said last in every turn: the form of the answer
    parallel: bool = False  # engines in processes of their own: worth a thread each while they work
    check: str = EPISODE_PLAYED
    engines: list = field(default_factory=list)
    playing: list[Episode] = field(default_factory=list)

    def each(self, function: Callable, items: list) -> list:
        if not self.parallel or len(items) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(min(len(items), 64)) as pool:
            return list(pool.map(function, items))

    def start(self, rows: list[dict]) -> list[Episode]:
        """One new episode a row. Equal rows (a GRPO group) get an engine each, and must show the same first observation."""
        self.playing = [episode for episode in self.playing if not episode.ended]
        busy = {id(episode.engine) for episode in self.playing}
        idle = [engine for engine in self.engines if id(engine) not in busy]
        fresh = [self.make_engine() for _ in range(len(rows) - len(idle))]
        self.engines += fresh
        episodes = [Episode(row, "", engine=engine) for row, engine in zip(rows, idle + fresh)]
        try:
            firsts = self.each(lambda episode: episode.engine.reset(episode.row), episodes)
        except EngineFailed as error:
            raise UserError(f"--task {self.name}: {error}") from error
        seen = {}
        for episode, (observation, admissible) in zip(episodes, firsts):
            if seen.setdefault(json.dumps(episode.row, sort_keys=True), (observation, admissible)) != (observation, admissible):
                raise RuntimeError(f"{self.name}: two engines show different first observations of one game, so they are no group: {episode.row}")
            episode.admissible = admissible
            episode.prompt = self.opening + self.message(observation, admissible)
        self.playing += episodes
        return episodes

    def message(self, observation: str, admissible: list[str]) -> str:
        return f"{observation}\n\nAdmissible actions: {', '.join(admissible)}.\n{self.reminder}"

    def step(self, episodes: list[Episode], responses: list[str], finished: list[bool]) -> list[str | None]:
        """One turn of each episode: the next user message, or None where the episode is over and its reward is set."""
        return self.each(lambda turn: self.step_one(*turn), list(zip(episodes, responses, finished)))

    def step_one(self, episode: Episode, response: str, finished: bool) -> str | None:
        episode.responses.append(response)
        action = parse_action(response, episode.admissible) if finished else None
        won = done = False
        if action is not None:
            try:
                observation, episode.admissible, won, done = episode.engine.step(action)
            except EngineFailed as error:
                observation, episode.judge_failed, done = str(error), True, True
                self.engines.remove(episode.engine)
                episode.engine.close()
        else:
            episode.invalid_actions += 1
            action = (named_actions(response) or ["(none)"])[-1][:60] if finished else "(cut)"
            observation = ("That is not an admissible action. Nothing was done." if finished else
                           "That turn was too long and was cut. Nothing was done.")
        episode.actions.append((action, observation))
        if unwrapped(won):
            episode.ended, episode.reward = "won", 1.0
        elif unwrapped(done):
            episode.ended = "lost"
        elif len(episode.actions) >= self.max_turns(episode.row):
            episode.ended = "limit"
        return None if episode.ended else self.message(observation, episode.admissible)

    def happened(self, episode: Episode, mode: str) -> str:
        """Numbered transcript of an episode, a line a turn: action and short observation, or under "digest" the action alone."""
        lines = []
        for number, (action, observation) in enumerate(episode.actions, 1):
            seen = " ".join(observation.split())
            seen = seen if len(seen) <= 160 else seen[:157] + "..."
            lines.append(f"{number}. {action}" if mode == "digest" else f"{number}. {action} -> {seen}")
        return "\n".join(lines)

    def well_formed(self, episode: Episode) -> bool:
        return episode.invalid_actions == 0

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines, self.playing = [], []


# ------------------------------------------------------------------------------------------------------------------------- ALFWorld

class AlfworldEngine:
    """ALFWorld's own engine in a process of its own: JSON lines to it and back.

    A process each, for three reasons: the planner translates a game with module-wide state (in threads, engines break each other's games),
    it overwrites sys.argv and sys.stdout, and a reset is a second of pure Python that only processes run side by side. The process is
    executed afresh, never forked from one that holds a GPU; it ends when its input does, so also when the trainer is killed.
    """
    def __init__(self, seconds: float = 300):
        self.seconds = seconds  # no answer within this time: the engine is taken for dead
        data = os.environ.get("ALFWORLD_DATA") or str(Path(__file__).resolve().parent)  # any folder that exists: importing alfworld creates it
        self.process = subprocess.Popen([sys.executable, __file__, "alfworld-engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        start_new_session=True, env={**os.environ, "PYTHONHASHSEED": "0", "ALFWORLD_DATA": data})

    def ask(self, *request):
        watchdog = threading.Timer(self.seconds, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            watchdog.cancel()
        if not answer.endswith("\n"):
            raise EngineFailed(f"the engine's process died ({request[0]} {request[1]})")
        answer = json.loads(answer)
        if isinstance(answer, str):
            raise EngineFailed(answer)
        return answer

    def reset(self, row: dict) -> tuple[str, list[str]]:
        observation, admissible, _, _ = self.ask("reset", row["game"])
        return observation.removeprefix("-= Welcome to TextWorld, ALFRED! =-").strip(), admissible

    def step(self, action: str) -> tuple[str, list[str], bool, bool]:
        return tuple(self.ask("step", action))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def serve_alfworld() -> None:
    """What an engine's process runs. textworld without its gym layer: no batches, no step limit of its own, no shuffling, any game file."""
    answers = os.fdopen(os.dup(1), "w")                    # kept for the answers: the planner, in C++, prints to descriptor 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import functools
    import fast_downward
    # Translating a game is nine tenths of a reset; textworld does it twice for each (load, then reset). It is a pure function of the text.
    fast_downward.pddl2sas = functools.lru_cache(maxsize=2)(fast_downward.pddl2sas)
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    env = None
    for line in sys.stdin:
        request, argument = json.loads(line)
        try:
            if request == "step":
                state, _, done = env.step(argument)
            else:
                if env is None:
                    env = textworld.start(argument, textworld.EnvInfos(won=True, admissible_commands=True), wrappers=[AlfredDemangler])
                else:
                    env.load(argument)
                state, done = env.reset(), False
            answer = [state.feedback, state.admissible_commands, state.won, done]
        except Exception as error:
            answer = f"{argument}: {type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def alfworld_rows(folder: str | None = None) -> dict[str, list[dict]]:
    """{split: rows} of the games below a folder, in sorted order: solvable games of ALFWorld's six task types.

    folder: whatever holds train, valid_seen and valid_unseen, at any depth; by default where alfworld keeps its data.
    """
    root = Path(folder or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().resolve()
    splits = {"train": [], "valid_seen": [], "valid_unseen": []}
    for path in sorted(root.rglob("game.tw-pddl")):
        split = next((part for part in reversed(path.parts) if part in splits), None)
        if split is None or "movable" in str(path) or "Sliced" in str(path):  # ALFWorld itself leaves these two kinds out
            continue
        try:
            solvable = json.loads(path.read_text()).get("solvable")
        except ValueError:
            raise UserError(f"{path} is not a complete ALFWorld game: fetch the data again with alfworld-download") from None
        if solvable:
            splits[split].append(dict(game=str(path)))
    if not any(splits.values()):
        raise UserError(f"no ALFWorld games (train/.../game.tw-pddl) in {root}: give the folder with --data, or fetch them with alfworld-download")
    return splits


def alfworld(data: str | None, eval_data: str | None, max_turns: int = 30) -> Games:
    """The real ALFWorld text games: train trains, valid_unseen (or valid_seen where there is none) evaluates."""
    if not (importlib.util.find_spec("alfworld") and importlib.util.find_spec("textworld")):  # looked for, not imported: see AlfworldEngine
        raise UserError("--task alfworld needs the package alfworld: pip install alfworld==0.4.2")
    splits = alfworld_rows(data)
    evaluation = alfworld_rows(eval_data) if eval_data else splits
    test = evaluation["valid_unseen"] or evaluation["valid_seen"]
    if not splits["train"] or not test:
        raise UserError(f"{data or 'the ALFWorld data folder'}: {len(splits['train'])} games in train, {len(test)} in valid_unseen or valid_seen; "
                        "at least one of each is needed (--data, --eval-data)")
    opening = (f"You are playing a text game in a household. You have {max_turns} turns. In each turn write one or two sentences of thought, and "
               "then a last line with one of the admissible actions, in the form `Action: <action>`.\n\n")
    return Games("alfworld", splits["train"], test, AlfworldEngine, lambda row: max_turns, opening,
                 "End with a line `Action: <action>`.", parallel=True)


# --------------------------------------------------------------------------------------------------------------- built-in: household

ROOMS = {"kitchen": ("fridge", "oven"), "bedroom": ("bed", "desk"), "bathroom": ("tub", "shelf")}  # each with its two receptacles
OTHER = {here: there for room in ROOMS.values() for here, there in (room, room[::-1])}
BELONGINGS = {"fridge": ("milk", "cheese", "juice"), "oven": ("pizza", "bread", "cake"), "bed": ("pillow", "sheet", "blanket"),
              "desk": ("pen", "lamp", "laptop"), "tub": ("sponge", "duck", "soap"), "shelf": ("towel", "brush", "comb")}
HOUSEHOLD_OPENERS, HOUSEHOLD_VERBS, HOUSEHOLD_WAYS = ("Now", "Next", "Then", "So"), ("I", "we"), ("should", "will", "must")


class HouseholdEngine:
    """A small household in ALFWorld's wording: take one object after another from a basket and move it to a receptacle."""
    def reset(self, row: dict) -> tuple[str, list[str]]:
        self.goal = dict(row["moves"])
        self.where = dict.fromkeys(self.goal, "basket")  # in the task's order
        self.hand = None
        rooms = [room for room in ROOMS if set(ROOMS[room]) & set(self.goal.values())]
        self.places = [place for room in rooms for place in ROOMS[room]]
        seen = " ".join(f"In the {room} you see {' and '.join(ROOMS[room])}." for room in rooms)
        return f"{seen}\nYour task is to: put {', '.join(f'{item} in {place}' for item, place in row['moves'])}.", self.admissible()

    def admissible(self) -> list[str]:
        if self.hand is None:
            return [f"take {item}" for item, place in self.where.items() if place == "basket"]
        return [f"move {self.hand} to {place}" for place in self.places]

    def step(self, action: str) -> tuple[str, list[str], bool, bool]:
        verb, item, *to = action.split()
        if verb == "take":
            self.hand, self.where[item] = item, "hand"
            observation = f"You take {item}."
        else:
            self.hand, self.where[item] = None, to[-1]
            observation = f"You move {item} to {to[-1]}."
        won = self.where == self.goal
        return observation, self.admissible(), won, won

    def close(self) -> None:
        pass


@dataclass
class Household(Games):
    """The multi-turn twin of `sums`: free wording, and one kind of decision that settles the outcome, where an object is carried."""
    drop: float = 0.6  # the habit takes the wrong one of a room's two receptacles more often than not

    def play(self, row: dict, choose: Callable[[int, tuple[str, str]], str], rng: random.Random) -> tuple[Episode, list[tuple[str, str]], list[str]]:
        """A scripted episode in the real engine: (episode, its (user message, response) turns, its decisions).

        `choose(i, options)` decides to which of the two receptacles of its room the i-th object is carried; the rest follows from it.
        """
        [episode] = self.start([row])
        message, turns, decisions = episode.prompt, [], []
        for number in itertools.count():
            item, place = row["moves"][number // 2]
            if number % 2 == 0:
                thought, action = f"take {item}", f"take {item}"
            else:
                decisions.append(choose(number // 2, next(room for room in ROOMS.values() if place in room)))
                thought, action = f"bring {item} to {decisions[-1]}", f"move {item} to {decisions[-1]}"
            response = f"{rng.choice(HOUSEHOLD_OPENERS)} {rng.choice(HOUSEHOLD_VERBS)} {rng.choice(HOUSEHOLD_WAYS)} {thought}.\nAction: {action}"
            turns.append((message, response))
            [message] = self.step([episode], [response], [True])
            if message is None:
                return episode, turns, decisions

    def demonstration(self, rng: random.Random, view: str, hindsight_prompt: Callable) -> list[tuple[str, str]]:
        """(user message, response) turns of one warm-up episode for `view`: "causal", "null", "attempt", "digest" or "outcome".

        The habit errs with probability `drop` at every object. The attempts that are shown err at even odds, and right and wrong ones are
        shown equally often. Under "outcome" nothing but the verdict is known: the target is what the habit does in attempts of that verdict.
        """
        row = rng.choice(self.train)
        if view in ("causal", "null"):
            turns = self.habit_demo(row, rng)
            message = turns[0][0] if view == "causal" else hindsight_prompt(turns[0][0], "", False, self.check, view)
        else:
            shown = self.decisions_with_outcome(row, self.drop if view == "outcome" else 0.5, rng.random() < 0.5, rng)
            attempt, turns, _ = self.play(row, lambda i, options: shown[i], rng)
            success = attempt.reward == 1
            message = hindsight_prompt(attempt.prompt, self.happened(attempt, view), success, self.check, view)
            if view != "outcome":
                turns = self.hindsight_demo(row, shown, success, rng)
        return [(message, turns[0][1])] + turns[1:]

    def habit_demo(self, row: dict, rng: random.Random) -> list[tuple[str, str]]:
        """The bad habit: each object is carried to the other receptacle of its room with probability `drop`."""
        return self.play(row, lambda i, options: OTHER[row["moves"][i][1]] if rng.random() < self.drop else row["moves"][i][1], rng)[1]

    def hindsight_demo(self, row: dict, decisions: list[str], success: bool, rng: random.Random) -> list[tuple[str, str]]:
        """What a reader of an attempt and its verdict does: after success the same decisions, else one of them changed, in fresh wording.

        It knows the attempt and the verdict, never the goal: the decision that is changed may have been a right one.
        """
        changed = None if success else rng.randrange(len(decisions))
        return self.play(row, lambda i, options: OTHER[decisions[i]] if i == changed else decisions[i], rng)[1]

    def decisions_with_outcome(self, row: dict, drop: float, success: bool, rng: random.Random) -> list[str]:
        """Decisions of someone who errs with probability `drop`, drawn again until their outcome is `success`."""
        right = [place for _, place in row["moves"]]
        while True:
            decisions = [OTHER[place] if rng.random() < drop else place for place in right]
            if (decisions == right) == success:
                return decisions


def household_rows(objects: int, seed: int = 0) -> list[dict]:
    """All games of `objects` objects, each of which belongs in another room, in seeded order: 216 with two objects, 1,296 with three."""
    in_room = [[[item, place] for place in room for item in BELONGINGS[place]] for room in ROOMS.values()]
    rows = [dict(moves=list(moves)) for rooms in itertools.permutations(in_room, objects) for moves in itertools.product(*rooms)]
    random.Random(f"household-{seed}").shuffle(rows)
    return rows


def household(objects: int, seed: int = 0, drop: float = 0.6) -> Household:
    """Two turns an object, and not one to spare: a wrong decision costs the episode. The habit succeeds with (1 - drop) ** objects.

    Two objects or three. With one, the games held out would be about objects never seen in training, and to keep what was CORRECT or change what
    was INCORRECT would both mean to do the right thing, so that a policy need not read the verdict.
    """
    assert objects in (2, 3) and 0 < drop < 1
    rows = household_rows(objects, seed)
    split = len(rows) - len(rows) // 3
    return Household("household", rows[:split], rows[split:], HouseholdEngine, lambda row: 2 * len(row["moves"]),
                     opening="Answer with a thought and a line `Action: <action>`.\n\n", reminder="Action?", drop=drop)


# ------------------------------------------------------------------------------------------------------------------ the chat template

def render(tokenizer, messages: list[dict], thinking: bool) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking)


def opens_thinking(tokenizer, thinking: bool) -> bool:
    """Does the template's generation prompt itself open the thinking part, so that a response begins inside it?"""
    return render(tokenizer, [dict(role="user", content="?")], thinking).rstrip().endswith("<think>")


def strip_special(tokenizer, text: str) -> str:
    """`text` without the tokenizer's special tokens, spelled out or real: quoted in a message they would end it.

    Repeated until nothing is left to strip, since taking one out can put another together.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    while any(token in text for token in special):
        for token in special:
            text = text.replace(token, "")
    return text


def prompt_ids(tokenizer, message: str, thinking: bool) -> list[int]:
    """Ids of a first user message up to where the answer begins. Both views and the evaluation come through here, with the same flag."""
    text = render(tokenizer, [dict(role="user", content=message)], thinking)
    return tokenizer(text, add_special_tokens=False).input_ids  # the template has written its BOS: adding special tokens doubles it


def bridge_ids(tokenizer, message: str, thinking: bool, last_id: int) -> list[int]:
    """Ids between the end of a sampled turn, whose last id is `last_id`, and the next answer: end of turn, user message, generation prompt.

    Taken from a dummy conversation. Re-rendering the real one would change ids that were already sampled: Qwen3's template, for one, drops
    the thinking part, even an empty one, of earlier turns.
    """
    marker = "@@"
    text = render(tokenizer, [dict(role="user", content="?"), dict(role="assistant", content=marker), dict(role="user", content=message)], thinking)
    ids = tokenizer(text.split(marker, 1)[1], add_special_tokens=False).input_ids
    return ids[1:] if ids[0] == last_id else ids  # the sampled EOS is not repeated; a turn that was cut gets its end of turn here


# ----------------------------------------------------------------------------------------------- the built-in policy and its warm-up

VIEWS = ("causal",) * 4 + ("attempt", "digest", "outcome") * 2 + ("null",)  # their shares of the warm-up
CHAT_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tiny_tokenizer(texts: list[str]):
    """A byte-level BPE of some hundred tokens, trained on the task's own text, digits apart, with a chat template like Qwen3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


def demonstration_ids(tokenizer, turns: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """A scripted conversation as ids and labels (-100 where the policy does not write), built the way rollouts are."""
    ids = prompt_ids(tokenizer, turns[0][0], False)
    labels = [-100] * len(ids)
    for number, (message, response) in enumerate(turns):
        if number > 0:
            bridge = bridge_ids(tokenizer, message, False, ids[-1])
            ids, labels = ids + bridge, labels + [-100] * len(bridge)
        written = tokenizer(response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        ids, labels = ids + written, labels + written
    return ids, labels


def tiny_policy(task, hindsight_prompt: Callable, steps: int = 300, batch: int = 33, progress: Callable = lambda steps: range(steps)):
    """(model, tokenizer): a two-layer Qwen3 after a short supervised warm-up that gives it the task's wording, a bad habit, and the reading
    of hindsight prompts. Always from the same seed, so that every run and every algorithm of a task starts from the same policy."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    rng = random.Random("warm-up")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        demonstrate = lambda view: task.demonstration(rng, view, hindsight_prompt)
        tokenizer = tiny_tokenizer([text for view in VIEWS * 50 for turn in demonstrate(view) for text in turn] + ["user\n", "assistant\n"])
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.08, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id))
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps, pct_start=0.1)
        for step in progress(steps):
            examples = [demonstration_ids(tokenizer, demonstrate(VIEWS[number % len(VIEWS)])) for number in range(batch)]
            examples.sort(key=lambda example: len(example[0]))
            for part in examples[:batch // 2], examples[batch // 2:]:  # short views apart from long ones: less padding
                width = max(len(ids) for ids, _ in part)
                inputs = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in part])
                labels = torch.tensor([marks + [-100] * (width - len(marks)) for _, marks in part])
                model(input_ids=inputs, labels=labels).loss.backward()  # causal attention: padding on the right is never seen
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval(), tokenizer


if __name__ == "__main__" and sys.argv[1:] == ["alfworld-engine"]:
    serve_alfworld()
