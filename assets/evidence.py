"""What the evidence in README needs beside train.py: controls that are no flags, and measurements on finished runs.

    python assets/evidence.py shuffle [train.py's flags]     credit shuffled within each response: same sizes, wrong places
    python assets/evidence.py failures [flags]               credit on failures only, weight 1 on successes
    python assets/evidence.py capped [flags]                 with --credit-scale batch: credit cut at five times its mean; uncapped: divided by its mean, not cut
    python assets/evidence.py unit [flags]                   every gradient brought to one length, so that AdamW's memory of longer ones cannot shorten a step
    python assets/evidence.py beta [flags]                   AdamW's second moments forgotten after some ten steps: betas 0.9, 0.9
    python assets/evidence.py frozen [flags]                 credit scored by the weights that the run began with
    python assets/evidence.py unit+frozen [flags]            several of these at once; shuffle comes last
    python assets/evidence.py copying [flags]                sums, by a policy whose warm-up taught the hindsight view to repeat the attempt
    python assets/evidence.py pass8 RUN                      pass@1 and pass@8 of RUN's model on 100 held-out rows, into RUN/pass8.json
    python assets/evidence.py table "ARM=RUN,RUN" ...        the rows of README's tables: mean and standard deviation over an arm's runs
    python assets/evidence.py place RUN [tiny]               where credit falls in 256 rollouts of sums by RUN's model (or its tiny/), into RUN/place-*.json
    python assets/evidence.py drift RUN [tiny]               what the update holds that no reward put there, by scale, over 64 batches, into RUN/drift-*.json
"""
import copy
import functools
import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs  # noqa: E402
import train  # noqa: E402
from hp_rlvr import scale_credit, surprisal_credit, token_credit, token_log_probs, view_hidden  # noqa: E402


def shuffle() -> None:
    scale_credit = train.scale_credit

    def shuffled(credit, mask, scale):
        weight = scale_credit(credit, mask, scale)
        for row, places in enumerate(map(torch.nonzero, mask)):
            weight[row, places[:, 0]] = weight[row, places[torch.randperm(len(places)), 0]]
        return weight
    train.scale_credit = shuffled


def capped() -> None:
    train.scale_credit = lambda credit, mask, scale: torch.minimum(credit, 5 * mean_credit(credit, mask, scale)) * mask


def uncapped() -> None:
    train.scale_credit = lambda credit, mask, scale: credit / mean_credit(credit, mask, scale).clamp(min=1e-3) * mask


def mean_credit(credit, mask, scale):
    if scale == "raw":
        raise SystemExit("capped and uncapped need --credit-scale batch: raw never has the credit of the whole batch at once")
    return (credit * mask).sum() / mask.sum()


def unit() -> None:
    def shorten(optimizer, *_):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-6)  # below any gradient seen here, far above the eps of 1e-15
    change_optimizer(lambda optimizer: optimizer.register_step_pre_hook(shorten))


def beta() -> None:
    change_optimizer(lambda optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.9)))


def change_optimizer(change) -> None:
    make_optimizer = train.make_optimizer

    def changed(policy, args):
        optimizer = make_optimizer(policy, args)
        change(optimizer)
        return optimizer
    train.make_optimizer = changed


def frozen() -> None:
    score, first = train.score, []

    def by_first(policy, rollouts, mask, args, hidden=None):
        first or first.append(copy.deepcopy(policy))
        return score(first[0], rollouts, mask, args)
    train.score = by_first


def failures() -> None:
    advantages = train.advantages

    def on_failures(algo, weight, mask, reward, baseline, group):
        return advantages(algo, torch.where(reward[:, None] == 1, mask, weight), mask, reward, baseline, group)
    train.advantages = on_failures


def copying() -> None:
    demonstration = envs.Sums.demonstration

    def repeated(self, rng, view, hindsight_prompt):
        shown = []
        [(message, answer)] = demonstration(self, rng, view, lambda *arguments: shown.append(arguments[1]) or hindsight_prompt(*arguments))
        return [(message, shown[0] if view == "attempt" else answer)]
    envs.Sums.demonstration = repeated
    envs.VIEWS = ("causal", "null", "attempt", "attempt")
    envs.tiny_policy = functools.partial(envs.tiny_policy, steps=1200)  # wording is copied word by word from about the 900th on


def load(run: str, model: str = "model"):
    """(args, task, policy) of a finished run."""
    args = train.parse_args(["--resume", run])
    args.model = str(Path(run, model))
    task = train.make_task(args)
    return args, task, train.load_policy(args, task, Path(run))


def pass8(run: str) -> None:
    args, task, policy = load(run)
    rows = [row for row in task.test[:100] for _ in range(8)]
    played = train.play(policy, task, rows, args, args.temperature, torch.Generator(policy.device).manual_seed(8), train.Clock())
    right = torch.tensor([one.episode.reward for one in played]).view(-1, 8)
    Path(run, "pass8.json").write_text(json.dumps({"pass@1": right.mean().item(), "pass@8": right.amax(1).mean().item()}))


def table(*arms: str) -> None:
    """Seconds are those of all steps, as a ratio to the run of the same place in the last arm named. nan: RUN/pass8.json is not there."""
    def summary(run: str) -> dict:
        before, *steps = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        total = lambda *keys: sum(step[key] or 0 for step in steps for key in keys)
        eight = Path(run, "pass8.json")
        return dict(reward=total("reward_mean") / len(steps), sampled=steps[-1]["eval_accuracy_sampled"], greedy=steps[-1]["eval_accuracy"],
                    pass8=json.loads(eight.read_text())["pass@8"] if eight.exists() else float("nan"), entropy=sum(step["entropy"] for step in steps[-10:]) / 10,
                    length=sum(step["response_tokens_mean"] for step in steps[-10:]) / 10,
                    homogeneous=float("nan") if steps[0]["homogeneous_groups"] is None else total("homogeneous_groups") / len(steps),
                    zero=total("zero_gradient"), tokens=[round(total(key) / 1000) for key in ("generated_tokens", "scored_tokens", "trained_tokens")],
                    seconds=total("seconds_rollout", "seconds_verify", "seconds_credit", "seconds_update"))
    found = {name: [summary(run) for run in runs.split(",")] for name, runs in (arm.split("=") for arm in arms)}
    *_, control = found.values()
    print("| arm | seeds | reward, all steps | sampled, after | greedy, after | pass@8 | entropy | length | homogeneous groups | steps without gradient "
          "| thousand tokens sampled + scored + trained | seconds |\n" + "|---" * 12 + "|")
    for name, rows in found.items():
        column = lambda key: torch.tensor([row[key] for row in rows], dtype=torch.float64)
        spread = lambda values, digits: f"{values.mean():.{digits}f}" + (f" ({values.std():.{digits}f})" if len(values) > 1 else "")
        ratio = torch.tensor([row["seconds"] / other["seconds"] for row, other in zip(rows, control)])
        print(f"| {name} | {len(rows)} | " + " | ".join(spread(column(key), 3) for key in ("reward", "sampled", "greedy", "pass8"))
              + f" | {spread(column('entropy'), 2)} | {column('length').mean():.0f} | {column('homogeneous').mean():.0%} | {column('zero').mean():.0f} | "
              + " + ".join(f"{sum(part) / len(part):.0f}" for part in zip(*(row["tokens"] for row in rows))) + f" | {spread(ratio, 2)} |")


def rollouts_of(args, task, policy, rows: list[dict], seed: int):
    """What was played on `rows`, and the rollouts with both views."""
    played = train.play(policy, task, rows, args, args.temperature, torch.Generator(policy.device).manual_seed(seed), train.Clock())
    return played, train.make_rollouts(policy, task, played, args)


KINDS = ("taken", "dropped", "wording", "rest")
CARRY = re.compile(r"=(\d+), (\w+) (\w+) \d (\w+) carry (\d)\.")


def kinds(text: str, ends: list[int]) -> list[str]:
    """The kind of each token of a worked addition: a carry that was taken or dropped, free wording (the decoy: rare and harmless), or the rest."""
    found = {}
    for line in CARRY.finditer(text):
        found |= {line.start(word): "wording" for word in (2, 3, 4)}
        if int(line[1]) >= 10:
            found[line.start(5)] = "dropped" if line[5] == "0" else "taken"
    found |= {line.start(word): "wording" for line in re.finditer(r"=\d+, (\w+) (\w+) \d+\.$", text, re.MULTILINE) for word in (1, 2)}
    return [next((found[place] for place in range(start, end) if place in found), "rest") for start, end in zip([0, *ends], ends)]


def auc(scores: torch.Tensor, chosen: torch.Tensor, among: torch.Tensor) -> float | None:
    """Chance that a chosen token scores higher than one of `among`, ties half."""
    one, other = scores[chosen][:, None], scores[among][None]
    return ((one > other).float().mean() + (one == other).float().mean() / 2).item() if one.numel() and other.numel() else None


@torch.no_grad()
def place(run: str, model: str = "model") -> None:
    args, task, policy = load(run, model)
    args.algo, args.contrast = "hp_rlvr", False
    torch.manual_seed(args.seed)
    columns = {name: [] for name in ("credit", "surprisal", "entropy", "random", "flip", "kind", "right", "after")}
    outcomes = dict.fromkeys(("right", "dropped a carry", "another mistake"), 0)
    for start in range(0, 256, 64):
        played, rollouts = rollouts_of(args, task, policy, task.test[start:start + 64], start)
        for one, rollout in zip(played, rollouts):
            text = one.episode.responses[0]
            kind = kinds(text, [len(policy.tokenizer.decode(rollout.tokens[:count + 1])) for count in range(len(rollout.tokens))])
            right = rollout.reward == 1
            outcomes["right" if right else "dropped a carry" if "dropped" in kind else "another mistake"] += 1
            if right == ("dropped" in kind):
                continue  # nothing is known of where it went wrong
            mask = torch.ones(1, len(kind))
            causal, true, flipped = (view_hidden(policy.model, [prefix], [rollout.tokens]) for prefix in (
                rollout.causal_prefix, rollout.hindsight_prefix, train.hindsight_ids(policy, task, one, args.hindsight, not right, args)))
            log_prob, entropy = token_log_probs(causal, policy.lm_head, torch.tensor([rollout.tokens]), mask, args.temperature)
            first = kind.index("dropped") if "dropped" in kind else len(kind)
            new = dict(credit=token_credit(causal, true, policy.lm_head, mask)[0].tolist(), surprisal=surprisal_credit(log_prob.exp())[0].tolist(),
                       entropy=entropy[0].tolist(), random=torch.rand(len(kind)).tolist(), flip=token_credit(true, flipped, policy.lm_head, mask)[0].tolist(),
                       kind=kind, right=[right] * len(kind), after=[place > first for place in range(len(kind))])
            for name in columns:
                columns[name] += new[name]
    kind, right, after = columns.pop("kind"), torch.tensor(columns.pop("right")), torch.tensor(columns.pop("after"))
    score = {name: torch.tensor(values) for name, values in columns.items()}
    at = lambda *names: torch.tensor([one in names for one in kind])
    decisive = {"right": at("taken") & right, "wrong": at("dropped") & ~right}
    whose = {"right": right, "wrong": ~right}
    result = dict(outcomes=outcomes, tokens={name: int(at(name).sum()) for name in KINDS},
                  credit_by_kind={f"{word} {name}": score["credit"][at(name) & whose[word]].mean().item() for word in whose
                                  for name in KINDS if (at(name) & whose[word]).any()},
                  flip_by_kind={name: score["flip"][at(name)].mean().item() for name in KINDS if at(name).any()},
                  auc={f"{name}, {word}": [auc(score[name], decisive[word], whose[word] & ~at("taken", "dropped")), auc(score[name], decisive[word], whose[word] & at("wording"))]
                       for name in ("credit", "surprisal", "entropy", "flip", "random") for word in whose},
                  after_mistake=dict(tokens=after[~right].float().mean().item(), credit=(score["credit"][after].sum() / score["credit"][~right].sum()).item()) if after.any() else None,
                  from_surprisal=dict(mean=(score["credit"] - score["surprisal"]).abs().mean().item(), most=(score["credit"] - score["surprisal"]).abs().max().item()))
    Path(run, f"place-{model}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def drift(run: str, model: str = "model", batches: int = 64, size: int = 16) -> None:
    """Squared norms of E[w grad log pi], which no reward put there, and of E[w (R - b) grad log pi], what is meant, b the mean reward; w the credit
    at each scale, and 1, for which the first is zero."""
    args, task, policy = load(run, model)
    args.algo, args.contrast = "hp_rlvr", False
    weights = dict(raw=lambda credit, mask: credit, batch=lambda credit, mask: scale_credit(credit, mask, "batch"),
                   mixed=lambda credit, mask: scale_credit(credit, mask, "mixed"), uniform=lambda credit, mask: mask)
    collected = {name + part: [] for name in weights for part in ("", " A")}
    rewards, numbers = [], range(batches)
    work = []
    for number in numbers:
        rows = [task.train[(number * size + place) % len(task.train)] for place in range(size)]
        work.append(rollouts_of(args, task, policy, rows, number)[1])
        rewards += [rollout.reward for rollout in work[-1]]
    baseline = sum(rewards) / len(rewards)
    normaliser = sum(len(rollout.tokens) for rollouts in work for rollout in rollouts) / batches  # a constant: a batch's own count would bias it
    for rollouts in work:
        causal, _, responses = train.views(rollouts)
        mask, tokens = train.pad([[1] * len(one) for one in responses], policy.device), train.pad(responses, policy.device, torch.long)
        hidden = view_hidden(policy.model, causal, responses)
        credit, _, _ = train.score(policy, rollouts, mask, args, hidden.detach())
        log_prob, _ = token_log_probs(hidden, policy.lm_head, tokens, mask, args.temperature)
        advantage = torch.tensor([[rollout.reward - baseline] for rollout in rollouts])
        for name, weigh in weights.items():
            weight = weigh(credit, mask)
            for part, factor in (("", 1), (" A", advantage)):
                gradient = torch.autograd.grad((weight * factor * log_prob * mask).sum() / normaliser, list(policy.model.parameters()), retain_graph=True)
                collected[name + part].append(torch.cat([one.flatten() for one in gradient]))
    result = dict(reward=baseline)
    for name, gradients in collected.items():
        stacked = torch.stack(gradients)
        gram = stacked @ stacked.T

        def squared(kept):  # unbiased for the squared norm of the mean: products of different batches alone
            part = gram[kept][:, kept]
            return ((part.sum() - part.trace()) / (len(kept) * (len(kept) - 1))).item()
        whole = squared(list(numbers))
        left = torch.tensor([squared([other for other in numbers if other != number]) for number in numbers])
        result[name] = dict(squared_norm_of_mean=whole, standard_error=((batches - 1) * left.var(unbiased=False)).sqrt().item(),
                            mean_squared_norm=(gram.trace() / batches).item())
    Path(run, f"drift-{model}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what in ("pass8", "table", "place", "drift"):
        globals()[what](*rest)
    else:
        variants = what.split("+")
        if "--resume" in rest or "--algo" in rest and not {"unit", "beta", "copying"}.issuperset(variants):
            sys.exit("evidence.py: no --resume (a run would go on as another), and --algo with unit, beta and copying alone: the others change credit")
        for variant in variants:
            dict(shuffle=shuffle, capped=capped, uncapped=uncapped, unit=unit, beta=beta, frozen=frozen, failures=failures, copying=copying)[variant]()
        sys.exit(train.main(rest))
