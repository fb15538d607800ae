"""What a step costs: HP-RLVR, its two-pass scales, REINFORCE and GRPO, one step of each in turn on the same prompts, in one process.

    python assets/bench.py ROUNDS [train.py's flags: --model ... --task gsm8k --data ... --prompts-per-step 4 --max-new-tokens 64]
"""
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from hp_rlvr import EMABaseline  # noqa: E402

ARMS = {"hp_rlvr": [], "hp_rlvr, mixed": ["--credit-scale", "mixed"], "reinforce": ["--algo", "reinforce"], "grpo, 8 rollouts": ["--algo", "grpo"]}


def peak_reset() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")) / 1e6


def main(rounds: str, *flags: str) -> None:
    arms = {name: train.parse_args([*flags, *extra]) for name, extra in ARMS.items()}
    args = arms["hp_rlvr"]
    task = train.make_task(args)
    torch.manual_seed(args.seed)
    policy = train.load_policy(args, task, Path(tempfile.mkdtemp()))
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
                found[name].append(metrics | clock.take() | dict(peak=peak_gb()))
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


if __name__ == "__main__":
    main(*sys.argv[1:])
