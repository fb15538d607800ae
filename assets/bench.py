"""What things cost, compared in turn in one process; flags are train.py's: --model ... --task gsm8k --data ... --prompts-per-step 4 --max-new-tokens 64

    python assets/bench.py steps ROUNDS [flags]      a step of HP-RLVR in one pass and in two, of REINFORCE and of GRPO, on the same prompts
    python assets/bench.py rollout ROUNDS [flags]    our sampling loop beside transformers' three, with the gap of each between the law that it
                                                     sampled and the law that is scored
"""
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from hp_rlvr import EMABaseline, token_log_probs, view_hidden  # noqa: E402

ARMS = {"hp_rlvr, raw": ["--credit-scale", "raw"], "hp_rlvr": [], "reinforce": ["--algo", "reinforce"], "grpo, 8 rollouts": ["--algo", "grpo"]}


def peak_reset() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # what getrusage says of the process starts again from here


def load(args):
    task = train.make_task(args)
    torch.manual_seed(args.seed)
    return task, train.load_policy(args, task, Path(tempfile.mkdtemp()))


def steps(rounds: str, *flags: str) -> None:
    arms = {name: train.parse_args([*flags, *extra]) for name, extra in ARMS.items()}
    args = arms["hp_rlvr"]
    task, policy = load(args)
    optimizer = train.make_optimizer(policy, args)
    prompts, found = train.Prompts(task.train, args.seed), {name: [] for name in arms}
    for turn in range(int(rounds) + 1):  # the first turn fills caches and the optimiser's state, and is left out
        rows = prompts.next(args.prompts_per_step)
        for name, arm in arms.items():
            arm.max_context = args.max_context
            clock, generator = train.Clock(), torch.Generator(policy.device).manual_seed(turn)
            peak_reset()
            metrics = train.step_metrics(train.train_step(policy, optimizer, task, rows, EMABaseline(0.9), generator, arm, clock), arm)
            if turn:
                found[name].append(metrics | clock.take() | dict(peak=train.peak_memory_gb(policy.device)))
    task.close()
    mean = lambda name, key: statistics.mean(one[key] for one in found[name])
    whole = lambda one: sum(one[f"seconds_{phase}"] for phase in train.PHASES)
    ratios = lambda name: sorted(whole(one) / whole(grpo) for one, grpo in zip(found[name], found["grpo, 8 rollouts"]))
    print("| | " + " | ".join([f"{phase}, s" for phase in train.PHASES if phase != "verify"]) + " | a step, of GRPO's (each round) | tokens generated "
          "| scored without gradient | trained | peak GB |\n" + "|---" * 9 + "|")
    for name in found:
        print(f"| {name} | " + " | ".join(f"{mean(name, f'seconds_{phase}'):.1f}" for phase in train.PHASES if phase != "verify") +
              f" | {' '.join(f'{ratio:.2f}' for ratio in ratios(name))} | {mean(name, 'generated_tokens'):,.0f} | {mean(name, 'scored_tokens'):,.0f} "
              f"| {mean(name, 'trained_tokens'):,.0f} | {max(one['peak'] for one in found[name]):.1f} |")


def plain_sampling(policy, new_tokens: int, temperature: float, **settings):
    """A generation config that gives everything that a checkpoint's own could change."""
    from transformers import GenerationConfig
    return GenerationConfig(do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=new_tokens, eos_token_id=sorted(policy.eos_ids),
                            pad_token_id=min(policy.eos_ids), **settings)


def generated(policy, prompts: list[list[int]], new_tokens: int, temperature: float, **settings):
    """Responses and the log-probabilities of their tokens when drawn, by `generate`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=policy.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=policy.device)
    config = plain_sampling(policy, new_tokens, temperature, return_dict_in_generate=True, output_scores=True, **settings)
    with policy.autocast():
        result = policy.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    drawn = torch.stack([scores.float().log_softmax(-1).gather(1, token[:, None])[:, 0] for scores, token in zip(result.scores, result.sequences[:, width:].T)], 1)
    responses = []
    for row in result.sequences[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in policy.eos_ids), len(row) - 1)
        responses.append(row[:end + 1])
    return responses, [row[:len(response)] for row, response in zip(drawn.tolist(), responses)]


def batched(policy, prompts: list[list[int]], new_tokens: int, temperature: float):
    """The same by transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig
    config = plain_sampling(policy, new_tokens, temperature)
    room = dict() if torch.cuda.is_available() else dict(max_memory_percent=0.1)  # of what is free: its default takes all that a CPU has
    with policy.autocast():
        result = policy.model.generate_batch(prompts, generation_config=config, continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, **room))
    rows = [result[name] for name in sorted(result, key=lambda name: int(name.split("_")[-1]))]
    return [row.generated_tokens for row in rows], [row.logprobs for row in rows]


@torch.no_grad()
def rollout(rounds: str, *flags: str) -> None:
    args = train.parse_args(list(flags))
    task, policy = load(args)
    batch, found = train.Prompts(task.train, args.seed), {}
    for turn in range(int(rounds) + 1):
        prompts = [train.envs.prompt_ids(policy.tokenizer, row["prompt"], args.thinking) for row in batch.next(args.prompts_per_step)]
        generator = torch.Generator(policy.device).manual_seed(turn)
        size = (policy, prompts, args.max_new_tokens, args.temperature)
        for name, path in {"this program": lambda: train.sample(*size, generator), "generate, dynamic cache": lambda: generated(*size),
                           "generate, static cache": lambda: generated(*size, cache_implementation="static"), "generate_batch": lambda: batched(*size)}.items():
            start = time.perf_counter()
            responses, drawn = path()
            seconds = time.perf_counter() - start
            tokens, mask = train.pad(responses, policy.device, torch.long), train.pad([[1] * len(one) for one in responses], policy.device)
            with policy.autocast():
                scored, _ = token_log_probs(view_hidden(policy.model, prompts, responses), policy.lm_head, tokens, mask, args.temperature)
            gap = ((scored - train.pad(drawn, policy.device)).abs() * mask).max().item()
            if turn:
                found.setdefault(name, []).append((mask.sum().item() / seconds, gap))
    print("| path | tokens/s, of this program's (each round) | largest difference of log-probabilities, drawn and scored |\n|---|---|---|")
    for name, ours in found.items():
        ratios = sorted(speed / own for (speed, _), (own, _) in zip(ours, found["this program"]))
        print(f"| {name} | {' '.join(f'{ratio:.2f}' for ratio in ratios)} | {max(gap for _, gap in ours):.1e} |")


if __name__ == "__main__":
    dict(steps=steps, rollout=rollout)[sys.argv[1]](*sys.argv[2:])
