"""What one GPU must hold, from the shapes in a config.json alone: python assets/memory.py FOLDER...   (no weights, no GPU: fake tensors)

Each figure is counted by running the real forward and backward pass on tensors without data and adding up the storages that are alive.
"""
import sys
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, __file__.rsplit("/", 2)[0])
from hp_rlvr import CHUNK, jensen_shannon, log_law  # noqa: E402

TOKENS, DEFAULT, ROWS, LENGTH = 2048, 4096, 64, 512 + 512  # of one sequence, of a default micro-batch; a batch of rollouts


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have returned and that are still alive, weights and their finished gradients aside; the peak of it."""
    def __init__(self, model):
        super().__init__()
        self.seen, self.now, self.peak = {id(p.untyped_storage()) for p in model.parameters()}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, id(storage), storage.nbytes())
        return result

    def free(self, name, size):
        if name in self.seen:
            self.seen.discard(name)
            self.now -= size


def measure(config, weights: torch.dtype, tokens: int) -> dict[str, float]:
    """Bytes of what grows with the batch, for fp32 weights under bf16 autocast or for bf16 weights."""
    with FakeTensorMode(), torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=weights)
        model.activation_checkpointing_enable()
        model.train()
        count = sum(p.numel() for p in model.parameters())
        parts = dict(parameters=count)
        autocast = lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        one, two = (torch.zeros(CHUNK, config.hidden_size, dtype=weights) for _ in range(2))
        with Live(model) as live, torch.no_grad(), autocast():
            jensen_shannon(log_law(one, model.lm_head, 1.0), log_law(two, model.lm_head, 1.0))
        parts["credit chunk"] = live.peak
        with Live(model) as live, autocast():
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: live.free(id(p.grad.untyped_storage()), p.grad.untyped_storage().nbytes()))
            hidden = model.base_model(input_ids=torch.zeros(tokens // TOKENS, TOKENS, dtype=torch.long), use_cache=False).last_hidden_state
            score = lambda hidden: log_law(hidden, model.lm_head, 1.0)[:, 0]
            loss = sum(checkpoint(score, part, use_reentrant=False).sum() for part in hidden.flatten(0, 1).split(CHUNK))
            loss.backward()
        parts["activations"] = live.peak
    heads, size = config.num_key_value_heads, config.head_dim
    parts["kv"] = config.num_hidden_layers * 2 * heads * size * 2 * ROWS * LENGTH
    return parts


def main() -> None:
    print(f"GB. activations: of a forward and backward pass over sequences of {TOKENS} tokens, its logits chunks included; credit chunk: {CHUNK} positions "
          f"of both views; KV: {ROWS} rollouts x {LENGTH} tokens in bf16\n")
    print(f"| model | optimiser | weights | gradients | optimiser state | activations, {TOKENS:,} tokens | activations, {DEFAULT:,} tokens | credit chunk "
          "| bf16 copy while sampling | KV cache |\n" + "|---" * 10 + "|")
    for folder in sys.argv[1:]:
        config = AutoConfig.from_pretrained(folder)
        for optimizer, weights, state in (("adamw", torch.float32, 8.0), ("adamw8bit", torch.bfloat16, 2 * (1 + 4 / 256))):
            one, whole, width = measure(config, weights, TOKENS), measure(config, weights, DEFAULT), torch.finfo(weights).bits // 8
            count = one["parameters"]
            numbers = (count * width, count * width, count * state, one["activations"], whole["activations"], one["credit chunk"], count * 2 * (width == 4), one["kv"])
            print(f"| {folder.rstrip('/').rsplit('/', 1)[-1]} ({count / 1e9:.2f} B) | {optimizer} | " + " | ".join(f"{n / 1e9:.1f}" for n in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
