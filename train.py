"""Train a language model with verifiable rewards from a single rollout per prompt (HP-RLVR), or with its controls.

    python train.py                                              the built-in task and policy: no GPU, no network, a few minutes
    python train.py --model Qwen/Qwen3-1.7B --task gsm8k         one GPU

Read `train_step` near the end of this file first: one step is sample, verify, baseline, hindsight view, credit, advantage, loss, optimiser step,
in that order. The mathematics is in hp_rlvr.py, the tasks are in envs.py, what counts as right is in verifiers.py.

The algorithms differ in one function each (`advantages`): hp_rlvr weighs R - b by the divergence of the two views, surprisal by what that
divergence would be if the hindsight view copied, reinforce by 1; grpo takes the z-score within a group of rollouts of one prompt.
"""
import argparse
import errno
import html
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import envs
from envs import Episode, UserError
from hp_rlvr import (EMABaseline, Rollout, compare_views, grpo, hindsight_prompt, homogeneous_groups, hp_rlvr, log_law, pearson, policy_loss, reinforce,
                     scale_credit, surprisal_credit, token_credit, token_log_probs, top_share, view_hidden)

# -------------------------------------------------------------------------------------------------------------------------------- flags

TASK_DEFAULTS = {  # lr, steps, prompts per step, new tokens (per turn), evaluation rows, steps between evaluations
    "sums": dict(lr=1e-4, steps=100, prompts_per_step=64, max_new_tokens=None, eval_size=200, eval_every=50),
    "gsm8k": dict(lr=1e-6, steps=100, prompts_per_step=64, max_new_tokens=512, eval_size=256, eval_every=25),
    "math": dict(lr=1e-6, steps=100, prompts_per_step=64, max_new_tokens=1024, eval_size=256, eval_every=25),
    "code": dict(lr=1e-6, steps=100, prompts_per_step=64, max_new_tokens=512, eval_size=128, eval_every=25),
    "alfworld": dict(lr=1e-6, steps=100, prompts_per_step=4, max_new_tokens=256, eval_size=12, eval_every=25),
    "household": dict(lr=4e-4, steps=100, prompts_per_step=64, max_new_tokens=32, eval_size=200, eval_every=50),
}
RESUME_MAY_CHANGE = {"steps", "eval_every", "save_every", "device", "tokens_per_microbatch"}  # everything else would change the run itself
CREDITED = ("hp_rlvr", "surprisal")  # algorithms that weigh tokens


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hindsight-Privileged RLVR: token credit from a single rollout. Without flags: the built-in task.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: (_ for _ in ()).throw(UserError(message))
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", help="a Hugging Face id or folder, or `tiny`, the built-in policy (default: tiny)")
    what.add_argument("--task", choices=list(TASK_DEFAULTS), help="(default: sums)")
    what.add_argument("--data", help="training data: a folder with train/test files, one file, or a data-set id (default: the task's usual one)")
    what.add_argument("--eval-data", help="evaluation data, likewise (default: the test split of --data)")
    what.add_argument("--columns", type=int, help="difficulty of the built-in tasks: digits of a sum (default: 3), objects of a household (2 or 3; 2)")
    what.add_argument("--thinking", action="store_true", default=None, help="turn the chat template's thinking mode on (default: off)")
    how = parser.add_argument_group("the algorithm")
    how.add_argument("--algo", choices=["hp_rlvr", "grpo", "reinforce", "surprisal"], help="(default: hp_rlvr)")
    how.add_argument("--hindsight", choices=["attempt", "digest", "outcome"], help="what the hindsight view is shown (default: attempt)")
    how.add_argument("--contrast", action="store_true", default=None, help="credit between the hindsight views of the true and of the flipped verdict, "
                     "instead of between the causal and the hindsight view (default: off)")
    how.add_argument("--credit-scale", choices=["raw", "batch", "mixed"], help="token weights from credit; raw is the bare equation (default: mixed)")
    how.add_argument("--baseline-decay", type=float, help="decay of the moving average of rewards (default: 0.9)")
    how.add_argument("--group-size", type=int, help="rollouts per prompt (default: 8 for grpo, else 1)")
    how.add_argument("--mask-truncated", action="store_true", default=None, help="leave truncated responses out of the loss (biased towards rambling)")
    steps = parser.add_argument_group("size and speed (defaults depend on the task; those of gsm8k are shown)")
    steps.add_argument("--steps", type=int, help="optimiser steps (100)")
    steps.add_argument("--prompts-per-step", type=int, help="prompts sampled for each step (64)")
    steps.add_argument("--max-new-tokens", type=int, help="longest response, or longest turn in a multi-turn task (512)")
    steps.add_argument("--max-context", type=int, help="longest prompt with its response; longer prompts are dropped (half the model's positions)")
    steps.add_argument("--temperature", type=float, help="of sampling, scoring and loss alike (default: 1)")
    steps.add_argument("--lr", type=float, help="learning rate, constant (1e-6)")
    steps.add_argument("--optimizer", choices=["adamw", "adamw8bit"], help="adamw8bit (package torchao): bf16 weights with stochastic rounding, "
                       "8-bit moments, a third of the memory (default: adamw)")
    steps.add_argument("--tokens-per-microbatch", type=int, help="padded tokens in one forward pass; less needs less memory and pads less (default: 4096)")
    steps.add_argument("--dtype", choices=["fp32", "bf16"], help="of the forward pass; adamw's weights stay fp32 (default: bf16 on a GPU, else fp32)")
    steps.add_argument("--device", help="cuda, cpu, ... (default: a GPU if there is one)")
    run = parser.add_argument_group("the run")
    run.add_argument("--seed", type=int, help="(default: 0)")
    run.add_argument("--eval-every", type=int, help="steps between evaluations; 0: only before and after (25)")
    run.add_argument("--eval-size", type=int, help="rows of the test split in each evaluation (256)")
    run.add_argument("--save-every", type=int, help="steps between checkpoints; 0: only at the end (default: 25)")
    run.add_argument("--out", help="folder of the run (default: runs/<task>-<algo>-<time>)")
    run.add_argument("--resume", metavar="RUN", help="continue the run in this folder from its checkpoint")
    args = parser.parse_args(argv)
    if args.resume:
        args = resume_args(args)
    complete_args(args)
    return args


def resume_args(given: argparse.Namespace) -> argparse.Namespace:
    """The flags of the run in --resume; flags given beside it may only change what does not change the run."""
    try:
        flags = json.loads(Path(given.resume, "config.json").read_text())["flags"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--resume {given.resume}: no run there (config.json is missing or broken)") from None
    for name, value in vars(given).items():
        if name == "resume" or value is None or flags.get(name) == value:
            continue
        if name not in RESUME_MAY_CHANGE:
            raise UserError(f"--resume: --{name.replace('_', '-')} was {flags.get(name)!r} in this run and cannot become {value!r}; "
                            f"only {', '.join(sorted(RESUME_MAY_CHANGE))} may change")
        flags[name] = value
    return argparse.Namespace(**dict.fromkeys(vars(given)) | flags | dict(resume=given.resume, out=given.resume))


def complete_args(args: argparse.Namespace) -> None:
    """Fill in the defaults and refuse values that cannot work."""
    def default(name, value):
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, value in dict(model="tiny", task="sums", thinking=False, algo="hp_rlvr", hindsight="attempt", contrast=False, credit_scale="mixed",
                            baseline_decay=0.9, mask_truncated=False, temperature=1.0, optimizer="adamw", tokens_per_microbatch=4096, seed=0, save_every=25,
                            device="cuda" if torch.cuda.is_available() else "cpu").items():
        default(name, value)
    default("group_size", 8 if args.algo == "grpo" else 1)
    default("dtype", "bf16" if args.device.startswith("cuda") or args.optimizer == "adamw8bit" else "fp32")
    if args.optimizer == "adamw8bit" and args.dtype == "fp32":
        raise UserError("--optimizer adamw8bit keeps its weights in bf16: leave out --dtype fp32")
    for name, value in TASK_DEFAULTS[args.task].items():
        default(name, value)
    default("columns", 2 if args.task == "household" else 3)
    default("max_new_tokens", 26 * args.columns + 16)
    default("out", f"runs/{args.task}-{args.algo}-{time.strftime('%Y%m%d-%H%M%S')}")
    for name in ("steps", "prompts_per_step", "max_new_tokens", "group_size", "eval_size", "tokens_per_microbatch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    for name in ("eval_every", "save_every"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} must not be negative")
    if not 1e-3 <= args.temperature <= 100:
        raise UserError(f"--temperature must lie in [0.001, 100], not {args.temperature:g} (greedy sampling has no law to learn from; "
                        "evaluations include a greedy one)")
    if not 0 < args.lr < 1:
        raise UserError(f"--lr must be positive and below 1, not {args.lr:g}")
    if not 0 <= args.seed < 1 << 62:
        raise UserError(f"--seed must lie in [0, 2^62), not {args.seed}")
    if args.task in ("sums", "household") and (args.data or args.eval_data):
        raise UserError(f"--task {args.task} makes its own rows: leave out --data, or name the task that the data is for, e.g. --task gsm8k")
    if not 0 <= args.baseline_decay < 1:
        raise UserError(f"--baseline-decay must lie in [0, 1), not {args.baseline_decay:g}")
    least, most = 2, len(envs.ROOMS) if args.task == "household" else len(envs.PLACES)
    if not least <= args.columns <= most:
        raise UserError(f"--columns must be {least} to {most} for --task {args.task}, not {args.columns}")
    if args.contrast and args.algo != "hp_rlvr":
        raise UserError(f"--contrast compares two hindsight views and --algo {args.algo} has none: leave one of them out")
    if args.algo == "grpo" and args.group_size < 2:
        raise UserError("--algo grpo compares rollouts of one prompt: --group-size must be at least 2")
    if args.model == "tiny" and args.task not in ("sums", "household"):
        raise UserError(f"the built-in policy knows only sums and household; for --task {args.task} name a model, e.g. --model Qwen/Qwen3-1.7B")
    try:
        torch.empty(1, device=args.device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None


# ---------------------------------------------------------------------------------------------------------------------- task and policy

def make_task(args: argparse.Namespace):
    if args.task == "sums":
        return envs.sums(args.columns)  # the rows are a fixed data set: --seed orders them and seeds the sampling
    if args.task == "household":
        return envs.household(args.columns)
    if args.task == "alfworld":
        return envs.alfworld(args.data, args.eval_data)
    if args.task == "math" and not envs.verifiers.math_verify_installed():
        raise UserError("--task math needs the package math-verify: pip install math-verify")
    if args.task == "code":
        print(f"programs run isolated by: {envs.verifiers.isolation()}")
    read, usual, build = {
        "gsm8k": (envs.read_gsm8k, ("openai/gsm8k:main", "openai/gsm8k:main"), envs.gsm8k),
        "math": (envs.read_math, ("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), envs.math),
        "code": (envs.read_code, ("google-research-datasets/mbpp:full", "google-research-datasets/mbpp:full"), envs.code),
    }[args.task]
    return build(*envs.load_rows(read, usual, args.data, args.eval_data, args.eval_size, print))


@dataclass
class Policy:
    """A model with what sampling and scoring need to know about it."""
    model: torch.nn.Module
    tokenizer: object
    eos_ids: set[int]          # Qwen3 has two
    autocast_dtype: torch.dtype

    @property
    def device(self):
        return self.model.device

    @property
    def lm_head(self):
        return self.model.get_output_embeddings()

    def autocast(self, cache: bool = True):
        """fp32 weights, bf16 arithmetic. A step of learning rate 1e-6 is below half a bf16 ulp of most weights: stored in bf16 they never move.

        With gradients, cache must be False: else all chunks share one bf16 copy of the LM head and their gradients are summed in bf16.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast_dtype == torch.bfloat16, cache_enabled=cache)


def load_policy(args: argparse.Namespace, task, out: Path) -> Policy:
    """The policy in eval mode, fp32 weights, without dropout, checkpointing its activations when it trains."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = args.model
    if source == "tiny":
        source = str(out / "tiny")
        if not (out / "tiny").exists():
            bar = lambda steps: tqdm(range(steps), desc="warm-up", unit="step", mininterval=1)
            model, tokenizer = envs.tiny_policy(task, hindsight_prompt, progress=bar)
            model.save_pretrained(out / "tiny.tmp")
            tokenizer.save_pretrained(out / "tiny.tmp")
            os.replace(out / "tiny.tmp", source)  # whole or not at all
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        config = AutoConfig.from_pretrained(source)
        for name in vars(config):
            if "dropout" in name or name.endswith("_pdrop"):
                setattr(config, name, 0.0)  # dropout in the loss would score another law than the one that was sampled
        weights = torch.bfloat16 if args.optimizer == "adamw8bit" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=weights).to(args.device)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"--model {source}: could not be loaded: {str(error).strip().splitlines()[0]}") from error
    if not tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids:
        raise UserError(f"--model {source}: its tokenizer is missing (no tokenizer.json): no text becomes a token")
    if not tokenizer.chat_template:
        raise UserError(f"--model {source}: its tokenizer has no chat template; use an instruct model")
    eos = model.generation_config.eos_token_id
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if not eos_ids:
        raise UserError(f"--model {source}: neither its tokenizer nor its generation config names an EOS token")
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()
    policy = Policy(model.eval(), tokenizer, eos_ids, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    if args.max_context is None:
        args.max_context = positions // 2 - 64
    most = positions // 2 if args.algo == "hp_rlvr" else positions
    if args.max_context > most:
        raise UserError(f"--max-context {args.max_context}: must be at most {most}, since this model has {positions} positions" +
                        (" and the hindsight view holds the response twice" if args.algo == "hp_rlvr" else ""))
    check_lm_head(policy)
    return policy


def make_optimizer(policy: Policy, args: argparse.Namespace):
    """AdamW without decay; eps 1e-15, since credit can make gradients tiny. As adamw8bit, weights in bf16 move by stochastic rounding: a step
    far below their precision is taken with the probability that makes it right on average. Its eps is 1e-8: a second moment that 8 bits round
    to zero would be divided by, and with 1e-15 single weights jump by more than 10 (seen in the third step of a trial)."""
    settings = dict(lr=args.lr, betas=(0.9, 0.999), weight_decay=0.0)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(policy.model.parameters(), **settings, eps=1e-15, fused=True)  # without it: a copy of the second moments a step
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise UserError("--optimizer adamw8bit needs the package torchao: pip install torchao") from None
    return AdamW8bit(policy.model.parameters(), **settings, eps=1e-8, bf16_stochastic_round=True)


@torch.no_grad()
def check_lm_head(policy: Policy) -> None:
    """Scoring applies the LM head to hidden states a chunk at a time: refuse models that do more to their logits than that (soft caps, scales)."""
    ids = policy.tokenizer("1 + 1 = 2", add_special_tokens=False).input_ids
    theirs = policy.model(torch.tensor([ids + [0]], device=policy.device)).logits[0, -2]
    ours = policy.lm_head(view_hidden(policy.model, [ids], [[0]])[0, 0])
    tolerance = 1e-3 if ours.dtype == torch.float32 else 0.5  # bf16: one ulp of a logit of 30 is 0.125
    difference = (ours.float().log_softmax(-1) - theirs.float().log_softmax(-1)).abs().max().item()
    if finite(difference) is None:
        raise UserError("the model's logits are not finite: its weights are damaged")
    if difference > tolerance:
        raise UserError(f"{type(policy.model).__name__} changes its logits after the LM head (a soft cap or a scale), which this program does not score")


# ------------------------------------------------------------------------------------------------------------------------------- rollout

@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], max_new_tokens: int, temperature: float,
           generator: torch.Generator) -> tuple[list[list[int]], list[list[float]]]:
    """One response to each prompt, as ids, the EOS included: exactly softmax(logits / temperature), greedy at temperature 0. Beside it the
    log-probability of each token at the moment it was drawn.

    A loop of our own instead of `generate`, which takes top_k, top_p, min_p, temperature and penalties from the checkpoint's generation
    config, so that the law that is sampled is not the law that is scored. Sequences that are finished leave the batch and its cache, and a prompt
    that is asked several times (a group of grpo) is read once.
    """
    from transformers import DynamicCache

    class Cache(DynamicCache):
        def update(self, keys, values, *arguments, **named):
            # Under autocast the fp32 weight of a key norm (Qwen3) leaves keys in fp32, to be rounded again for attention at every step.
            return super().update(keys.to(values.dtype), values, *arguments, **named)

    model, device = policy.model, policy.device
    was_training = model.training
    model.eval()
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    width = max(map(len, distinct))
    ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in distinct], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in distinct], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = Cache(config=model.config)
    responses: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    with policy.autocast():
        for _ in range(max_new_tokens):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True,
                           logits_to_keep=1).logits[:, -1].float()
            if len(logits) < len(alive):
                copies = torch.tensor([distinct.index(tuple(prompt)) for prompt in prompts], device=device)
                cache.batch_select_indices(copies)
                logits, positions, mask = logits[copies], positions[copies], mask[copies]
            law = (logits / (temperature or 1)).log_softmax(-1)
            chosen = law.argmax(-1) if temperature == 0 else torch.multinomial(law.exp(), 1, generator=generator).squeeze(1)
            drawn = law.gather(-1, chosen[:, None]).squeeze(1)
            going = []
            for place, (row, token, log_prob) in enumerate(zip(alive, chosen.tolist(), drawn.tolist())):
                responses[row].append(token)
                log_probs[row].append(log_prob)
                if token not in policy.eos_ids:
                    going.append(place)
            if not going:
                break
            ids, positions, mask = chosen[:, None], positions[:, -1:] + 1, torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            if len(going) < len(alive):
                keep = torch.tensor(going, device=device)
                cache.batch_select_indices(keep)
                ids, positions, mask = ids[keep], positions[keep], mask[keep]
                alive = [alive[place] for place in going]
    model.train(was_training)
    return responses, log_probs


@dataclass
class Played:
    """What was sampled in one episode, as ids."""
    number: int  # of its row in the batch
    episode: Episode
    prefix: list[int]
    tokens: list[int]
    action_mask: list[int]
    log_probs: list[float]  # of each token when it was drawn; 0 where the environment wrote it


def play(policy: Policy, task, rows: list[dict], args: argparse.Namespace, temperature: float, generator: torch.Generator, clock) -> list[Played]:
    """Play one episode on each row, all side by side: one batched generation per turn over the episodes still alive.

    An episode whose prompt leaves no room for an answer within --max-context is dropped (not returned): a long prompt is never cut.
    """
    tokenizer = policy.tokenizer
    with clock("verify"):
        episodes = task.start(rows)
    played = [Played(number, episode, envs.prompt_ids(tokenizer, episode.prompt, args.thinking), [], [], []) for number, episode in enumerate(episodes)]
    for one in played:
        one.episode.ended = "dropped" if len(one.prefix) + args.max_new_tokens > args.max_context else ""
    played = [one for one in played if not one.episode.ended]
    lead = "<think>" if envs.opens_thinking(tokenizer, args.thinking) else ""  # else the judge would take unfinished thoughts for the answer
    alive = played
    while alive:
        with clock("rollout"):
            sampled, log_probs = sample(policy, [one.prefix + one.tokens for one in alive], args.max_new_tokens, temperature, generator)
        for one, ids, drawn in zip(alive, sampled, log_probs):
            one.tokens += ids
            one.action_mask += [1] * len(ids)
            one.log_probs += drawn
        finished = [ids[-1] in policy.eos_ids for ids in sampled]
        texts = [lead + tokenizer.decode(ids[:-1] if done else ids, skip_special_tokens=True) for ids, done in zip(sampled, finished)]
        with clock("verify"):
            messages = task.step([one.episode for one in alive], texts, finished)
        going = []
        for one, message in zip(alive, messages):
            if message is None:
                continue
            bridge = envs.bridge_ids(tokenizer, message, args.thinking, one.tokens[-1])
            if len(one.prefix) + len(one.tokens) + len(bridge) + args.max_new_tokens > args.max_context:
                one.episode.ended = "context"  # lost, counted, and trained like any other failure
                continue
            one.tokens += bridge
            one.action_mask += [0] * len(bridge)
            one.log_probs += [0.0] * len(bridge)
            going.append(one)
        alive = going
    return played


def no_room(which: str, args: argparse.Namespace) -> UserError:
    return UserError(f"{which} leaves room for {args.max_new_tokens} new tokens within --max-context {args.max_context}: "
                     "raise the one or lower --max-new-tokens")


def hindsight_ids(policy: Policy, task, one: Played, mode: str, success: bool, args: argparse.Namespace) -> list[int]:
    """Prefix of the hindsight view: the causal one's user message with what happened and the verdict."""
    happened = envs.strip_special(policy.tokenizer, task.happened(one.episode, mode))
    message = hindsight_prompt(one.episode.prompt, happened, success, task.check, mode)
    return envs.prompt_ids(policy.tokenizer, message, args.thinking)


# ------------------------------------------------------------------------------------------------------------------- credit and update

def microbatches(rollouts: list[Rollout], budget: int) -> list[list[int]]:
    """Indices of the rollouts, sorted by the length of their longest view and packed so that rows x longest row stays within `budget` tokens.

    A long rollout may stand alone above the budget. Sorting keeps padding small: a batch by count pays for its longest member in every row.
    """
    sizes = [max(map(len, (rollout.causal_prefix, rollout.hindsight_prefix, rollout.flipped_prefix))) + len(rollout.tokens) for rollout in rollouts]
    batches = [[]]
    for index in sorted(range(len(rollouts)), key=sizes.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * sizes[index] > budget:
            batches.append([])
        batches[-1].append(index)
    return batches


def pad(rows: list[list], device, dtype=torch.float32) -> torch.Tensor:
    """[N, T], zeros on the right."""
    width = max(map(len, rows))
    return torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], dtype=dtype, device=device)


def views(rollouts: list[Rollout]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Causal prefixes, hindsight prefixes and responses, as `view_hidden` takes them."""
    return [r.causal_prefix for r in rollouts], [r.hindsight_prefix for r in rollouts], [r.tokens for r in rollouts]


@torch.no_grad()
def score(policy: Policy, rollouts: list[Rollout], mask: torch.Tensor, args: argparse.Namespace, hidden: torch.Tensor | None = None):
    """Credit of one micro-batch: (credit, P(y), Q(y)), each [B, T]; mask [B, T]. surprisal needs no hindsight view: its Q(y) is zero.

    --contrast compares the hindsight views of both verdicts: what the two prompts share has no part in it. It needs no causal view: its P(y) is zero.
    `hidden`: the causal view's hidden states where the update has them already; else they cost one more forward pass.
    """
    causal, hindsight, responses = views(rollouts)
    tokens = pad(responses, policy.device, torch.long)
    with policy.autocast():
        if args.contrast:
            true, flipped = (view_hidden(policy.model, prefixes, responses) for prefixes in (hindsight, [r.flipped_prefix for r in rollouts]))
            credit, copied, _ = compare_views(true, flipped, policy.lm_head, tokens, mask, args.temperature)
            return credit, torch.zeros_like(credit), copied
        if hidden is None:
            hidden = view_hidden(policy.model, causal, responses)
        if args.algo == "surprisal":
            prob = token_log_probs(hidden, policy.lm_head, tokens, mask, args.temperature)[0].exp() * mask
            return surprisal_credit(prob) * mask, prob, torch.zeros_like(prob)
        return compare_views(hidden, view_hidden(policy.model, hindsight, responses), policy.lm_head, tokens, mask, args.temperature)


def advantages(algo: str, weight: torch.Tensor | None, mask: torch.Tensor, reward: torch.Tensor, baseline: float, group: torch.Tensor) -> torch.Tensor:
    """Per-token advantages [N, T]: the one place where the algorithms differ."""
    if algo in CREDITED:
        return hp_rlvr(weight, reward, baseline)
    if algo == "reinforce":
        return reinforce(mask, reward, baseline)
    return grpo(mask, reward, group)


def update(policy: Policy, optimizer, rollouts: list[Rollout], batches: list[list[int]], weigh, mask: torch.Tensor, args: argparse.Namespace,
           clock) -> dict:
    """One optimiser step over all micro-batches; a non-finite loss or gradient takes none. `weigh(batch, hidden)` gives the advantages [B, T] of
    a micro-batch from its causal hidden states. Returns grad_norm, skipped, entropy, and log P_t(y_t) as the loss saw it, [N, T]."""
    policy.model.train()  # only for activation checkpointing: there is no dropout
    normaliser, log_prob, entropy, total = mask.sum().item(), torch.zeros_like(mask), 0.0, 0.0
    for batch in batches:
        part = [rollouts[i] for i in batch]
        causal, _, responses = views(part)
        tokens, width = pad(responses, policy.device, torch.long), max(map(len, responses))
        with clock("update"), policy.autocast(cache=False):
            hidden = view_hidden(policy.model, causal, responses)
        with clock("credit"):
            advantage = weigh(batch, hidden.detach())
        with clock("update"):
            with policy.autocast(cache=False):
                logp, uncertainty = token_log_probs(hidden, policy.lm_head, tokens, mask[batch, :width], args.temperature)
            loss = policy_loss(logp, advantage, mask[batch, :width], normaliser)
            loss.backward()
            total += loss.item()
            log_prob[batch, :width] = logp.detach()
            entropy += uncertainty.sum().item() / normaliser
    policy.model.eval()
    with clock("update"):
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0).item()
        skipped = finite(total) is None or finite(norm) is None
        if not skipped:
            optimizer.step()  # also with a zero gradient: the momentum of earlier steps goes on, as in any AdamW loop
        optimizer.zero_grad(set_to_none=True)
    return dict(grad_norm=norm, skipped=skipped, entropy=entropy, log_prob=log_prob)


# -------------------------------------------------------------------------------------------------------------------------- evaluation

def evaluate(policy: Policy, task, rows: list[dict], args: argparse.Namespace) -> tuple[dict, list[Played]]:
    """Greedy and sampled accuracy on `rows`, and what the hindsight view makes of the sampled rollouts. Never touches the run's own RNG."""
    generator = torch.Generator(policy.device).manual_seed(args.seed + 1_000_003)
    clock = Clock()
    parts = [rows[start:start + 64] for start in range(0, len(rows), 64)]  # a long evaluation must not need more memory than a training step
    greedy = [one for part in parts for one in play(policy, task, part, args, 0.0, generator, clock)]
    if not greedy:
        raise no_room("no evaluation prompt", args)
    sampled = [one for part in parts for one in play(policy, task, part, args, args.temperature, generator, clock)]
    mean = lambda values: sum(values) / len(rows)  # a row whose prompt is too long counts as not solved
    metrics = dict(eval_accuracy=mean([one.episode.reward for one in greedy]), eval_accuracy_sampled=mean([one.episode.reward for one in sampled]),
                   eval_format=mean([float(task.well_formed(one.episode)) for one in sampled]), flip=None, credit_floor=None)
    if args.algo == "hp_rlvr":
        metrics |= verdict_diagnostics(policy, task, sampled[:64], args)
    return metrics, sampled


@torch.no_grad()
def verdict_diagnostics(policy: Policy, task, sampled: list[Played], args: argparse.Namespace) -> dict:
    """flip: mean JSD(Q | true verdict, Q | flipped verdict). credit_floor: mean credit under a hindsight text that says nothing."""
    rollouts = make_rollouts(policy, task, sampled, args)
    flip = floor = count = 0.0
    for batch in microbatches(rollouts, args.tokens_per_microbatch):
        part, responses = [rollouts[i] for i in batch], [rollouts[i].tokens for i in batch]
        mask = pad([rollout.action_mask for rollout in part], policy.device)
        flipped, null = ([hindsight_ids(policy, task, sampled[i], mode, rollouts[i].reward != 1, args) for i in batch] for mode in (args.hindsight, "null"))
        with policy.autocast():
            causal, true, flipped, null = (view_hidden(policy.model, prefixes, responses) for prefixes in (*views(part)[:2], flipped, null))
            flip += token_credit(true, flipped, policy.lm_head, mask, args.temperature).sum().item()
            floor += token_credit(causal, null, policy.lm_head, mask, args.temperature).sum().item()
        count += mask.sum().item()
    return dict(flip=flip / count, credit_floor=floor / count)


def make_rollouts(policy: Policy, task, played: list[Played], args: argparse.Namespace) -> list[Rollout]:
    def hindsight(one: Played, success: bool, wanted: bool) -> list[int]:
        return hindsight_ids(policy, task, one, args.hindsight, success, args) if wanted else []
    return [Rollout(one.prefix, hindsight(one, one.episode.reward == 1, args.algo == "hp_rlvr"), one.tokens, one.action_mask, one.episode.reward,
                    one.episode.truncated, one.number // args.group_size, hindsight(one, one.episode.reward != 1, args.contrast))
            for one in played]


# --------------------------------------------------------------------------------------------------- looking at rollouts with credit

@torch.no_grad()
def inspect(policy: Policy, task, played: list[Played], baseline: float, args: argparse.Namespace) -> list[dict]:
    """Per-token text, weight (signed by the advantage), and top-3 of each view, of up to four right and four wrong rollouts."""
    right = [one for one in played if one.episode.reward == 1][:4]
    wrong = [one for one in played if one.episode.reward == 0][:4]
    chosen = right + wrong
    rollouts = make_rollouts(policy, task, chosen, args)
    shown = []
    for one, rollout in zip(chosen, rollouts):
        mask = torch.tensor([rollout.action_mask], dtype=torch.float32, device=policy.device)
        credit = score(policy, [rollout], mask, args)[0] if args.algo in CREDITED else 0 * mask
        tops = []
        for prefix in filter(None, (rollout.causal_prefix, rollout.hindsight_prefix, rollout.flipped_prefix)):
            with policy.autocast():
                hidden = view_hidden(policy.model, [prefix], [rollout.tokens])[0]
                best = [log_law(part, policy.lm_head, args.temperature).exp().topk(3) for part in hidden.split(128)]
            tops.append([[(policy.tokenizer.decode([token]), value) for token, value in zip(tokens, values)]
                         for top in best for tokens, values in zip(top.indices.tolist(), top.values.tolist())])
        shown.append(dict(prompt=one.episode.prompt, reward=rollout.reward, advantage=rollout.reward - baseline, tops=tops,
                          tokens=[policy.tokenizer.decode([token]) for token in rollout.tokens], credit=credit[0].tolist(), mask=rollout.action_mask))
    return shown


def write_credit_html(path: Path, shown: list[dict], title: str) -> None:
    """One self-contained page: blue tokens were pushed up, red ones down, as deep as their credit; hover for each view's top three."""
    parts = []
    for one in shown:
        spans = []
        for index, (token, credit, generated) in enumerate(zip(one["tokens"], one["credit"], one["mask"])):
            hover = [f"credit {credit:.3f}"]
            for name, top in zip(("P, causal", "Q, hindsight", "Q, other verdict"), one["tops"]):
                hover.append(f"{name}: " + ", ".join(f"{text!r} {value:.3f}" for text, value in top[index]))
            colour = f"rgba({'40,110,255' if one['advantage'] > 0 else '235,60,40'},{min(1.0, credit):.3f})"
            style = f"background:{colour}" if generated else "opacity:.5"
            spans.append(f'<span style="{style}" title="{html.escape(chr(10).join(hover), quote=True)}">{html.escape(token)}</span>')
        verdict = "CORRECT" if one["reward"] == 1 else "INCORRECT"
        parts.append(f"<h2>{verdict}, R - b = {one['advantage']:+.3f}</h2><pre class=prompt>{html.escape(one['prompt'])}</pre><pre>{''.join(spans)}</pre>")
    style = ("body{font:15px/1.6 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
             "pre{white-space:pre-wrap;font:14px/1.8 ui-monospace,monospace}.prompt{opacity:.65}h2{font-size:1rem}")
    note = ("Each token is shaded by its credit: blue where the rollout was better than the baseline and the token is pushed up, red where it was "
            "worse and the token is pushed down. Hover over a token for its credit and the three likeliest tokens of each view. (grpo and "
            "reinforce give every token the same weight: nothing is shaded.)")
    write_atomically(path, f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
                           f"<h1>{html.escape(title)}</h1><p>{note}</p>{''.join(parts)}")


def shade(one: dict, colour: bool) -> str:
    """A rollout for the terminal: tokens on a background as deep as their credit, or, without colour, {+.31} after those above 0.05."""
    pieces = []
    for token, credit in zip(one["tokens"], one["credit"]):
        if credit < 0.05:
            pieces.append(token)
        elif colour:
            level = int(60 + 195 * min(1.0, credit))
            red, blue = (0, level) if one["advantage"] > 0 else (level, 0)
            pieces.append(f"\x1b[48;2;{red};30;{blue}m\x1b[97m{token}\x1b[0m")
        else:
            pieces.append(f"{token}{{{'+' if one['advantage'] > 0 else '-'}{credit:.2f}}}")
    return "".join(pieces)


# ------------------------------------------------------------------------------------------------------------------- files of the run

PHASES = dict(rollout="generated_tokens", verify=None, credit="scored_tokens", update="trained_tokens")  # of a step, with the tokens that each works on


class Clock:
    """Seconds by phase, summed until taken."""
    def __init__(self):
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels run behind: without this their time is charged to whoever waits next
        self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict:
        taken = {f"seconds_{phase}": round(seconds, 4) for phase, seconds in self.seconds.items()}
        self.__init__()
        return taken


def write_atomically(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)


def save_checkpoint(out: Path, state: dict) -> bool:
    """Write checkpoint/state.pt in one piece or not at all: a kill or a full disk in the middle leaves the last one as it was."""
    folder = out / "checkpoint"
    scratch = folder / "state.tmp"
    try:
        folder.mkdir(exist_ok=True)
        with open(scratch, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, folder / "state.pt")
        return True
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        scratch.unlink(missing_ok=True)
        tqdm.write(f"could not save the checkpoint ({str(error).splitlines()[0]}); the last one stays as it was", file=sys.stderr)
        return False


def save_model(out: Path, policy: Policy) -> bool:
    """model/: the policy in Hugging Face format, in the precision that it was trained in: rounding fp32 to bf16 would undo small steps."""
    scratch = out / "model.tmp"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        policy.model.save_pretrained(scratch)
        policy.tokenizer.save_pretrained(scratch)
        shutil.rmtree(out / "model", ignore_errors=True)
        os.replace(scratch, out / "model")
        return True
    except Exception as error:  # safetensors has an error of its own for a full disk
        shutil.rmtree(scratch, ignore_errors=True)
        tqdm.write(f"could not save the model ({str(error).splitlines()[0]})", file=sys.stderr)
        return False


def open_run(args: argparse.Namespace) -> Path:
    """Create the run's folder with config.json; a folder that already holds a run is never written into, unless it is resumed."""
    out = Path(args.out)
    try:
        if not args.resume and out.exists() and any(path.name != "config.json" for path in out.iterdir()):  # that file alone: a start that was refused
            raise UserError(f"--out {out} is not empty; name another folder, or continue the run in it with --resume {out}")
        out.mkdir(parents=True, exist_ok=True)
        write_config(out, args)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    return out


def write_config(out: Path, args: argparse.Namespace) -> None:
    """config.json: all flags, package versions, seed."""
    import datasets
    import tokenizers
    import transformers
    flags = {name: value for name, value in vars(args).items() if name != "resume"}
    versions = {module.__name__: module.__version__ for module in (torch, transformers, datasets, tokenizers)} | dict(python=sys.version.split()[0])
    write_atomically(out / "config.json", json.dumps(dict(flags=flags, versions=versions, seed=args.seed), indent=1) + "\n")


def peak_memory_gb(device) -> float:
    """Of the GPU since the start, or of this process."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
    import resource
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9, 3)


METRICS = ("step", "reward_mean", "baseline", "grad_norm", "zero_gradient", "homogeneous_groups", "credit_mean", "credit_top20_share", "copy",
           "prob_mean", "surprisal_corr", "entropy", "law_gap", "response_tokens_mean", "truncated", "verifier_failures", "prompts_dropped", "context_limit", "steps_skipped",
           "generated_tokens", "scored_tokens", "trained_tokens", "episode_turns_mean", "invalid_actions", "won", "seconds_rollout", "seconds_verify",
           "seconds_credit", "seconds_update", "peak_memory_gb")


class Prompts:
    """Training rows in a new seeded order every epoch, from any position: what --resume needs is one number."""
    def __init__(self, rows: list[dict], seed: int, position: int = 0):
        self.rows, self.seed, self.position = rows, seed, position

    def next(self, count: int) -> list[dict]:
        rows = []
        for position in range(self.position, self.position + count):
            epoch, place = divmod(position, len(self.rows))
            if place == 0 or position == self.position:
                order = list(range(len(self.rows)))
                random.Random(f"{self.seed}-{epoch}").shuffle(order)
            rows.append(self.rows[order[place]])
        self.position += count
        return rows


# ---------------------------------------------------------------------------------------------------------------------------- the loop

@dataclass
class Step:
    """One step's batch of N rollouts with what was computed on the way. Tensors are [N] or [N, T]."""
    played: list[Played]
    dropped: int                    # prompts too long
    rollouts: list[Rollout]
    reward: torch.Tensor
    group: torch.Tensor
    mask: torch.Tensor              # 1 on tokens that are trained
    baseline: float                 # from before this batch
    views: torch.Tensor             # [3, N, T]: c, P(y) and Q(y); zero where the algorithm has none
    scored_ahead: bool              # the causal view was scored once more, before the update
    update: dict | None             # of `update`; None where nothing was left to train on


def train_step(policy: Policy, optimizer, task, rows: list[dict], baseline: EMABaseline, generator: torch.Generator, args: argparse.Namespace,
               clock) -> Step:
    """Sample, verify, baseline, hindsight view, credit, advantage, loss, optimiser step."""
    # Sample one rollout for each prompt (grpo: a group of them). Verify: the task judges each turn as it is played.
    rows = [row for row in rows for _ in range(args.group_size)]
    played = play(policy, task, rows, args, args.temperature, generator, clock)
    if not played:
        raise no_room("no prompt of this step", args)
    with clock("credit"):
        rollouts = make_rollouts(policy, task, played, args)
    reward = torch.tensor([rollout.reward for rollout in rollouts], device=policy.device)
    group = torch.tensor([rollout.group for rollout in rollouts], device=policy.device)
    mask = pad([rollout.action_mask for rollout in rollouts], policy.device)
    if args.mask_truncated:
        mask *= 1 - torch.tensor([[float(rollout.truncated)] for rollout in rollouts], device=policy.device)
    batches = microbatches(rollouts, args.tokens_per_microbatch)

    # Baseline: the value from before this batch.
    before = baseline.value
    baseline.update(reward.mean().item())

    # Hindsight view and credit. A micro-batch is scored between its forward pass and its loss, from the hidden states that the loss uses too.
    # The scales `batch` and `mixed` need the credit of the whole batch before the first loss: then all is scored ahead, for one more forward pass.
    credit, prob, copied = scored = torch.zeros(3, *mask.shape, device=policy.device)

    def score_into(batch: list[int], hidden: torch.Tensor | None) -> None:
        part = [rollouts[i] for i in batch]
        width = max(len(rollout.tokens) for rollout in part)
        credit[batch, :width], prob[batch, :width], copied[batch, :width] = score(policy, part, mask[batch, :width], args, hidden)

    ahead = args.algo in CREDITED and args.credit_scale != "raw" and len(batches) > 1
    if ahead:
        with clock("credit"):
            for batch in batches:
                score_into(batch, None)

    # Advantage, loss, optimiser step. A batch with nothing to train on makes none.
    def weigh(batch: list[int], hidden: torch.Tensor) -> torch.Tensor:
        weight = None
        if args.algo in CREDITED:
            if not ahead:
                score_into(batch, hidden)
            weight = scale_credit(credit, mask, args.credit_scale)
        return advantages(args.algo, weight, mask, reward, before, group)[batch, :hidden.shape[1]]

    result = update(policy, optimizer, rollouts, batches, weigh, mask, args, clock) if mask.any() else None
    if args.contrast and result is not None:
        prob[:] = result["log_prob"].exp() * mask
    return Step(played, len(rows) - len(played), rollouts, reward, group, mask, before, scored, ahead and not args.contrast, result)


def step_metrics(one: Step, args: argparse.Namespace) -> dict:
    """What metrics.jsonl says of a step; null where a value is not defined."""
    episodes = [played.episode for played in one.played]
    count, trained, rollouts = len(episodes), one.mask.bool(), one.rollouts
    generated = sum(sum(played.action_mask) for played in one.played)
    causal_tokens = sum(len(rollout.causal_prefix) + len(rollout.tokens) for rollout in rollouts)
    hindsight_tokens = sum(len(prefix) + len(rollout.tokens) for rollout in rollouts for prefix in (rollout.hindsight_prefix, rollout.flipped_prefix) if prefix)
    metrics = dict.fromkeys(METRICS) | dict(
        reward_mean=one.reward.mean().item(), baseline=one.baseline, zero_gradient=one.update is None or one.update["grad_norm"] < 1e-12,
        response_tokens_mean=generated / count, generated_tokens=generated, scored_tokens=0, trained_tokens=0,
        truncated=sum(episode.truncated for episode in episodes) / count, prompts_dropped=one.dropped,
        context_limit=sum(episode.ended == "context" for episode in episodes), verifier_failures=sum(episode.judge_failed for episode in episodes),
        episode_turns_mean=sum(len(episode.responses) for episode in episodes) / count, won=sum(episode.reward == 1 for episode in episodes),
        invalid_actions=sum(episode.invalid_actions for episode in episodes))
    if args.algo == "grpo":
        metrics["homogeneous_groups"] = homogeneous_groups(one.reward, one.group)
    if one.update is not None:
        log_prob, drawn = one.update["log_prob"][trained], pad([played.log_probs for played in one.played], one.mask.device)[trained]
        metrics |= dict(grad_norm=finite(one.update["grad_norm"]), entropy=finite(one.update["entropy"]), prob_mean=finite(log_prob.exp().mean().item()),
                        law_gap=finite((log_prob - drawn).abs().mean().item()), trained_tokens=causal_tokens,
                        scored_tokens=hindsight_tokens + causal_tokens * one.scored_ahead)
    if one.update is not None and args.algo in CREDITED:
        credit, prob, copied = one.views[:, trained]
        metrics |= dict(credit_mean=finite(credit.mean().item()), credit_top20_share=top_share(credit), surprisal_corr=pearson(credit, surprisal_credit(prob)),
                        copy=finite(copied.mean().item()) if args.algo == "hp_rlvr" else None)
    return metrics


def train(args: argparse.Namespace, task, out: Path) -> int:
    """The whole run; returns the exit code."""
    torch.manual_seed(args.seed)
    policy = load_policy(args, task, out)
    write_config(out, args)  # again: --max-context is known now
    optimizer = make_optimizer(policy, args)
    baseline = EMABaseline(args.baseline_decay)
    generator = torch.Generator(policy.device).manual_seed(args.seed)
    prompts = Prompts(task.train, args.seed)
    done = skipped = bad_in_a_row = 0
    if args.resume:
        done, skipped = restore(out, policy, optimizer, baseline, generator, prompts, args)
    last = ([line for line in read_metrics(out) if "eval_accuracy" in line] or [{}])[-1]  # of the run so far: what the bar and `warn` refer to
    shown, warned, accuracy, floor = [], False, last.get("eval_accuracy_sampled", 0.0), last.get("credit_floor")

    def evaluation(step: int) -> dict:
        nonlocal shown, accuracy, floor
        metrics, sampled = evaluate(policy, task, task.test[:args.eval_size], args)
        accuracy, floor = metrics["eval_accuracy_sampled"], metrics["credit_floor"]
        shown = inspect(policy, task, sampled, baseline.value, args)
        write_credit_html(out / "credit.html", shown, f"{args.task}, {args.algo}, after step {step}")
        return metrics

    if done == 0:
        append(out / "metrics.jsonl", dict.fromkeys(METRICS) | dict(step=0) | evaluation(0))
    stop, clock, saved = Interrupt(), Clock(), True
    bar = tqdm(range(done + 1, args.steps + 1), initial=done, total=args.steps, unit="step", mininterval=0.5)
    for step in bar:
        rows = prompts.next(args.prompts_per_step)
        one = train_step(policy, optimizer, task, rows, baseline, generator, args, clock)

        bad = one.update is not None and one.update["skipped"]
        bad_in_a_row = bad_in_a_row + 1 if bad else 0
        skipped += bad or one.update is None
        metrics = step_metrics(one, args) | clock.take() | dict(step=step, steps_skipped=skipped, peak_memory_gb=peak_memory_gb(policy.device))
        if step == args.steps or args.eval_every and step % args.eval_every == 0:
            metrics |= evaluation(step)
        append(out / "metrics.jsonl", metrics)
        bar.set_description(f"reward {metrics['reward_mean']:.2f}  accuracy {accuracy:.2f}")
        if args.algo == "hp_rlvr" and not args.contrast and not warned:
            warned = warn(metrics, floor)
        if bad_in_a_row == 3:
            print("train.py: the loss or the gradient was not finite in three steps in a row: look at --lr, --dtype fp32 and the model's own weights",
                  file=sys.stderr)
            return 1
        if step == args.steps or stop.requested or args.save_every and step % args.save_every == 0:
            saved = save_checkpoint(out, dict(step=step, model=policy.model.state_dict(), optimizer=optimizer.state_dict(), baseline=baseline.value,
                                              generator=generator.get_state(), torch_rng=torch.get_rng_state(),
                                              cuda_rng=torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [], position=prompts.position, skipped=skipped))
        if stop.requested:
            break
    bar.close()
    if not (save_model(out, policy) and saved):
        return 2
    report(args, out, shown, min(args.eval_size, len(task.test)))
    if stop.requested:
        print(f"interrupted: saved; go on with: python train.py --resume {out}")
    return 130 if stop.requested else 0


def restore(out: Path, policy: Policy, optimizer, baseline: EMABaseline, generator: torch.Generator, prompts: Prompts,
            args: argparse.Namespace) -> tuple[int, int]:
    """Load checkpoint/state.pt into everything that moves, and cut metrics.jsonl back to its step: (steps done, steps skipped)."""
    try:
        saved = torch.load(out / "checkpoint" / "state.pt", map_location="cpu", weights_only=True)
    except FileNotFoundError:
        print(f"{out} was stopped before its first checkpoint: starting at step 1")
        write_atomically(out / "metrics.jsonl", "")
        return 0, 0
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        raise UserError(f"--resume {out}: its checkpoint/state.pt is damaged") from None
    policy.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    baseline.value, prompts.position = saved["baseline"], saved["position"]
    try:
        generator.set_state(saved["generator"])
    except RuntimeError:
        generator.manual_seed(args.seed + saved["step"])
        print("saved on another kind of device: sampling goes on with a new generator, so the run is not the uninterrupted one", file=sys.stderr)
    torch.set_rng_state(saved["torch_rng"])
    if len(saved["cuda_rng"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(saved["cuda_rng"])
    kept = [line for line in read_metrics(out) if line["step"] <= saved["step"]]
    write_atomically(out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    return saved["step"], saved["skipped"]


class Interrupt:
    """The first Ctrl-C asks the loop to stop after this step and save; the second one ends the program at once."""
    def __init__(self):
        self.requested = False
        signal.signal(signal.SIGINT, self.on_signal)

    def on_signal(self, *_):
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        tqdm.write("interrupted: finishing this step, then saving (Ctrl-C again to stop at once)", file=sys.stderr)


def append(path: Path, metrics: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(metrics, allow_nan=False) + "\n")


def read_metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl; one that was cut off by a kill is left out."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None  # NaN fails the comparison too


def warn(metrics: dict, floor: float | None) -> bool:
    """Say once when the credit is not what the method claims it to be."""
    if metrics["surprisal_corr"] is not None and metrics["surprisal_corr"] > 0.9:
        tqdm.write(f"note: credit correlates {metrics['surprisal_corr']:.2f} with plain surprisal: this model's hindsight view copies the attempt, "
                   "and --algo surprisal gives nearly the same weights without a hindsight pass", file=sys.stderr)
        return True
    if metrics["credit_mean"] is not None and floor and metrics["credit_mean"] < 2 * floor:
        tqdm.write(f"note: mean credit {metrics['credit_mean']:.4f} is near its floor {floor:.4f}, what any change of prompt does: "
                   "the hindsight view says little here", file=sys.stderr)
        return True
    return False


def report(args: argparse.Namespace, out: Path, shown: list[dict], held_out: int) -> None:
    """What happened, in a few lines, with one right and one wrong rollout."""
    for word, reward in (("CORRECT", 1), ("INCORRECT", 0)):
        for one in [one for one in shown if one["reward"] == reward][:1]:
            print(f"\n{word} (R - b = {one['advantage']:+.2f}), tokens by credit:\n{shade(one, sys.stdout.isatty())}")
    lines = read_metrics(out)
    evaluations = [line for line in lines if "eval_accuracy" in line]
    first, last = evaluations[0], evaluations[-1]
    print(f"\n{args.algo} on {args.task}, {held_out} held-out rows, step {first['step']} -> {last['step']}: sampled accuracy "
          f"{first['eval_accuracy_sampled']:.3f} -> {last['eval_accuracy_sampled']:.3f}, greedy {first['eval_accuracy']:.3f} -> {last['eval_accuracy']:.3f}")
    total = lambda name: sum(line[name] or 0 for line in lines)
    whole = sum(total(f"seconds_{phase}") for phase in PHASES) or 1.0
    print(f"\n{'':8}{'seconds':>9}{'share':>7}{'tokens':>13}{'tokens/s':>10}")
    for phase, tokens in PHASES.items():
        seconds = total(f"seconds_{phase}")
        counts = f"{total(tokens):13,}{total(tokens) / seconds:10,.0f}" if tokens and seconds else ""
        print(f"{phase:8}{seconds:9.1f}{seconds / whole:7.0%}{counts}")
    print(f"in {out}: metrics.jsonl, credit.html, checkpoint/ (--resume {out}), model/ (--model {out / 'model'})")


def main(argv: list[str] | None = None) -> int:
    task = None
    try:
        args = parse_args(argv)
        task = make_task(args)
        return train(args, task, open_run(args))
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except torch.cuda.OutOfMemoryError:
        print("train.py: out of GPU memory: lower --tokens-per-microbatch (forward and backward), or --prompts-per-step, --group-size or "
              "--max-new-tokens (the cache while sampling), or take --optimizer adamw8bit; go on from the last checkpoint with --resume", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"train.py: cannot write: {error.strerror}; what was saved stays as it was, go on with --resume once there is room", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train.py: interrupted; what was not in a checkpoint is lost", file=sys.stderr)
        return 130
    finally:
        if task is not None:
            task.close()


if __name__ == "__main__":
    sys.exit(main())
