"""What the evidence in README needs beside train.py: controls that are no flags, and measurements on finished runs.

    python assets/evidence.py shuffle [train.py's flags]     credit shuffled within each response: same sizes, wrong places
    python assets/evidence.py contrast [flags]               credit JSD(Q | true verdict, Q | flipped verdict): what the verdict alone contributes
    python assets/evidence.py failures [flags]               credit on failures only, weight 1 on successes
    python assets/evidence.py pass8 RUN                      pass@1 and pass@8 of RUN's model on 100 held-out rows, into RUN/pass8.json
"""
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from hp_rlvr import token_credit, view_hidden  # noqa: E402


def shuffle() -> None:
    scale_credit = train.scale_credit

    def shuffled(credit, mask, scale):
        weight = scale_credit(credit, mask, scale)
        for row, places in enumerate(map(torch.nonzero, mask)):
            weight[row, places[:, 0]] = weight[row, places[torch.randperm(len(places)), 0]]
        return weight
    train.scale_credit = shuffled


def contrast() -> None:
    make_rollouts, score = train.make_rollouts, train.score

    def with_flipped(policy, task, played, args):
        rollouts = make_rollouts(policy, task, played, args)
        for one, rollout in zip(played, rollouts):
            rollout.flipped_prefix = train.hindsight_ids(policy, task, one, args.hindsight, rollout.reward != 1, args)
        return rollouts

    @torch.no_grad()
    def between_verdicts(policy, rollouts, mask, args, hidden=None):
        _, prob, copied = score(policy, rollouts, mask, args, hidden)
        _, hindsight, responses = train.views(rollouts)
        with policy.autocast():
            true, flipped = (view_hidden(policy.model, prefixes, responses) for prefixes in (hindsight, [one.flipped_prefix for one in rollouts]))
            return token_credit(true, flipped, policy.lm_head, mask, args.temperature), prob, copied
    train.make_rollouts, train.score = with_flipped, between_verdicts


def failures() -> None:
    advantages = train.advantages

    def on_failures(algo, weight, mask, reward, baseline, group):
        return advantages(algo, torch.where(reward[:, None] == 1, mask, weight), mask, reward, baseline, group)
    train.advantages = on_failures


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


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "pass8":
        pass8(*rest)
    else:
        dict(shuffle=shuffle, contrast=contrast, failures=failures)[what]()
        sys.exit(train.main(rest))
