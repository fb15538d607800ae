"""Each test states one property; expectations are computed by definition, not recorded.

In order: the method, the views, credit and loss, sampling, the training step, tasks and data, the real Qwen3 tokenizer, whole runs, bad input, text
games, verifiers. Real data, games and the real tokenizer are read from ../shared; what needs them, or a package that is not installed, is skipped with
its reason. SWEEP=1 adds all golds and all reference programs. The slowest part is the warm-up of the built-in policy, made once (`first_run`).
"""
import ast
import contextlib
import doctest
import importlib.util
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: more threads only stand in each other's way
os.environ.setdefault("HF_HUB_OFFLINE", "1")   # nothing here needs a network

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen3Config,
                          Qwen3ForCausalLM)

import envs
import hp_rlvr
import train
import verifiers
from hp_rlvr import EMABaseline, Rollout, jensen_shannon, policy_loss, surprisal_credit, token_credit, token_log_probs, view_hidden

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent / "shared"
sweep = pytest.mark.skipif(not os.environ.get("SWEEP"), reason="whole data sets: SWEEP=1")
T = 0.7  # a temperature other than 1, so that forgetting it somewhere shows


@pytest.fixture(scope="session", autouse=True)
def cache_of_datasets(tmp_path_factory):
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(autouse=True)
def signals_restored():
    """A run takes over Ctrl-C for itself; give it back to pytest."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------------------------------------------------- small things to test with

def small_model(vocab=40, hidden=16, seed=0, **config):
    """A random two-layer Qwen3 whose laws are neither flat nor one-hot."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=4096, initializer_range=0.4, tie_word_embeddings=False, **config)).eval()


def small_gpt2():
    """A random model with learned absolute positions: rotary ones, being relative, would hide a miscounted position."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=100, initializer_range=0.4)).eval()


@pytest.fixture
def model():
    return small_model()


class LastToken(torch.nn.Module):
    """A model whose law depends on the last token only: logits[last token]. Hidden states are the one-hot tokens themselves."""
    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.embedding = torch.nn.Embedding.from_pretrained(torch.eye(len(logits)))
        self.head = torch.nn.Linear(*logits.shape, bias=False)
        self.head.weight.data = logits.T.clone()
        self.config, self.device = Qwen3Config(num_hidden_layers=1), torch.device("cpu")

    def base_model(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))

    def get_output_embeddings(self):
        return self.head


def script(vocab: int, *chains: list[int]) -> LastToken:
    """A model that always says chain[i + 1] after chain[i]."""
    logits = torch.zeros(vocab, vocab)
    for chain in chains:
        for last, following in zip(chain, chain[1:]):
            logits[last, following] = 100
    return LastToken(logits)


def policy_of(model, eos=(1,), tokenizer=None):
    return train.Policy(model, tokenizer, set(eos), torch.float32)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def settings(**changes):
    return SimpleNamespace(**dict(algo="hp_rlvr", hindsight="attempt", contrast=False, group_size=1, temperature=T, thinking=False, max_new_tokens=8,
                                  max_context=1000, tokens_per_microbatch=1000) | changes)


def some_rollouts(vocab=40, lengths=((5, 9, 4), (8, 12, 7), (3, 4, 1), (6, 17, 6))):
    """Random rollouts with these lengths of (causal prefix, hindsight prefix, response), alternately failed and successful."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(vocab) for _ in range(n)]
    return [Rollout(ids(p), ids(h), ids(n), [1] * n, float(i % 2), False, i // 2) for i, (p, h, n) in enumerate(lengths)]


def padded(rollouts):
    """(tokens, mask) of rollouts: [B, T] each."""
    return train.pad([r.tokens for r in rollouts], "cpu", torch.long), train.pad([r.action_mask for r in rollouts], "cpu")


def both_views(model, rollouts):
    causal, hindsight, responses = train.views(rollouts)
    return view_hidden(model, causal, responses), view_hidden(model, hindsight, responses)


def law(model, prefix, response, temperature=T):
    """log P_t by definition: for each response token a forward pass over what stands before it and nothing else, [T, V]."""
    logits = [model(torch.tensor([prefix + response[:t]])).logits[0, -1] for t in range(len(response))]
    return (torch.stack(logits) / temperature).log_softmax(-1)


def js(p, q):
    """Jensen-Shannon divergence by definition, from probabilities, in units of ln 2."""
    kl = lambda a, b: (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(-1)
    m = (p + q) / 2
    return (kl(p, m) + kl(q, m)) / (2 * math.log(2))


def gradients(model, loss):
    """All gradients of a scalar as one vector."""
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(model.parameters(), grads)])


class Gradients:
    """An optimiser that only remembers the gradient it was given, as one vector."""
    def __init__(self, model):
        self.parameters, self.seen = list(model.parameters()), []

    def step(self):
        self.seen.append(torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in self.parameters]))

    def zero_grad(self, set_to_none=True):
        for p in self.parameters:
            p.grad = None


def given(advantage):
    """`weigh` of train.update for advantages that are known beforehand."""
    return lambda batch, hidden: advantage[batch, :hidden.shape[1]]


def update_gradient(model, rollouts, advantage, mask, batches=None, **changes):
    """(gradient, result) of train.update, which clips at norm 1: undone here."""
    optimizer = Gradients(model)
    result = train.update(policy_of(model), optimizer, rollouts, batches or [list(range(len(rollouts)))], given(advantage), mask, settings(**changes),
                          train.Clock())
    return optimizer.seen[0] * max(1.0, result["grad_norm"] + 1e-6), result


class LargestTensor(TorchDispatchMode):
    """Remembers the element count of the largest tensor that any operation returned."""
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.numel())
        return result


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0, check_dtype=False)


# ------------------------------------------------------------------------------------------------------------------------- the method

@pytest.mark.parametrize("p, q, value", [
    ([0.5, 0.5], [1.0, 0.0], 0.311278), ([1.0, 0.0], [0.0, 1.0], 1.0), ([0.7, 0.2, 0.1], [0.2, 0.5, 0.3], 0.191760),
    ([0.9, 0.1], [0.1, 0.9], 0.368064 / math.log(2)), ([0.3, 0.7], [0.3, 0.7], 0.0)])
def test_jensen_shannon_of_known_laws(p, q, value):
    """C11: known values, in either order."""
    p, q = torch.tensor(p), torch.tensor(q)
    assert jensen_shannon(p.log(), q.log()).item() == pytest.approx(value, abs=2e-6)
    assert jensen_shannon(q.log(), p.log()).item() == pytest.approx(value, abs=2e-6)


def test_jensen_shannon_is_its_definition_symmetric_and_bounded():
    """On laws from flat to nearly one-hot, close together and far apart."""
    torch.manual_seed(0)
    logp = (torch.randn(300, 40) * torch.logspace(-3, 2, 300)[:, None]).log_softmax(-1)
    logq = torch.cat([logp[:100] + 1e-4 * torch.randn(100, 40), logp[100:].flip(0)]).log_softmax(-1)
    value = jensen_shannon(logp, logq)
    close(value, js(logp.double().exp(), logq.double().exp()))
    close(value, jensen_shannon(logq, logp), atol=1e-6)
    assert 0 <= value.min() < 1e-6 and 0.9 < value.max() <= 1
    assert jensen_shannon(logp, logp).abs().max() < 1e-6


def test_jensen_shannon_has_the_right_value_and_gradient_with_forbidden_tokens():
    """Tokens at -inf in one view, the other, or both: value by definition, gradient by finite differences, nothing NaN."""
    torch.manual_seed(0)
    z, w = torch.randn(4, 6, dtype=torch.double), torch.randn(4, 6, dtype=torch.double)
    z_mask, w_mask = torch.zeros_like(z), torch.zeros_like(w)
    z_mask[1, 2] = w_mask[2, 3] = z_mask[3, 4] = w_mask[3, 4] = z_mask[3, 5] = -math.inf
    z.requires_grad_(), w.requires_grad_()
    function = lambda z, w: jensen_shannon((z + z_mask).log_softmax(-1), (w + w_mask).log_softmax(-1))
    close(function(z, w), js((z + z_mask).softmax(-1), (w + w_mask).softmax(-1)), atol=1e-9)
    assert torch.autograd.gradcheck(function, (z, w))


def test_credit_of_a_view_that_copies_is_surprisal():
    """If Q is one-hot on the sampled token, JS(P, Q) = g(P(y)), whatever the rest of P is."""
    torch.manual_seed(0)
    logp, y = (3 * torch.randn(200, 30)).log_softmax(-1), torch.randint(30, (200,))
    copying = torch.nn.functional.one_hot(y, 30).float().log()
    prob = logp.exp()[torch.arange(200), y]
    close(jensen_shannon(logp, copying), surprisal_credit(prob), atol=2e-6)
    assert prob.min() < 0.001 and prob.max() > 0.8


@pytest.mark.parametrize("mode", ["attempt", "digest", "outcome"])
def test_hindsight_prompts_of_two_verdicts_differ_in_the_verdict_word_alone_and_end_with_it(mode):
    right, wrong = (hp_rlvr.hindsight_prompt("2 + 2?", "It is 5.", success, "Checked.", mode) for success in (True, False))
    assert right.endswith("CORRECT.") and wrong.endswith("INCORRECT.") and right.replace("CORRECT", "INCORRECT") == wrong
    assert right.startswith("2 + 2?\n\n### Hindsight\n") and ("It is 5." in right) == (mode != "outcome")


@pytest.mark.parametrize("attempt", ["fine\n</attempt>\nResult: CORRECT.", "fine\n</att</attempt>empt>\nResult: CORRECT.", "</</attempt>attempt>"])
def test_an_attempt_cannot_close_its_own_quotation(attempt):
    """Whatever it spells out, also nested, the text has one end of quotation: ours."""
    text = hp_rlvr.hindsight_prompt("2 + 2?", attempt, False, "Checked.", "attempt")
    assert text.count("</attempt>") == 1 and text.endswith("\n</attempt>\nChecked. Result: INCORRECT.")


# -------------------------------------------------------------------------------------------------------------------------- the views

def test_log_probability_is_that_of_a_forward_over_the_prefix_alone(model):
    """C05: for every token of every row, the first included, in a batch padded on both sides."""
    rollouts = some_rollouts()
    tokens, mask = padded(rollouts)
    logp, entropy = token_log_probs(both_views(model, rollouts)[0], model.lm_head, tokens, mask, T, chunk=3)
    for row, rollout in enumerate(rollouts):
        expected = law(model, rollout.causal_prefix, rollout.tokens)
        close(logp[row, :len(rollout.tokens)], expected[range(len(rollout.tokens)), rollout.tokens])
        close(entropy[row, :len(rollout.tokens)], -(expected.exp() * expected).sum(-1))


def test_credit_is_the_divergence_of_two_forwards_over_the_prefixes_alone(model):
    """Both views score the same token at the same index: brute force, prefixes of different lengths."""
    rollouts = some_rollouts()
    tokens, mask = padded(rollouts)
    causal, hindsight = both_views(model, rollouts)
    credit, prob, copied = hp_rlvr.compare_views(causal, hindsight, model.lm_head, tokens, mask, T, chunk=3)
    for row, rollout in enumerate(rollouts):
        p, q = law(model, rollout.causal_prefix, rollout.tokens).exp(), law(model, rollout.hindsight_prefix, rollout.tokens).exp()
        span = range(len(rollout.tokens))
        close(credit[row, :len(span)], js(p.double(), q.double()))
        close(prob[row, :len(span)], p[span, rollout.tokens])
        close(copied[row, :len(span)], q[span, rollout.tokens])
    assert credit.max() > 0.1
    close(credit, token_credit(causal, hindsight, model.lm_head, mask, T))


def test_credit_is_zero_where_the_hindsight_prefix_is_the_causal_prefix(model):
    """C12."""
    rollouts = some_rollouts()
    for rollout in rollouts:
        rollout.hindsight_prefix = rollout.causal_prefix
    assert token_credit(*both_views(model, rollouts), model.lm_head, padded(rollouts)[1], T).abs().max() < 1e-6


def test_a_longer_hindsight_prefix_shifts_nothing_in_a_model_that_sees_the_last_token_only():
    """C12: 17 tokens more in front give zero credit everywhere; another last token moves the first credit and no other."""
    torch.manual_seed(0)
    model, rollouts = LastToken(3 * torch.randn(40, 40)), some_rollouts()
    for rollout in rollouts:
        rollout.hindsight_prefix = random.Random(1).choices(range(40), k=17) + rollout.causal_prefix
    mask = padded(rollouts)[1]
    assert token_credit(*both_views(model, rollouts), model.head, mask, T).abs().max() < 1e-6
    for rollout in rollouts:
        rollout.hindsight_prefix = rollout.hindsight_prefix[:-1] + [(rollout.causal_prefix[-1] + 1) % 40]
    credit = token_credit(*both_views(model, rollouts), model.head, mask, T)
    assert credit[:, 0].min() > 0.01 and credit[:, 1:].abs().max() < 1e-6


def test_changing_one_law_moves_that_credit_alone(model):
    """C12: credit at token t belongs to token t."""
    rollouts = some_rollouts()
    mask = padded(rollouts)[1]
    causal, hindsight = both_views(model, rollouts)
    before = token_credit(causal, hindsight, model.lm_head, mask, chunk=5)
    hindsight[1, 4] = -hindsight[1, 4]
    moved = token_credit(causal, hindsight, model.lm_head, mask, chunk=5) - before
    assert moved[1, 4].abs() > 0.01 and (moved != 0).sum() == 1


@pytest.mark.parametrize("make", [small_model, small_gpt2])
def test_padding_changes_no_log_probability(make):
    """C04: a row alone and the same row among longer and shorter ones, to 1e-5 in fp32, in hidden states too."""
    model, rollouts = make(), some_rollouts()
    tokens, mask = padded(rollouts)
    together = both_views(model, rollouts)
    logp, _ = token_log_probs(together[0], model.lm_head, tokens, mask, T)
    for row, rollout in enumerate(rollouts):
        alone = both_views(model, [rollout])
        length = len(rollout.tokens)
        close(token_log_probs(alone[0], model.lm_head, *padded([rollout]), T)[0][0], logp[row, :length])
        close(alone[1][0], together[1][row, :length])


def test_temperature_divides_the_logits():
    """C02: logits [2, 1, 0], token 0; at T = 0.5 this is not the log-probability at T = 1 divided by T."""
    head, tokens, mask = torch.nn.Identity(), torch.tensor([[0]]), torch.ones(1, 1)
    logp = [token_log_probs(torch.tensor([[[2.0, 1.0, 0.0]]]), head, tokens, mask, temperature)[0].item() for temperature in (0.5, 1.0)]
    assert logp == pytest.approx([-0.142932, -0.407606], abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_is_dense_in_credit_log_probability_and_gradient(model, chunk):
    """C08: against laws of whole [T, V] tensors. Masked positions give zero whatever stands there."""
    rollouts = some_rollouts()
    tokens, mask = padded(rollouts)
    mask[1, 2] = mask[3, 5] = 0
    advantage = torch.randn(mask.shape, generator=seeded())
    dense_logp, dense_credit = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, rollout in enumerate(rollouts):
        p, q = law(model, rollout.causal_prefix, rollout.tokens), law(model, rollout.hindsight_prefix, rollout.tokens)
        dense_logp[row, :len(p)] = p[range(len(p)), rollout.tokens]
        dense_credit[row, :len(p)] = js(p.exp(), q.exp())
    causal, hindsight = both_views(model, rollouts)
    logp, _ = token_log_probs(causal, model.lm_head, tokens, mask, T, chunk)
    close(logp, dense_logp * mask)
    close(gradients(model, policy_loss(logp, advantage, mask, 9)), gradients(model, -(mask * advantage * dense_logp).sum() / 9))
    with torch.no_grad():
        close(token_credit(causal, hindsight, model.lm_head, mask, T, chunk), dense_credit * mask)


def test_no_tensor_of_sequence_times_vocabulary_is_ever_allocated():
    """C08: prompt 1,500 and response 20, a large vocabulary: rollout, credit, loss and backward stay at `CHUNK` positions of logits."""
    vocab = 20000
    model = small_model(vocab=vocab, hidden=8)
    model.activation_checkpointing_enable()
    [rollout] = some_rollouts(vocab, [(1500, 1520, 20)])
    policy, mask, advantage = policy_of(model, eos=()), torch.ones(1, 20), torch.ones(1, 20)
    with torch.no_grad(), LargestTensor() as dense:
        model(torch.tensor([rollout.causal_prefix + rollout.tokens]))
    assert dense.largest >= 1520 * vocab, "the recorder sees logits"
    bound = max(hp_rlvr.CHUNK * vocab, 2 * 1540 ** 2)  # or the attention scores of two heads
    assert bound < 1500 * vocab / 5
    with LargestTensor() as ours:
        train.sample(policy, [rollout.causal_prefix], 20, T, seeded())
        train.score(policy, [rollout], mask, settings())
        train.update(policy, Gradients(model), [rollout], [[0]], given(advantage), mask, settings(), train.Clock())
    assert ours.largest <= bound


@pytest.mark.parametrize("chunk", [1, 4])
def test_logits_exist_only_a_chunk_at_a_time_with_gradients_too(chunk):
    """The largest tensor of credit, log-probabilities and backward is chunk x V, or the LM head itself; no logits are kept for the backward pass."""
    vocab, hidden_size = 4096, 8
    head = torch.nn.Linear(hidden_size, vocab, bias=False)
    hidden = torch.randn(2, 30, hidden_size, requires_grad=True)
    tokens, mask = torch.randint(vocab, (2, 30)), torch.ones(2, 30)
    kept, keep = [], torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor)
    with LargestTensor() as seen:
        with torch.no_grad():
            token_credit(hidden, hidden.flip(1), head, mask, T, chunk)
        with keep:
            logp, _ = token_log_probs(hidden, head, tokens, mask, T, chunk)
        logp.sum().backward()
    assert vocab * hidden_size <= seen.largest <= vocab * max(chunk, hidden_size)
    assert sum(kept) < vocab


# -------------------------------------------------------------------------------------------------- credit scales, advantages and loss

def test_credit_scales_by_definition_over_the_unmasked_tokens_of_the_whole_batch():
    credit, mask = torch.tensor([[0.1, 0.0, 0.9], [0.02, 0.06, 0.5]]), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    mean = (0.1 + 0.9 + 0.02 + 0.06) / 5
    batch = [[min(c / mean, 5) for c in row] for row in credit.tolist()]
    batch[1][2] = 0  # masked
    close(hp_rlvr.scale_credit(credit, mask, "raw"), credit * mask)
    close(hp_rlvr.scale_credit(credit, mask, "batch"), torch.tensor(batch))
    close(hp_rlvr.scale_credit(credit, mask, "mixed"), (0.5 + 0.5 * torch.tensor(batch)) * mask)


def test_the_batch_scale_keeps_a_dead_signal_small():
    """Credit of 1e-6 everywhere is prompt noise: its weights stay near 1e-3, not 1. And a batch without tokens is no division by zero."""
    assert hp_rlvr.scale_credit(torch.full((2, 3), 1e-6), torch.ones(2, 3), "batch").max() < 0.01
    assert hp_rlvr.scale_credit(torch.zeros(2, 3), torch.zeros(2, 3), "mixed").abs().max() == 0


def test_baseline_is_a_moving_average_and_each_step_uses_the_value_from_before():
    """C14: rewards 1, 0, 1, 1 from zero, and the default start of one half."""
    baseline, advantages = EMABaseline(0.9, 0.0), []
    for reward in (1, 0, 1, 1):
        advantages.append(reward - baseline.value)
        baseline.update(reward)
    assert advantages == pytest.approx([1, -0.1, 0.91, 0.819]) and baseline.value == pytest.approx(0.2629)
    assert EMABaseline().value == 0.5 and EMABaseline().decay == 0.9


def test_grpo_is_the_z_score_of_each_group_and_zero_in_homogeneous_groups():
    """C10: groups in any order; equal rewards give exactly 0, no NaN, and are counted."""
    reward = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0])
    group = torch.tensor([0, 1, 0, 1, 2, 2, 3, 0])
    advantage = hp_rlvr.grpo(torch.ones(8, 3), reward, group)
    for i in range(8):
        peers = [reward[j].item() for j in range(8) if group[j] == group[i]]
        mean = sum(peers) / len(peers)
        spread = math.sqrt(sum((r - mean) ** 2 for r in peers) / len(peers))
        close(advantage[i], torch.full((3,), (reward[i].item() - mean) / spread if spread else 0.0))
    assert hp_rlvr.homogeneous_groups(reward, group) == 0.5  # groups 2 and 3


def test_the_algorithms_differ_in_the_token_weight_alone():
    """hp_rlvr with weight 1 is reinforce; masked tokens have no advantage; the sign is the outcome's, the size is proportional to credit."""
    mask, reward, credit = torch.tensor([[1.0, 1, 0], [1, 1, 1]]), torch.tensor([1.0, 0.0]), torch.rand(2, 3)
    group = torch.tensor([0, 1])
    uniform = train.advantages("hp_rlvr", mask, mask, reward, 0.3, group)
    close(uniform, torch.tensor([[0.7, 0.7, 0], [-0.3, -0.3, -0.3]]))
    close(train.advantages("reinforce", None, mask, reward, 0.3, group), uniform)
    close(train.advantages("hp_rlvr", credit * mask, mask, reward, 0.3, group), uniform * credit)
    assert train.advantages("grpo", None, mask, reward, 0.3, torch.tensor([0, 0]))[0].tolist() == [1, 1, 0]


def test_loss_is_its_formula_and_its_normaliser_is_given_not_counted():
    """Masked positions count for nothing even where they carry a log-probability and an advantage."""
    logp, advantage, mask = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[0.5, -1.0], [2.0, 9.0]]), torch.tensor([[1.0, 1], [1, 0]])
    assert policy_loss(logp, advantage, mask, 8).item() == pytest.approx(-(-0.5 + 2 - 6) / 8)


def test_no_gradient_flows_through_credit_baseline_or_hindsight_view(model):
    """C13: with gradients on everywhere, the gradient is that of plain numbers times log-probabilities."""
    rollouts = some_rollouts()
    tokens, mask = padded(rollouts)
    causal, hindsight = both_views(model, rollouts)
    credit = token_credit(causal, hindsight, model.lm_head, mask, T)
    assert credit.requires_grad, "this credit could carry a gradient"
    reward = torch.tensor([rollout.reward for rollout in rollouts])
    logp, _ = token_log_probs(causal, model.lm_head, tokens, mask, T)
    ours = gradients(model, policy_loss(logp, hp_rlvr.hp_rlvr(credit, reward, 0.4), mask, 18))
    numbers = [[c * (rollout.reward - 0.4) for c in row] for row, rollout in zip(credit.tolist(), rollouts)]
    plain = gradients(model, -(torch.tensor(numbers) * both_log_prob(model, rollouts)).sum() / 18)
    close(ours, plain, atol=1e-6)
    assert ours.norm() > 1e-3
    scored = train.score(policy_of(model), rollouts, mask, settings())
    assert not any(one.requires_grad for one in scored)
    close(scored[0], credit)


def both_log_prob(model, rollouts):
    """log P_t(y_t) by definition, [B, T], zero where padded."""
    result = torch.zeros(padded(rollouts)[1].shape)
    for row, r in enumerate(rollouts):
        result[row, :len(r.tokens)] = law(model, r.causal_prefix, r.tokens)[range(len(r.tokens)), r.tokens]
    return result


def test_the_estimator_is_unbiased_with_uniform_credit_a_constant_baseline_and_equal_lengths():
    """Expectation over all 25 responses of two tokens = gradient of the expected reward, for any baseline; not so with credit that depends
    on the sampled token: there the baseline stays in the expectation."""
    model = small_model(vocab=5)
    rollouts = [Rollout([1, 2], [], [a, b], [1, 1], float((a * b + a) % 3 == 0), False, 0) for a in range(5) for b in range(5)]
    tokens, mask = padded(rollouts)
    reward = torch.tensor([rollout.reward for rollout in rollouts])
    logp, _ = token_log_probs(view_hidden(model, [r.causal_prefix for r in rollouts], [r.tokens for r in rollouts]), model.lm_head, tokens, mask, T)
    prob = logp.sum(-1).exp()
    assert prob.sum().item() == pytest.approx(1, abs=1e-5)

    def expected_gradient(advantage):
        losses = torch.stack([policy_loss(logp[i:i + 1], advantage[i:i + 1], mask[i:i + 1], 2) for i in range(25)])
        return gradients_kept(model, (prob.detach() * losses).sum())

    true = gradients_kept(model, -(prob * reward).sum() / 2)
    assert true.norm() > 1e-2
    for baseline in (0.0, 0.5, 0.9):
        close(expected_gradient(hp_rlvr.reinforce(mask, reward, baseline)), true)
    surprisal = surprisal_credit(logp.exp())
    drift = expected_gradient(hp_rlvr.hp_rlvr(surprisal, reward, 0.9)) - expected_gradient(hp_rlvr.hp_rlvr(surprisal, reward, 0.1))
    assert drift.norm() > 0.1 * true.norm()


def gradients_kept(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])


@pytest.mark.parametrize("batches", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]])
@pytest.mark.parametrize("masked", [[], [2], [2, 3]])
def test_splitting_into_micro_batches_changes_nothing(model, batches, masked):
    """1x4 = 2x2 = 4x1 in gradient, loss statistics and credit, also with a micro-batch that is masked altogether."""
    rollouts = some_rollouts()
    mask = padded(rollouts)[1]
    mask[masked] = 0
    whole, policy = [[0, 1, 2, 3]], policy_of(model)
    together = train.score(policy, rollouts, mask, settings())
    for batch in batches:
        width = max(len(rollouts[i].tokens) for i in batch)
        for one, two in zip(together, train.score(policy, [rollouts[i] for i in batch], mask[batch, :width], settings())):
            close(one[batch, :width], two)
    advantage = torch.randn(mask.shape, generator=seeded())
    ours, result = update_gradient(model, rollouts, advantage, mask, batches)
    expected, expected_result = update_gradient(model, rollouts, advantage, mask, whole)
    close(ours, expected)
    close(result.pop("log_prob"), expected_result.pop("log_prob"))
    assert expected.norm() > 1e-3 and result == pytest.approx(expected_result, abs=1e-5)


def test_micro_batches_hold_each_rollout_once_and_stay_within_their_budget():
    """Only a rollout that is too long by itself stands above the budget, alone."""
    rng = random.Random(0)
    for budget in (50, 200, 1000):
        rollouts = some_rollouts(lengths=[(rng.randint(1, 30), rng.randint(0, 60), rng.randint(1, 40)) for _ in range(50)])
        batches = train.microbatches(rollouts, budget)
        assert sorted(sum(batches, [])) == list(range(50))
        for batch in batches:
            size = len(batch) * max(max(len(rollouts[i].causal_prefix), len(rollouts[i].hindsight_prefix)) + len(rollouts[i].tokens) for i in batch)
            assert size <= budget or len(batch) == 1
    assert len(train.microbatches(rollouts, 10 ** 6)) == 1


def test_a_batch_with_every_token_masked_has_loss_zero_and_finite_gradients(model):
    """C09."""
    rollouts = some_rollouts()
    tokens, mask = padded(rollouts)
    logp, _ = token_log_probs(both_views(model, rollouts)[0], model.lm_head, tokens, mask * 0, T)
    loss = policy_loss(logp, torch.ones_like(mask), mask * 0, 1)
    assert loss.item() == 0 and gradients(model, loss).abs().max() == 0


def test_a_response_without_tokens_or_of_a_lone_eos_disturbs_no_other_row(model):
    """C09."""
    rollouts = some_rollouts(lengths=[(5, 9, 4), (4, 6, 0), (3, 4, 1)])
    tokens, mask = padded(rollouts)
    logp, _ = token_log_probs(both_views(model, rollouts)[0], model.lm_head, tokens, mask, T)
    for row in (0, 2):
        close(logp[row, :len(rollouts[row].tokens)], both_log_prob(model, [rollouts[row]])[0])
    assert logp[1].abs().max() == 0


def test_without_signal_the_gradient_is_exactly_zero_and_with_signal_it_is_not(model):
    """C10: rewards equal to the baseline, or equal within every group."""
    rollouts = some_rollouts()
    mask, group = padded(rollouts)[1], torch.tensor([0, 0, 1, 1])
    same, mixed = torch.full((4,), 0.5), torch.tensor([0.0, 1, 0, 1])
    for reward, zero in ((same, True), (mixed, False)):
        for advantage in (hp_rlvr.reinforce(mask, reward, 0.5), hp_rlvr.grpo(mask, reward, group)):
            gradient, result = update_gradient(model, rollouts, advantage, mask)
            assert (result["grad_norm"] < 1e-12) == zero and (gradient.abs().max() == 0) == zero


def test_pearson_and_top_share_by_definition():
    torch.manual_seed(0)
    x, y = torch.rand(50), torch.rand(50)
    assert hp_rlvr.pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item(), abs=1e-6)
    assert hp_rlvr.pearson(x, 3 - 2 * x) == pytest.approx(-1) and hp_rlvr.pearson(x, torch.ones(50)) is None
    assert hp_rlvr.top_share(x) == pytest.approx(sum(sorted(x.tolist())[-10:]) / x.sum().item(), abs=1e-6)
    assert hp_rlvr.top_share(torch.ones(50)) == pytest.approx(0.2) and hp_rlvr.top_share(torch.zeros(50)) is None


# --------------------------------------------------------------------------------------------------------------------------- sampling

def hostile_model():
    """A model that ships every sampling default that bends the law."""
    model = small_model(vocab=32)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=3, top_p=0.95, min_p=0.2, repetition_penalty=1.5, no_repeat_ngram_size=1, suppress_tokens=[5, 6],
        begin_suppress_tokens=[7], exponential_decay_length_penalty=(1, 4.0), eos_token_id=1, pad_token_id=0)
    return model


def total_variation(tokens, law):
    return (torch.bincount(torch.tensor(tokens), minlength=len(law)) / len(tokens) - law).abs().sum().item() / 2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_sampling_law_is_the_softmax_whatever_the_checkpoint_asks_for(temperature):
    """C01: first and second token of 4,000 copies, against softmax(logits / T) by definition; the EOS is as likely as it should be."""
    model, prompt = hostile_model(), [4, 9, 2, 5]
    inputs = torch.tensor([prompt] * 200)
    theirs = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=1)[:, -1]
    assert len(set(theirs.tolist())) <= 3, "the trap is set: generate() does inherit"
    responses, _ = train.sample(policy_of(model), [prompt] * 4000, 2, temperature, seeded())
    first = law(model, prompt, [0], temperature)[0].exp()
    second = torch.stack([law(model, prompt + [token], [0], temperature)[0].exp() for token in range(32)])
    assert len({ids[0] for ids in responses}) > 3 and total_variation([ids[0] for ids in responses], first) < 0.05
    first[1] = 0  # what ended has no second token
    marginal = first @ second / first.sum()
    seconds = [ids[1] for ids in responses if ids[0] != 1]
    assert total_variation(seconds, marginal) < 0.05
    assert seconds.count(1) / len(seconds) == pytest.approx(marginal[1].item(), abs=0.02)


@torch.no_grad()
def sampled_with_law(model, prompts, tokens, temperature):
    """(responses, log-probability that each token had when it was sampled)."""
    logits = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[:, -1].float()))
    responses, log_probs = train.sample(policy_of(model, eos=()), prompts, tokens, temperature, seeded())
    hook.remove()
    law = (torch.stack(logits, 1) / temperature).log_softmax(-1).gather(-1, torch.tensor(responses)[..., None]).squeeze(-1)
    close(torch.tensor(log_probs), law)
    return responses, law


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_law_that_is_scored_and_trained_is_the_law_that_was_sampled(model, temperature):
    """C21, C02: log-probabilities of rollout (cache, left padding), credit pass and loss pass (training mode, checkpointing) agree to 1e-5."""
    model.activation_checkpointing_enable()
    prompts = [r.causal_prefix for r in some_rollouts()]
    responses, at_sampling = sampled_with_law(model, prompts, 6, temperature)
    rollouts = [Rollout(prompt, prompt + [3], response, [1] * 6, 1.0, True, 0) for prompt, response in zip(prompts, responses)]
    tokens, mask = padded(rollouts)
    _, prob, _ = train.score(policy_of(model), rollouts, mask, settings(temperature=temperature))
    close(prob.log(), at_sampling)
    model.train()
    close(token_log_probs(both_views(model, rollouts)[0], model.lm_head, tokens, mask, temperature)[0].detach(), at_sampling)
    result = update_gradient(model, rollouts, mask, mask, temperature=temperature)[1]
    close(result["log_prob"], at_sampling)


def test_a_response_ends_with_its_first_eos_and_every_token_of_it_is_trained():
    """C03: padding id = EOS id = 0 and a second EOS; masks go by position. A response that is cut has no EOS; one may be the EOS alone."""
    model = script(40, [10, 5, 6, 0, 0, 0], [11, 12, 13, 14, 15, 16, 17], [20, 0, 0], [30, 31, 2, 5])
    policy = policy_of(model, eos=(0, 2))
    responses, _ = train.sample(policy, [[10], [4, 11], [7, 8, 20], [30]], 5, 1.0, seeded())
    assert responses == [[5, 6, 0], [12, 13, 14, 15, 16], [0], [31, 2]]
    rollouts = [Rollout([4], [4], ids, [1] * len(ids), 1.0, ids[-1] not in policy.eos_ids, 0) for ids in responses]
    assert padded(rollouts)[1].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    real = small_model()
    mask = padded(rollouts)[1]
    advantage = torch.randn(mask.shape, generator=seeded())
    close(update_gradient(real, rollouts, advantage, mask)[0], gradients(real, -(advantage * both_log_prob(real, rollouts)).sum() / 11))


@pytest.mark.parametrize("make", [small_model, small_gpt2])
def test_rows_neither_see_their_padding_nor_their_neighbours_leaving(make):
    """C04: greedy responses of rows of different lengths, some of which end early, alone and side by side."""
    model = make()
    prompts = [r.causal_prefix for r in some_rollouts()] + [[9], [3, 1, 4, 1, 5]]
    policy = policy_of(model, eos=())
    free, _ = train.sample(policy, prompts, 12, 0, seeded())
    policy.eos_ids = {free[0][2], free[3][5], free[4][8]}
    together, _ = train.sample(policy, prompts, 12, 0, seeded())
    assert together == [train.sample(policy, [prompt], 12, 0, seeded())[0][0] for prompt in prompts]
    assert len({len(ids) for ids in together}) > 2, "rows end at different times"


def test_rollouts_run_in_eval_mode_with_the_cache_and_leave_the_model_as_it_was():
    """C06: dropout is off while sampling, layers see the prompt once and then one token at a time, training mode and checkpointing are back after."""
    model = small_model(attention_dropout=0.5)
    model.activation_checkpointing_enable()
    model.train()
    lengths = []
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    prompts = [r.causal_prefix for r in some_rollouts()]
    one, two = (train.sample(policy_of(model, eos=()), prompts, 5, 0, seeded()) for _ in range(2))
    assert one == two and lengths == [8, 1, 1, 1, 1] * 2
    assert model.training and model.is_activation_checkpointing


def test_samples_differ_within_a_group_and_between_steps_and_repeat_with_the_seed(model):
    """C19: one generator for the whole run, never seeded again."""
    policy, generator = policy_of(model, eos=()), seeded()
    first, second = (train.sample(policy, [[3, 4]] * 4, 8, 1.0, generator)[0] for _ in range(2))
    assert len(set(map(tuple, first + second))) == 8
    assert train.sample(policy, [[3, 4]] * 4, 8, 1.0, seeded(0))[0] == first
    assert train.sample(policy, [[3, 4]] * 4, 8, 1.0, seeded(1))[0] != first


# ------------------------------------------------------------------------------------------------------------------ the training step

def test_training_recomputes_activations_without_a_cache_and_goes_back_to_eval_mode(model):
    """C06: each block runs twice in one update (forward, recomputation), never with a cache."""
    model.activation_checkpointing_enable()
    blocks, caches, layer = [], [], model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda module, inputs: blocks.append(module.training))
    layer.register_forward_pre_hook(lambda module, inputs, kwargs: caches.append((kwargs["cache"], kwargs["use_cache"])), with_kwargs=True)
    rollouts = some_rollouts()
    mask = padded(rollouts)[1]
    train.update(policy_of(model), Gradients(model), rollouts, [[0, 1, 2, 3]], given(mask), mask, settings(), train.Clock())
    assert blocks == [True, True] and caches == [(None, False)]
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_a_non_finite_loss_takes_no_step(model):
    rollouts = some_rollouts()
    mask = padded(rollouts)[1]
    optimizer = Gradients(model)
    result = train.update(policy_of(model), optimizer, rollouts, [[0, 1, 2, 3]], given(mask * math.inf), mask, settings(), train.Clock())
    assert result["skipped"] and not optimizer.seen and all(p.grad is None for p in model.parameters())


TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}")
WORDS = ["<pad>", "</s>", "<s>", "<tool>", ">", "a", "b", "ab", "c", "d", "?", "!", "H", "@"]


def toy_tokenizer():
    """Merges a+b to ab, so that the round trip of the sampled ids a, b changes them; puts a BOS in front like Llama's; <tool> is special."""
    from tokenizers import Tokenizer, decoders, models, processors
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[("a", "b")], unk_token="<pad>"))
    bpe.decoder = decoders.Fuse()
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>", bos_token="<s>", chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    return tokenizer


def toy_task(judged):
    """Everything is right; what the judge is given is kept in `judged`."""
    return envs.SingleTurn("toy", "Checked.", [], [], lambda text, row: judged.append(text) or True, digest=lambda text: text, answered=bool)


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_trained_ids_are_the_sampled_ids_and_the_judge_sees_text_up_to_the_first_eos(monkeypatch):
    """C15, C20: a tokenizer whose round trip changes ids, a special token in the middle, and a model that goes on after its EOS."""
    tokenizer, judged, trained = toy_tokenizer(), [], []
    policy = policy_of(script(20, ids_of("> a b <tool> c </s> d d")), tokenizer=tokenizer)
    task = toy_task(judged)
    played = train.play(policy, task, [dict(prompt="d?")] * 2, settings(), 1.0, seeded(), train.Clock())
    sampled = ids_of("a b <tool> c </s>")
    assert tokenizer("abc", add_special_tokens=False).input_ids == ids_of("ab c"), "the round trip changes ids"
    assert judged == ["abc", "abc"]
    rollouts = train.make_rollouts(policy, task, played, settings())
    assert [r.tokens for r in rollouts] == [sampled] * 2 and [r.action_mask for r in rollouts] == [[1] * 5] * 2
    assert [r.reward for r in rollouts] == [1, 1] and not any(r.truncated for r in rollouts)
    monkeypatch.setattr(train, "view_hidden", lambda model, prefixes, responses: trained.extend(responses) or view_hidden(model, prefixes, responses))
    train.update(policy, Gradients(policy.model), rollouts, train.microbatches(rollouts, 1000), given(torch.ones(2, 5)), torch.ones(2, 5), settings(),
                 train.Clock())
    assert trained == [sampled] * 2


def test_a_truncated_response_has_reward_zero_whatever_it_says():
    """Marked as truncated, not put before the judge as a finished one, and trained: its mask is all ones."""
    judged = []
    policy = policy_of(script(20, ids_of("> a b c d a")), tokenizer=toy_tokenizer())
    task = toy_task(judged)
    played = train.play(policy, task, [dict(prompt="d?")], settings(max_new_tokens=4), 1.0, seeded(), train.Clock())
    [rollout] = train.make_rollouts(policy, task, played, settings())
    assert rollout.truncated and rollout.reward == 0 and rollout.tokens == ids_of("a b c d") and rollout.action_mask == [1] * 4
    assert not played[0].episode.judge_failed


def test_a_judge_that_fails_pays_nothing_and_is_counted_apart():
    task = envs.SingleTurn("toy", "Checked.", [], [], lambda text, row: {"a": True, "b": False, "c": None}[text], str, bool)
    episodes = task.start([dict(prompt="?")] * 3)
    assert task.step(episodes, ["a", "b", "c"], [True] * 3) == [None] * 3
    assert [e.reward for e in episodes] == [1, 0, 0] and [e.judge_failed for e in episodes] == [False, False, True]


@pytest.mark.parametrize("budget", [600, 10 ** 6])  # several micro-batches; one that holds the batch
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("algo, scale, contrast", [("hp_rlvr", "raw", False), ("hp_rlvr", "mixed", False), ("hp_rlvr", "raw", True), ("hp_rlvr", "mixed", True),
                                                   ("surprisal", "raw", False), ("reinforce", "raw", False), ("grpo", "raw", False)])
def test_one_step_is_the_equation(algo, scale, contrast, mask_truncated, budget):
    """The gradient of a whole step is - sum_t A_t grad log P_t(y_t) / Z with every term by definition, from what was sampled: which responses
    ended, what they said, both prefixes, one forward for each token. The baseline is the one from before, and moves once."""
    tokenizer, model, baseline = toy_tokenizer(), small_model(vocab=len(WORDS)), EMABaseline(0.9, 0.3)
    task = envs.SingleTurn("toy", "Checked.", [], [], lambda text, row: len(text) % 2 == 1, str, bool)
    args = settings(algo=algo, credit_scale=scale, contrast=contrast, mask_truncated=mask_truncated, group_size=3 if algo == "grpo" else 1,
                    tokens_per_microbatch=budget, max_new_tokens=12)
    optimizer, prompts = Gradients(model), [word * n + "?" for word in "abcd" for n in (1, 2, 3)]
    policy = policy_of(model, eos=(1, 4), tokenizer=tokenizer)
    one = train.train_step(policy, optimizer, task, [dict(prompt=prompt) for prompt in prompts], baseline, seeded(), args, train.Clock())
    logp, credit, reward, trained, ended, copied = [], [], [], [], [], []
    for i, rollout in enumerate(one.rollouts):
        prompt, ids = prompts[i // args.group_size], rollout.tokens
        ended.append(ids[-1] in (1, 4))
        text = "".join(WORDS[token] for token in (ids[:-1] if ended[-1] else ids) if token > 3)
        reward.append(float(ended[-1] and len(text) % 2 == 1))
        q, flipped = (law(model, envs.prompt_ids(tokenizer, hp_rlvr.hindsight_prompt(prompt, text, success, "Checked.", "attempt"), False), ids)
                      for success in (reward[-1] == 1, reward[-1] != 1))
        p = law(model, envs.prompt_ids(tokenizer, prompt, False), ids)
        logp.append(p[range(len(ids)), ids])
        copied.append(q[range(len(ids)), ids].exp())
        credit.append({"hp_rlvr": js((flipped if contrast else p).exp(), q.exp()), "surprisal": surprisal_credit(logp[-1].exp())}.get(algo, torch.ones(len(ids))))
        trained.append(float(ended[-1] or not mask_truncated))
    assert set(reward) == {0, 1} and set(ended) == {False, True} and len(one.rollouts) == len(prompts) * args.group_size
    tokens = sum(m * len(c) for m, c in zip(trained, credit))
    mean = sum(m * c.sum() for m, c in zip(trained, credit)) / tokens
    loss = 0
    for i in range(len(reward)):
        group = reward[i // 3 * 3:][:3]
        spread = torch.tensor(group).std(correction=0).item()
        advantage = reward[i] - 0.3 if algo != "grpo" else (reward[i] - sum(group) / 3) / spread if spread else 0.0
        weight = credit[i] if scale == "raw" else 0.5 + 0.5 * (credit[i] / mean).clamp(max=5)
        loss = loss - (trained[i] * advantage * weight.detach() * logp[i]).sum() / tokens
    expected = gradients(model, loss)
    close(optimizer.seen[0] * max(1.0, one.update["grad_norm"] + 1e-6), expected)
    assert one.scored_ahead == (scale == "mixed" and budget == 600 and not contrast), "no second causal forward pass where one serves"
    if algo == "hp_rlvr":
        for row, (c, p, q) in enumerate(zip(credit, logp, copied)):
            close(one.views[:, row, :len(c)], trained[row] * torch.stack([c, p.exp(), q]))
    assert expected.norm() > 1e-2 and one.baseline == 0.3 and baseline.value == pytest.approx(0.9 * 0.3 + 0.1 * sum(reward) / len(reward))


class TwoTurns:
    """A task that answers the first turn with "!" and ends with the second."""
    check = "Played."

    def start(self, rows):
        return [envs.Episode(row, row["prompt"]) for row in rows]

    def step(self, episodes, responses, finished):
        for episode, response in zip(episodes, responses):
            episode.responses.append(response)
        return ["!" if len(episode.responses) == 1 else None for episode in episodes]


@pytest.mark.parametrize("chain, new_tokens, turn, bridge", [
    ("> a b </s>", 8, "a b </s>", "! >"),    # the sampled EOS is not repeated
    ("> a b c d", 3, "a b c", "</s> ! >")])  # a turn that was cut gets its EOS from us
def test_the_environments_tokens_stand_between_the_turns_and_are_not_trained(chain, new_tokens, turn, bridge):
    policy = policy_of(script(20, ids_of(chain)), tokenizer=toy_tokenizer())
    [one] = train.play(policy, TwoTurns(), [dict(prompt="d?")], settings(max_new_tokens=new_tokens), 1.0, seeded(), train.Clock())
    turn, bridge = ids_of(turn), ids_of(bridge)
    assert one.prefix == ids_of("<s> d ? >") and one.tokens == turn + bridge + turn
    assert one.action_mask == [1] * len(turn) + [0] * len(bridge) + [1] * len(turn)


def test_a_prompt_without_room_for_an_answer_is_dropped_and_others_are_left_whole():
    """C22: never cut, on either side."""
    policy = policy_of(script(20, ids_of("> a </s>")), tokenizer=toy_tokenizer())
    rows = [dict(prompt="d" * n + "?") for n in (3, 40, 5)]
    played = train.play(policy, toy_task([]), rows, settings(max_context=20), 1.0, seeded(), train.Clock())
    assert [one.number for one in played] == [0, 2]
    assert [one.prefix for one in played] == [ids_of("<s> " + "d " * n + "? >") for n in (3, 5)]


def test_rendered_prompts_have_one_bos():
    """C16: the template writes it, tokenizing must not add another, as this tokenizer does by default."""
    tokenizer = toy_tokenizer()
    assert tokenizer("<s>d?>").input_ids.count(2) == 2
    assert envs.prompt_ids(tokenizer, "d?", False) == ids_of("<s> d ? >")


def test_special_tokens_are_stripped_from_quoted_text_until_none_is_left():
    """Also where taking one out puts another together."""
    assert envs.strip_special(toy_tokenizer(), "a</s>b<to</s>ol>c</</s>s>d") == "abcd"


@pytest.mark.parametrize("attempt", ["a</s>b", "a<to<tool>ol>b", "a</</attempt>s>b"])
def test_no_special_token_enters_the_hindsight_view_through_the_attempt(attempt):
    """Spelled out by the model in ordinary tokens: they would end the quoting message."""
    task, policy = toy_task([]), policy_of(None, tokenizer=toy_tokenizer())
    one = SimpleNamespace(episode=envs.Episode({}, "d?", [attempt]))
    ids = train.hindsight_ids(policy, task, one, "attempt", True, settings())
    assert [token for token in ids if token in (1, 2, 3)] == [2]


def test_flip_and_floor_are_mean_divergences_by_definition():
    """flip: hindsight view against its twin with the other verdict; floor: causal view against a hindsight text that says nothing."""
    tokenizer, task = toy_tokenizer(), toy_task([])
    model = small_model(vocab=len(WORDS))
    policy = policy_of(model, tokenizer=tokenizer)
    played = []
    for number, (tokens, mask, reward) in enumerate([(ids_of("a b c </s>"), [1, 0, 0, 1], 1.0), (ids_of("d"), [1], 0.0)]):
        played.append(train.Played(number, envs.Episode({}, "d?", ["abc"], reward), ids_of("<s> d ? >"), tokens, mask, []))
    flip, floor = [], []
    with torch.no_grad():
        for one in played:
            right, wrong, null = (envs.prompt_ids(tokenizer, hp_rlvr.hindsight_prompt("d?", "abc", success, "Checked.", mode), False)
                                  for success, mode in ((True, "attempt"), (False, "attempt"), (True, "null")))
            laws = [law(model, prefix, one.tokens).exp() for prefix in (one.prefix, right, wrong, null)]
            trained = torch.tensor(one.action_mask).bool()
            flip += js(laws[1], laws[2])[trained].tolist()
            floor += js(laws[0], laws[3])[trained].tolist()
    assert len(flip) == 3 and min(flip + floor) > 1e-4
    ours = train.verdict_diagnostics(policy, task, played, settings())
    assert ours == pytest.approx(dict(flip=sum(flip) / 3, credit_floor=sum(floor) / 3), abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------- tasks and data

@pytest.mark.parametrize("module", [hp_rlvr, envs, train, verifiers], ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(module)
    assert result.failed == 0 and (result.attempted > 0 or module is train)


def test_a_sum_is_right_if_and_only_if_every_carry_is_taken():
    """And the judge of the task says so; training and test rows are disjoint."""
    task, rng = envs.sums(3, 0), random.Random(0)
    assert not {row["prompt"] for row in task.train} & {row["prompt"] for row in task.test}
    for row in task.test[:200]:
        right, taken = envs.write_sum(row, lambda column: True, rng)
        assert row["gold"] == str(row["a"] + row["b"]) and task.judge(right, row) is True
        for column in taken:
            assert task.judge(envs.write_sum(row, lambda c: c != column, rng)[0], row) is False


def carries(response: str) -> dict[int, int]:
    """{column: carry as written} of the columns in which there is one to take."""
    lines = re.findall(r"=(\d+), .*carry (\d)", response)
    return {column: int(carry) for column, (total, carry) in enumerate(lines) if int(total) >= 10}


@pytest.mark.parametrize("view", ["attempt", "digest"])
def test_warm_up_reads_hindsight_from_attempt_and_verdict_alone(view, monkeypatch):
    """After CORRECT the decisions are kept, after INCORRECT exactly one of them is changed, right or not; the verdict is the judge's."""
    task, rng, written, verdicts, changed_to = envs.sums(3, 0), random.Random(0), [], [], set()
    write_sum = envs.write_sum
    monkeypatch.setattr(envs, "write_sum", lambda *arguments: written.append(write_sum(*arguments)) or written[-1])
    for _ in range(300):
        message = lambda prompt, happened, success, check, mode: verdicts.append(success) or "message"
        [(_, target)] = task.demonstration(rng, view, message)
        before, after = carries(written[-2][0]), carries(target)  # of the attempt and of the target
        if verdicts[-1]:
            assert before == after
            continue
        [column] = [column for column in before if column in after and before[column] != after[column]]
        changed_to.add(after[column])
    assert changed_to == {0, 1} and 50 < sum(verdicts) < 250, "a change towards the right answer alone would be a gold teacher"


def test_demonstrations_are_tokenized_the_way_rollouts_are():
    """Prompt, response, EOS; labels on what the policy writes and nowhere else."""
    ids, labels = envs.demonstration_ids(toy_tokenizer(), [("d?", "abc"), ("!", "d")])
    assert ids == ids_of("<s> d ? > ab c </s> ! > d </s>")
    assert labels == [-100] * 4 + ids_of("ab c </s>") + [-100] * 2 + ids_of("d </s>")


def gsm8k_rows(count: int, start=0) -> list[dict]:
    return [dict(question=f"What is {n}+1?", answer=f"It is {n + 1}.\n#### {n + 1}") for n in range(start, start + count)]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(data, eval_data=None, eval_size=3, report=lambda text: None):
    train_rows, test_rows = envs.load_rows(envs.read_gsm8k, ("none", "none"), str(data), eval_data and str(eval_data), eval_size, report)
    return [row["gold"] for row in train_rows], [row["gold"] for row in test_rows]


def test_a_folder_serves_both_splits_and_one_file_holds_out_its_last_rows(tmp_path):
    """Of one file the last min(eval-size, 20 %) rows, and the run says so; --eval-data is evaluation data whatever its name."""
    write_jsonl(tmp_path / "both/train.jsonl", gsm8k_rows(4)), write_jsonl(tmp_path / "both/test.jsonl", gsm8k_rows(2, 100))
    one = write_jsonl(tmp_path / "one.jsonl", gsm8k_rows(20))
    numbers = lambda *bounds: [str(n + 1) for n in range(*bounds)]
    assert load(tmp_path / "both") == (numbers(4), numbers(100, 102))
    said = []
    assert load(one, report=said.append) == (numbers(17), numbers(17, 20)) and "3 rows are held out" in said[0]
    assert load(one, eval_size=50, report=said.append) == (numbers(16), numbers(16, 20)) and "4 rows are held out" in said[1]
    assert load(tmp_path / "both", one) == (numbers(4), numbers(20))
    assert load(one, tmp_path / "both") == (numbers(20), numbers(100, 102))


def test_every_epoch_sees_each_row_once_in_an_order_of_its_own_and_goes_on_from_any_position():
    """C17: what --resume needs to know of the data is one number."""
    rows = list(range(7))
    prompts = train.Prompts(rows, seed=0)
    drawn = [prompts.next(3) for _ in range(7)]
    stream = sum(drawn, [])
    epochs = [stream[start:start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == rows for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert [train.Prompts(rows, 0, 3 * n).next(3) for n in range(7)] == drawn
    assert train.Prompts(rows, 1).next(7) != epochs[0]


# -------------------------------------------------------------------------------------------------------------- the real Qwen3 tokenizer

@pytest.fixture(scope="session")
def qwen():
    folder = SHARED / "data" / "qwen3-tokenizer"
    if not folder.exists():
        pytest.skip(f"needs the real Qwen3 tokenizer in {folder}")
    return AutoTokenizer.from_pretrained(folder)


THINK = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_qwen3_is_non_thinking_by_default_and_both_views_end_in_the_same_generation_prompt(qwen):
    """C16: same flag in both views; --thinking opens the answer without the empty think block."""
    args = train.parse_args([])
    policy, task = policy_of(None, tokenizer=qwen), toy_task([])
    one = SimpleNamespace(episode=envs.Episode({}, "2 + 2?", ["It is 5.<|im_end|>\n<|im_start|>assistant\n"]))
    for args.thinking, ending in ((args.thinking, THINK), (True, "<|im_start|>assistant\n")):
        prefixes = [envs.prompt_ids(qwen, "2 + 2?", args.thinking), train.hindsight_ids(policy, task, one, "attempt", False, args)]
        closing = qwen(ending, add_special_tokens=False).input_ids
        assert [prefix[-len(closing):] for prefix in prefixes] == [closing] * 2
        assert [qwen.decode(prefix).count("<|im_start|>") for prefix in prefixes] == [2, 2]
        assert [qwen.decode(prefix).count("<think>") for prefix in prefixes] == [ending.count("<think>")] * 2
    assert qwen.decode(prefixes[1]).endswith("Result: INCORRECT.<|im_end|>\n<|im_start|>assistant\n")


def test_with_qwen3_rendering_a_conversation_again_changes_sampled_ids_and_bridges_do_not(qwen):
    """The template drops the empty think block of earlier turns. Apart from that block, ours is the conversation that it writes."""
    prefix, turn = envs.prompt_ids(qwen, "Look around.", False), qwen("Action: look<|im_end|>").input_ids
    ours = prefix + turn + envs.bridge_ids(qwen, "You see a desk.", False, turn[-1])
    talk = [dict(role="user", content="Look around."), dict(role="assistant", content="Action: look"), dict(role="user", content="You see a desk.")]
    again = envs.render(qwen, talk, False)
    assert qwen(again).input_ids[:len(prefix + turn)] != prefix + turn
    assert qwen.decode(ours).replace(THINK, "<|im_start|>assistant\n", 1) == again
    cut = envs.bridge_ids(qwen, "You see a desk.", False, turn[-2])
    assert cut == [qwen.eos_token_id] + envs.bridge_ids(qwen, "You see a desk.", False, qwen.eos_token_id)


def test_a_random_qwen3_with_the_real_tokenizer_trains_from_a_folder(qwen, tmp_path, capfd):
    """Its two EOS ids are both known, and its vocabulary of 151,936 goes through credit and loss."""
    model = small_model(vocab=151936, hidden=8)
    model.generation_config = GenerationConfig(eos_token_id=[151645, 151643], temperature=0.6, top_k=20, top_p=0.95, do_sample=True)
    model.save_pretrained(tmp_path / "qwen"), qwen.save_pretrained(tmp_path / "qwen")
    data = write_jsonl(tmp_path / "data.jsonl", gsm8k_rows(10))
    run = ["--model", str(tmp_path / "qwen"), "--task", "gsm8k", "--data", str(data), "--steps", "1", "--prompts-per-step", "2", "--eval-size", "2",
           "--max-new-tokens", "4", "--dtype", "bf16", "--out", str(tmp_path / "run")]
    assert train.main(run) == 0
    [_, step] = metrics_of(tmp_path / "run")
    assert step["truncated"] == 1 and step["reward_mean"] == 0 and step["grad_norm"] > 0 and step["credit_mean"] > 0
    policy = train.load_policy(train.parse_args(run), None, tmp_path)
    assert policy.eos_ids == {151645, 151643}


# ------------------------------------------------------------------------------------------------- whole runs, and the built-in policy

METRICS = """step reward_mean baseline grad_norm zero_gradient homogeneous_groups credit_mean credit_top20_share copy prob_mean surprisal_corr entropy
    response_tokens_mean truncated verifier_failures prompts_dropped steps_skipped generated_tokens scored_tokens seconds_rollout seconds_verify
    seconds_credit seconds_update peak_memory_gb""".split()
EVALUATION = "eval_accuracy eval_accuracy_sampled eval_format flip credit_floor".split()
SMALL = ["--steps", "2", "--prompts-per-step", "4", "--eval-size", "6", "--eval-every", "1", "--lr", "1e-3"]


def program(*arguments, **options):
    """train.py as a user starts it."""
    return subprocess.run([sys.executable, "train.py", *map(str, arguments)], cwd=HERE, capture_output=True, text=True, timeout=600, **options)


def metrics_of(out) -> list[dict]:
    refuse = lambda constant: pytest.fail(f"{constant} in metrics.jsonl")
    return [json.loads(line, parse_constant=refuse) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def steady(metrics: list[dict]) -> list[dict]:
    """Metrics without what depends on the machine."""
    return [{name: value for name, value in line.items() if not name.startswith("seconds_") and name != "peak_memory_gb"} for line in metrics]


def weights(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def same_weights(one, two) -> bool:
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="session")
def first_run(tmp_path_factory):
    """The newcomer's command, only smaller: no --model, no --task, warm-up included. Its folder; tiny/ in it is the policy of the other runs."""
    out = tmp_path_factory.mktemp("first") / "run"
    done = program(*SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(out=out, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture(scope="session")
def tiny(first_run):
    return first_run.out / "tiny"


@pytest.fixture(scope="session")
def runs(first_run, tiny, tmp_path_factory):
    """One run of each algorithm as a subprocess: {algo: folder}."""
    folders = dict(hp_rlvr=first_run.out)
    for algo in ("grpo", "reinforce", "surprisal"):
        folders[algo] = tmp_path_factory.mktemp(algo) / "run"
        done = program(*SMALL, "--model", tiny, "--algo", algo, "--out", folders[algo])
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return folders


def small_run(out, tiny, *flags) -> list[dict]:
    """A small run in this process: its metrics."""
    assert train.main([*SMALL, "--model", str(tiny), "--out", str(out), *map(str, flags)]) == 0
    return metrics_of(out)


def test_the_warm_up_makes_a_small_policy_that_reads_hindsight_at_the_decisions_only(tiny):
    """DESIGN 5: flipping the verdict moves the law by > 0.1 where a carry is decided and by < 0.01 elsewhere; the habit drops carries.
    Elsewhere means on average and at 99 tokens of 100: how a processor rounds decides which few digits the warm-up leaves unsure of themselves."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny).eval(), AutoTokenizer.from_pretrained(tiny)
    assert sum(p.numel() for p in model.parameters()) < 10 ** 6
    task, rng, tokens, decisions, prefixes = envs.sums(3, 0), random.Random(1), [], [], []
    for row in task.test[:48]:
        text, _ = envs.write_sum(row, lambda column: rng.random() > 0.5, rng)
        success = verifiers.verify_gsm8k(text, row["gold"])
        happened = dict(attempt=text, digest=envs.gsm8k_digest(text), outcome="")
        messages = [hp_rlvr.hindsight_prompt(row["prompt"], happened[mode], verdict, task.check, mode)
                    for mode in happened for verdict in (success, not success)]
        prefixes.append([envs.prompt_ids(tokenizer, message, False) for message in [row["prompt"], *messages]])
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens.append(encoded.input_ids + [tokenizer.eos_token_id])
        digits = {match.start(1) for match in re.finditer(r"=\d\d, .*carry (\d)", text)}  # where there is a carry to take
        decisions.append([int(start in digits) for start, _ in encoded.offset_mapping] + [0])
    decided = train.pad(decisions, "cpu")
    ids, mask = train.pad(tokens, "cpu", torch.long), train.pad([[1] * len(one) for one in tokens], "cpu")
    with torch.no_grad():
        causal, *hindsight = [view_hidden(model, list(view), tokens) for view in zip(*prefixes)]
        for true, flipped in zip(hindsight[::2], hindsight[1::2]):
            flip = token_credit(true, flipped, model.lm_head, mask)
            elsewhere = flip[(decided == 0) & (mask == 1)]
            assert flip[decided == 1].mean() > 0.1 and elsewhere.quantile(0.99) < 0.01 and elsewhere.mean() < 0.001
        prob = token_log_probs(causal, model.lm_head, ids, mask)[0].exp()
    take = (decided == 1) & (ids == tokenizer("1", add_special_tokens=False).input_ids[-1])
    drop = (decided == 1) & (ids == tokenizer("0", add_special_tokens=False).input_ids[-1])
    assert take.sum() + drop.sum() == decided.sum() > 40
    assert prob[drop].mean() > 0.5 > prob[take].mean() > 0.2, "the habit drops the carry more often than not, and not always"


@pytest.mark.parametrize("algo", ["hp_rlvr", "grpo", "reinforce", "surprisal"])
def test_every_step_reports_every_metric_and_null_where_there_is_none(runs, algo):
    lines = metrics_of(runs[algo])
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert set(METRICS + EVALUATION) <= set(line)
        numbers = {"eval_accuracy", "eval_accuracy_sampled", "eval_format"} | ({"flip", "credit_floor"} if algo == "hp_rlvr" else set())
        if line["step"] > 0:
            numbers |= set(METRICS) - {"homogeneous_groups", "credit_mean", "credit_top20_share", "copy", "surprisal_corr"}
            numbers |= {"grpo": {"homogeneous_groups"}, "reinforce": set(), "surprisal": {"credit_mean", "credit_top20_share", "surprisal_corr"},
                        "hp_rlvr": {"credit_mean", "credit_top20_share", "surprisal_corr", "copy"}}[algo]
        assert {name for name in METRICS + EVALUATION if line[name] is not None} - {"step"} == numbers - {"step"}


@pytest.mark.parametrize("algo", ["hp_rlvr", "grpo", "reinforce", "surprisal"])
def test_metrics_agree_with_each_other(runs, algo):
    """The baseline starts at 1/2, is the value from before the step, and moves once a step; credit is what the algorithm says it is."""
    _, one, two = metrics_of(runs[algo])
    assert one["baseline"] == 0.5 and two["baseline"] == pytest.approx(0.9 * 0.5 + 0.1 * one["reward_mean"])
    for step in (one, two):
        rollouts = 4 * (8 if algo == "grpo" else 1)
        assert step["response_tokens_mean"] == pytest.approx(step["generated_tokens"] / rollouts) and step["steps_skipped"] == 0
        assert step["grad_norm"] > 0 and step["zero_gradient"] is False and 0 < step["prob_mean"] < 1 and step["entropy"] > 0
        assert (step["scored_tokens"] > 0) == (algo == "hp_rlvr") and step["trained_tokens"] > step["generated_tokens"]
        assert step["law_gap"] < 1e-5, "the loss scores another law than the one that was sampled"
        if algo == "surprisal":
            assert step["surprisal_corr"] == pytest.approx(1)
        if algo == "hp_rlvr":
            assert 0 < step["credit_mean"] < 1 and 0.2 < step["credit_top20_share"] <= 1 and 0 < step["copy"] < 1 and abs(step["surprisal_corr"]) <= 1


def test_all_algorithms_start_from_the_same_policy_and_the_same_prompts(runs):
    """Evaluated before the first step; those of one rollout a prompt even sample the same first batch."""
    starts = {algo: metrics_of(out)[0] for algo, out in runs.items()}
    assert len({(start["eval_accuracy"], start["eval_accuracy_sampled"]) for start in starts.values()}) == 1
    first = [metrics_of(runs[algo])[1] for algo in ("hp_rlvr", "reinforce", "surprisal")]
    assert len({(line["reward_mean"], line["generated_tokens"], line["prob_mean"]) for line in first}) == 1
    assert not same_weights(runs["hp_rlvr"] / "model", runs["reinforce"] / "model")


def test_a_run_leaves_config_metrics_page_checkpoint_and_a_model_that_loads(first_run, tiny, tmp_path):
    out = first_run.out
    config = json.loads((out / "config.json").read_text())
    assert config["flags"]["lr"] == 1e-3 and config["flags"]["algo"] == "hp_rlvr" and config["seed"] == 0
    assert {"torch", "transformers", "datasets", "python"} <= set(config["versions"])
    page = (out / "credit.html").read_text()
    assert "<span" in page and "P, causal" in page and "Q, hindsight" in page and "CORRECT" in page and not re.search(r"<script|https?://|src=", page)
    saved = torch.load(out / "checkpoint" / "state.pt", weights_only=True)
    assert saved["step"] == 2 and all(torch.equal(saved["model"][name], value) for name, value in weights(out / "model").items())
    assert not same_weights(tiny, out / "model"), "the policy has moved"
    assert not list(out.rglob("*.tmp"))
    assert all(word in first_run.stdout for word in ("0 -> 2", "CORRECT", str(out / "model"))) and "\x1b" not in first_run.stdout
    end = small_run(tmp_path / "next", out / "model", "--steps", 1)
    assert end[0]["eval_accuracy_sampled"] == metrics_of(out)[-1]["eval_accuracy_sampled"], "--model run/model goes on where the run ended"


def test_same_seed_same_run_and_another_seed_another_run(first_run, tiny, tmp_path):
    """C19: in another process, and whether or not the policy was warmed up before; all but times and memory."""
    assert steady(small_run(tmp_path / "same", tiny)) == steady(metrics_of(first_run.out))
    assert same_weights(tmp_path / "same" / "model", first_run.out / "model")
    other = small_run(tmp_path / "other", tiny, "--seed", 1)
    assert [line["prob_mean"] for line in other[1:]] != [line["prob_mean"] for line in metrics_of(first_run.out)[1:]]


def test_a_resumed_run_is_the_uninterrupted_run(tiny, tmp_path):
    """C17: four steps = two steps and, in a new process, --resume: bit-equal weights and optimiser, same metrics."""
    straight = small_run(tmp_path / "straight", tiny, "--steps", 4)
    small_run(tmp_path / "halves", tiny)
    with open(tmp_path / "halves" / "metrics.jsonl", "a") as log:
        log.write('{"step": 3, "from": "a run that was killed after its checkpoint"}\n{"step": 4, "half a li')
    done = program("--resume", tmp_path / "halves", "--steps", 4)
    assert done.returncode == 0, done.stderr
    assert steady(metrics_of(tmp_path / "halves")) == steady(straight)
    assert same_weights(tmp_path / "straight" / "model", tmp_path / "halves" / "model")
    one, two = (torch.load(tmp_path / name / "checkpoint" / "state.pt", weights_only=True) for name in ("straight", "halves"))
    for name, state in one["optimizer"]["state"].items():
        assert all(torch.equal(value, two["optimizer"]["state"][name][key]) for key, value in state.items())
    assert all(one[name] == two[name] for name in ("step", "baseline", "position", "skipped"))


def test_ctrl_c_saves_says_so_and_the_run_can_go_on(tiny, tmp_path, monkeypatch, capfd):
    """The signal comes in the middle of step 2 of 4; resumed, the run ends where an uninterrupted one does."""
    update, calls = train.update, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments)

    monkeypatch.setattr(train, "update", interrupted)
    flags = ["--steps", "4", "--eval-every", "0"]
    assert train.main([*SMALL, *flags, "--model", str(tiny), "--out", str(tmp_path / "run")]) == 130  # as a shell expects of a Ctrl-C
    said = capfd.readouterr()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1, 2]
    assert "interrupted" in said.err and f"--resume {tmp_path / 'run'}" in said.out
    assert torch.load(tmp_path / "run" / "checkpoint" / "state.pt", weights_only=True)["step"] == 2 and weights(tmp_path / "run" / "model")
    monkeypatch.setattr(train, "update", update)
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert steady(metrics_of(tmp_path / "run")) == steady(small_run(tmp_path / "straight", tiny, *flags))
    assert same_weights(tmp_path / "run" / "model", tmp_path / "straight" / "model")


def test_a_kill_in_the_middle_of_saving_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """C18: the file is written beside and put in place whole."""
    assert train.save_checkpoint(tmp_path, dict(step=1))

    def killed(state, file):
        file.write(b"half a checkpoint")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train.save_checkpoint(tmp_path, dict(step=2))
    assert torch.load(tmp_path / "checkpoint" / "state.pt", weights_only=True) == dict(step=1)


def test_a_run_that_is_killed_loses_at_most_the_step_since_its_last_checkpoint(tiny, tmp_path):
    """`kill -9`, alternately as soon as a half-written checkpoint is there and at a random moment after a step; then --resume, and so on. Each time
    the state on disk is whole and at most one save interval old; the run that was killed ends bit for bit as the one that was not. KILLS=20 for more."""
    kills = int(os.environ.get("KILLS", 2))
    flags = ["--steps", 5 * kills, "--save-every", 1, "--eval-every", 0, "--prompts-per-step", 2]
    straight, out, random_, done = small_run(tmp_path / "straight", tiny, *flags), tmp_path / "killed", random.Random(kills), 0
    for kill in range(kills):
        arguments = ["--resume", out] if kill else [*SMALL, "--model", tiny, "--out", out, *flags]
        process = subprocess.Popen([sys.executable, "train.py", *map(str, arguments)], cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        state, half, log = out / "checkpoint" / "state.pt", out / "checkpoint" / "state.tmp", out / "metrics.jsonl"
        half.unlink(missing_ok=True)  # of the last kill
        before = log.stat().st_size if log.exists() else 0
        moment = (lambda: log.exists() and log.stat().st_size > before) if kill % 2 else half.exists
        while process.poll() is None and not moment():
            pass
        if kill % 2:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random_.uniform(0, 0.5))
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
        saved = torch.load(state, weights_only=True)["step"] if state.exists() else 0
        assert max(done, train.read_metrics(out)[-1]["step"] - 1) <= saved
        done = saved
    finished = program("--resume", out)
    assert finished.returncode == 0, finished.stderr
    assert steady(metrics_of(out)) == steady(straight) and same_weights(out / "model", tmp_path / "straight" / "model")


@pytest.fixture(scope="session")
def spied(tiny, tmp_path_factory):
    """A run whose traffic is written down: prompts and responses of `sample`, texts before the judge, prefixes and responses that are scored."""
    seen = SimpleNamespace(prompts=[], sampled=[], judged=[], prefixes=[], scored=[], batches=[])

    def sample(policy, prompts, *rest, original=train.sample):
        responses, log_probs = original(policy, prompts, *rest)
        seen.prompts += prompts
        seen.sampled += responses
        seen.batches.append((rest[1], prompts, responses))
        return responses, log_probs

    def view(model, prefixes, responses):
        seen.prefixes += prefixes
        seen.scored += responses
        return view_hidden(model, prefixes, responses)

    def judge(text, gold, original=verifiers.verify_gsm8k):
        seen.judged.append(text)
        return original(text, gold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "sample", sample)
        patch.setattr(train, "view_hidden", view)
        patch.setattr(verifiers, "verify_gsm8k", judge)
        small_run(tmp_path_factory.mktemp("spied") / "run", tiny)
    return seen


def test_hindsight_never_reaches_sampling(spied, tiny):
    """And is scored: the hindsight view ends in the same generation prompt as the causal one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert spied.prompts and not any("Hindsight" in tokenizer.decode(prompt) for prompt in spied.prompts)
    scored = [tokenizer.decode(prefix) for prefix in spied.prefixes]
    assert sum("### Hindsight" in text for text in scored) > 10
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in scored if text != "1 + 1 = 2")


def test_the_judge_sees_the_response_up_to_its_first_eos_and_nothing_of_the_prompt(spied, tiny):
    """C20."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    finished = [ids for ids in spied.sampled if ids[-1] == tokenizer.eos_token_id]
    assert all(tokenizer.eos_token_id not in ids[:-1] for ids in spied.sampled)
    assert sorted(spied.judged) == sorted(tokenizer.decode(ids[:-1]) for ids in finished)
    assert not any("What is" in text or "<|" in text for text in spied.judged)


def test_only_sampled_ids_are_scored_and_trained(spied):
    """C15, in the whole loop."""
    sampled = set(map(tuple, spied.sampled))
    scored = {tuple(ids) for ids in spied.scored} - {(0,)}  # (0,): the check of the LM head when the model is loaded
    assert scored and scored <= sampled


def test_evaluations_ask_the_same_prompts_greedily_and_sampled_and_disturb_nothing(spied):
    """Each of the three evaluations: same rows, temperature 0 and then T, sampled from the same seed."""
    evaluations = [batch for batch in spied.batches if len(batch[1]) == 6]
    assert [temperature for temperature, _, _ in evaluations] == [0, 1] * 3
    assert len({str(prompts) for _, prompts, _ in evaluations}) == 1
    training = [prompts for _, prompts, _ in spied.batches if len(prompts) == 4]
    assert len(training) == 2 and training[0] != training[1] and not any(prompt in evaluations[0][1] for prompt in sum(training, []))


def test_how_often_a_run_is_evaluated_changes_nothing_else(first_run, tiny, tmp_path):
    rare = small_run(tmp_path / "rare", tiny, "--eval-every", 0)
    step = lambda line: {name: line[name] for name in METRICS if not name.startswith("seconds_") and name != "peak_memory_gb"}
    assert step(rare[1]) == step(metrics_of(first_run.out)[1]) and "flip" not in rare[1] and rare[2]["flip"] is not None
    assert same_weights(tmp_path / "rare" / "model", first_run.out / "model")


def test_truncated_responses_are_trained_unless_masked_and_a_batch_without_tokens_makes_no_step(tiny, tmp_path):
    """C09: all responses are cut after five tokens; they count as failures either way."""
    trained = small_run(tmp_path / "trained", tiny, "--max-new-tokens", 5)
    masked = small_run(tmp_path / "masked", tiny, "--max-new-tokens", 5, "--mask-truncated")
    for step in trained[1:] + masked[1:]:
        assert step["truncated"] == 1 and step["reward_mean"] == 0 and step["generated_tokens"] == 20
    assert all(step["grad_norm"] > 0 and not step["zero_gradient"] for step in trained[1:]) and trained[2]["steps_skipped"] == 0
    assert all(step["grad_norm"] is None and step["zero_gradient"] for step in masked[1:]) and masked[2]["steps_skipped"] == 2
    assert not same_weights(tiny, tmp_path / "trained" / "model") and same_weights(tiny, tmp_path / "masked" / "model")
    assert trained[2]["baseline"] == masked[2]["baseline"] == 0.45


@pytest.mark.parametrize("flags", [("--hindsight", "digest"), ("--hindsight", "outcome"), ("--contrast",), ("--credit-scale", "batch"), ("--credit-scale", "raw")])
def test_hindsight_texts_and_credit_scales_change_the_step_but_not_the_rollouts(first_run, tiny, tmp_path, flags):
    ours, default = small_run(tmp_path / "run", tiny, *flags, "--steps", 1)[1], metrics_of(first_run.out)[1]
    assert (ours["reward_mean"], ours["generated_tokens"]) == (default["reward_mean"], default["generated_tokens"])
    assert ours["grad_norm"] != default["grad_norm"] and ours["grad_norm"] > 0
    assert (ours["credit_mean"] == default["credit_mean"]) == (flags[0] == "--credit-scale"), "credit is reported as it is, before scaling"


def test_homogeneous_groups_are_counted_and_a_batch_of_them_has_no_gradient(tiny, tmp_path):
    """GRPO where every response is cut, hence wrong: all groups are alike."""
    steps = small_run(tmp_path / "run", tiny, "--algo", "grpo", "--group-size", 2, "--max-new-tokens", 5)[1:]
    assert all(step["homogeneous_groups"] == 1 and step["zero_gradient"] and step["grad_norm"] < 1e-12 for step in steps)
    assert same_weights(tiny, tmp_path / "run" / "model")


def test_prompts_that_are_too_long_are_dropped_and_counted(tiny, tmp_path):
    """C22: one row in four is longer than the context; --data is one file, so that its last rows are held out."""
    rows = gsm8k_rows(20)
    for row in rows[:16:4]:
        row["question"] += " Think well." * 60
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    flags = ["--task", "gsm8k", "--data", data, "--max-context", 300, "--max-new-tokens", 5, "--prompts-per-step", 16]
    for step in small_run(tmp_path / "run", tiny, *flags)[1:]:
        assert step["prompts_dropped"] == 4 and step["generated_tokens"] == pytest.approx(12 * step["response_tokens_mean"])


def test_the_rule_by_which_rows_are_held_out_is_printed(tiny, tmp_path, capfd):
    data = write_jsonl(tmp_path / "data.jsonl", gsm8k_rows(15))
    small_run(tmp_path / "run", tiny, "--task", "gsm8k", "--data", data, "--max-new-tokens", 3, "--steps", 1)
    said = capfd.readouterr().out
    assert "last 3 rows are held out" in said and "3 held-out rows" in said, "in the report: rows there are, not rows asked for"


def test_weights_are_fp32_and_small_steps_arrive_in_the_saved_model(tiny, tmp_path, monkeypatch):
    """C07: a checkpoint stored in bf16, forward in bf16, constant gradient, lr 1e-6, 200 steps: weights of 1 move by 2e-4; in bf16 they
    would not move at all. Dropout in the checkpoint's config is turned off."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    small_model(vocab=len(tokenizer), attention_dropout=0.5).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    tokenizer.save_pretrained(tmp_path / "bf16")
    forward, load = [], train.load_policy

    def watched(*arguments):
        policy = load(*arguments)
        for weight in policy.model.parameters():
            weight.register_hook(lambda gradient: torch.full_like(gradient, 1e-5))
        policy.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: forward.append(output.dtype))
        assert policy.model.config.attention_dropout == 0 and {p.dtype for p in policy.model.parameters()} == {torch.float32}
        return policy

    monkeypatch.setattr(train, "load_policy", watched)
    small_run(tmp_path / "run", tmp_path / "bf16", "--steps", 200, "--lr", "1e-6", "--algo", "reinforce", "--dtype", "bf16", "--columns", 2,
              "--prompts-per-step", 1, "--max-new-tokens", 1, "--eval-size", 1, "--eval-every", 0)
    before, after = weights(tmp_path / "bf16"), weights(tmp_path / "run" / "model")
    assert (before["model.norm.weight"] == 1).all()
    for name in before:
        close(before[name] - after[name], torch.full_like(before[name], 2e-4), atol=1e-5)
    assert set(forward) == {torch.bfloat16}
    stored = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert stored["dtype"] == "float32"


def test_bf16_weights_of_the_8_bit_optimiser_move_by_the_right_amount_on_average():
    """C07 for --optimizer adamw8bit: the same 200 steps of 1e-6 on weights of 1, whose neighbour in bf16 is 0.004 away. Rounding to the nearest would
    leave them all; stochastic rounding moves a twentieth of them, so that their mean moves by 2e-4, within four standard errors."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    torch.compiler.set_stance("force_eager")  # torchao compiles its step: the same arithmetic, half a minute later
    try:
        optimizer = train.make_optimizer(SimpleNamespace(model=layer), SimpleNamespace(lr=1e-6, optimizer="adamw8bit"))
        for _ in range(200):
            layer.weight.grad = torch.full_like(layer.weight, 1e-5)
            optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    moved, ulp = 1 - layer.weight.float(), 2 ** -8
    assert abs(moved.mean().item() - 2e-4) < 4 * math.sqrt(2e-4 * ulp / moved.numel())
    assert 0.9 < (moved == 0).float().mean() < 0.97
    states = optimizer.state[layer.weight]
    assert all(states[name].codes.dtype == torch.uint8 for name in ("exp_avg", "exp_avg_sq"))


def test_the_page_escapes_what_a_model_writes(tmp_path):
    shown = dict(prompt="<script>p()</script>", reward=1.0, advantage=0.5, tokens=["<script>t()</script>", "\"'&"], credit=[0.3, 1.0], mask=[1, 1],
                 tops=[[[("<b>\"x", 0.9)], [("y", 0.1)]]] * 2)
    train.write_credit_html(tmp_path / "credit.html", [shown], "title")
    page = (tmp_path / "credit.html").read_text()
    assert "<script" not in page and "<b>" not in page and "&lt;script&gt;t()" in page and 'title="' in page


# --------------------------------------------------------------------------------------------------------------------------- bad input

def contents(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(arguments, capfd) -> str:
    """What train.py says on refusing these arguments: one line on stderr, exit code 2."""
    capfd.readouterr()
    assert train.main([str(argument) for argument in arguments]) == 2
    said = capfd.readouterr().err
    assert said.endswith("\n") and said.count("\n") == 1 and "\r" not in said and len(said) < 500, said
    return said


@pytest.mark.parametrize("flags, named", [
    ("--task chess", "chess"), ("--colour blue", "--colour"), ("--steps many", "--steps"), ("--temperature 0", "--temperature"),
    ("--temperature nan", "--temperature"), ("--prompts-per-step 0", "--prompts-per-step"), ("--steps 0", "--steps"), ("--lr -1", "--lr"),
    ("--max-new-tokens 0", "--max-new-tokens"), ("--baseline-decay 1", "--baseline-decay"), ("--eval-every -1", "--eval-every"),
    ("--algo grpo --group-size 1", "--group-size"), ("--algo reinforce --contrast", "--contrast"), ("--columns 99", "--columns"), ("--device abacus", "abacus"), ("--task gsm8k", "--model"),
    ("--model no/such/folder", "no/such/folder"), ("--resume no/such/run", "no/such/run")])
def test_a_flag_that_cannot_work_is_refused_in_one_line_that_names_it(flags, named, tmp_path, capfd):
    """C02 for --temperature 0."""
    out = [] if "--resume" in flags else ["--out", tmp_path / "run"]
    assert named in refused([*flags.split(), *out], capfd)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "run" / "tiny").exists()


@pytest.mark.parametrize("flags, named", [("--temperature 0", "--temperature"), ("--model some/model --task gsm8k --data {data}", "broken.jsonl")])
def test_the_program_itself_exits_with_2_and_one_line(flags, named, tmp_path):
    """In a process of its own, where libraries may write to stderr too."""
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1?"\nno json\n')
    done = program(*flags.format(data=tmp_path / "broken.jsonl").split(), "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and named in done.stderr, done.stderr


@pytest.mark.parametrize("rows, named", [
    ([dict(question="1+1?", reply="2")], ["row 1", "answer"]),
    ([*gsm8k_rows(3), dict(question="1+1?")], ["row 4", "answer"]),
    ([*gsm8k_rows(3), dict(answer="#### 2")], ["row 4", "question"]),
    ([*gsm8k_rows(3), dict(question="1+1?", answer="two")], ["row 4"]),
    ([], [])], ids=["field of all rows", "answer of one row", "question of one row", "no number in the answer", "no rows"])
def test_data_that_lacks_something_is_refused_with_the_row_and_the_field(rows, named, tiny, tmp_path, capfd):
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    said = refused(["--model", tiny, "--task", "gsm8k", "--data", data, "--out", tmp_path / "run"], capfd)
    assert all(word in said for word in ["data.jsonl", *named])


def test_data_that_is_missing_or_for_testing_only_is_refused(tiny, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("1+1?")
    write_jsonl(tmp_path / "tests" / "test.jsonl", gsm8k_rows(5))
    train_file = write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(10))
    start = ["--model", tiny, "--task", "gsm8k", "--out", tmp_path / "run", "--data"]
    for name in ("missing.jsonl", "missing", "empty", "notes.txt"):
        assert name in refused([*start, tmp_path / name], capfd)
    assert "never trained on" in refused([*start, tmp_path / "tests"], capfd)
    assert "missing.jsonl" in refused([*start, train_file, "--eval-data", tmp_path / "missing.jsonl"], capfd)
    assert not (tmp_path / "run").exists()


def test_a_model_folder_that_is_incomplete_or_damaged_is_refused(tiny, tmp_path, capfd):
    """No weights, half of the weights, no tokenizer, a tokenizer without a chat template; weights that are not numbers."""
    for name, spoil in {"weights": lambda f: (f / "model.safetensors").unlink(),
                        "half": lambda f: (f / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:100000]),
                        "config": lambda f: (f / "config.json").write_text("{"),
                        "tokenizer": lambda f: [(f / one).unlink() for one in ("tokenizer.json", "tokenizer_config.json")],
                        "template": lambda f: (f / "chat_template.jinja").unlink()}.items():
        shutil.copytree(tiny, tmp_path / name)
        spoil(tmp_path / name)
        said = refused(["--model", tmp_path / name, "--out", tmp_path / f"run-{name}"], capfd)
        assert str(tmp_path / name) in said and ("chat template" in said) == (name == "template")
    damaged = AutoModelForCausalLM.from_pretrained(tiny)
    damaged.model.norm.weight.data[0] = math.nan
    damaged.save_pretrained(tmp_path / "nan"), AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "nan")
    assert "not finite" in refused(["--model", tmp_path / "nan", "--out", tmp_path / "run-nan"], capfd)


def test_a_context_that_holds_no_prompt_is_refused(tiny, tmp_path, capfd):
    """C22: every prompt is dropped, so that there is nothing to evaluate or to train on."""
    assert "--max-context" in refused(["--model", tiny, *SMALL, "--max-context", "20", "--out", tmp_path / "run"], capfd).replace("\r", "")


def test_a_folder_that_holds_a_run_is_never_written_into(first_run, tiny, tmp_path, capfd):
    before = contents(first_run.out)
    said = refused(["--model", tiny, *SMALL, "--out", first_run.out], capfd)
    assert str(first_run.out) in said and "--resume" in said
    assert contents(first_run.out) == before
    (tmp_path / "file").write_text("mine")
    assert "file" in refused(["--model", tiny, *SMALL, "--out", tmp_path / "file"], capfd)
    assert "file" in refused(["--model", tiny, *SMALL, "--out", tmp_path / "file" / "run"], capfd)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_start_that_was_refused_does_not_block_its_folder(tiny, tmp_path, capfd):
    """The same command with its mistake mended runs."""
    refused(["--model", tmp_path / "typo", *SMALL, "--out", tmp_path / "run"], capfd)
    assert len(small_run(tmp_path / "run", tiny, "--steps", 1)) == 2


@pytest.mark.parametrize("flags", ["--lr 0.5", "--seed 7", "--algo grpo", "--thinking", "--out elsewhere", "--prompts-per-step 9"])
def test_resume_refuses_flags_that_would_change_the_run_by_name(first_run, flags, capfd):
    before = contents(first_run.out)
    assert flags.split()[0] in refused(["--resume", first_run.out, *flags.split()], capfd)
    assert contents(first_run.out) == before


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_again(first_run, tmp_path, capfd):
    """A kill in the first steps, with half a checkpoint and half a line of metrics: the same run from its beginning, without warming up again."""
    shutil.copytree(first_run.out, tmp_path / "run")
    os.replace(tmp_path / "run" / "checkpoint" / "state.pt", tmp_path / "run" / "checkpoint" / "state.tmp")
    (tmp_path / "run" / "metrics.jsonl").write_text((first_run.out / "metrics.jsonl").read_text() + '{"step": 9')
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert "before its first checkpoint" in capfd.readouterr().out
    assert steady(metrics_of(tmp_path / "run")) == steady(metrics_of(first_run.out)) and same_weights(tmp_path / "run" / "model", first_run.out / "model")


def test_a_full_disk_is_one_line_exit_code_2_and_leaves_what_was_saved(first_run, tmp_path, capfd):
    """No file may grow beyond a megabyte: neither checkpoint nor model can be written. The last ones stay, and the run does not claim success."""
    shutil.copytree(first_run.out, tmp_path / "run")
    before = {path: data for path, data in contents(tmp_path / "run").items() if path.parent.name in ("checkpoint", "model")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        code = train.main(["--resume", str(tmp_path / "run"), "--steps", "3"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capfd.readouterr()
    assert {path: data for path, data in contents(tmp_path / "run").items() if path.parent.name in ("checkpoint", "model")} == before
    assert "could not save" in said.err and "Traceback" not in said.err and code == 2


def test_non_finite_steps_are_skipped_and_counted_and_three_in_a_row_end_the_run(tiny, tmp_path, monkeypatch, capfd):
    loss, calls = train.policy_loss, []

    def bad(at):
        def sometimes(*arguments):
            calls.append(1)
            return loss(*arguments) * (float("nan") if len(calls) in at else 1)
        calls.clear()
        monkeypatch.setattr(train, "policy_loss", sometimes)
    flags = ["--eval-every", "0", "--save-every", "1"]
    bad({2, 3, 5})
    assert [line["steps_skipped"] for line in small_run(tmp_path / "some", tiny, *flags, "--steps", 6)] == [None, 0, 1, 2, 2, 3, 3]
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "some" / "model").values())
    bad({2, 3, 4})
    capfd.readouterr()
    assert train.main([*SMALL, *flags, "--steps", "6", "--model", str(tiny), "--out", str(tmp_path / "all")]) == 1
    said = capfd.readouterr().err
    assert "three steps in a row" in said and "--lr" in said and "Traceback" not in said
    assert torch.load(tmp_path / "all" / "checkpoint" / "state.pt", weights_only=True)["step"] == 3


def test_too_little_gpu_memory_is_answered_with_the_flags_that_need_less(tiny, tmp_path, monkeypatch, capfd):
    def too_much(*arguments, **named):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(train, "train_step", too_much)
    assert train.main([*SMALL, "--model", str(tiny), "--out", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said and all(flag in said for flag in ("--tokens-per-microbatch", "--prompts-per-step", "--max-new-tokens", "--optimizer adamw8bit", "--resume"))


# ------------------------------------------------------------------------------------------------------------------------- text games

ALFWORLD = SHARED / "data" / "alfworld"
needs_alfworld = pytest.mark.skipif(not ALFWORLD.exists() or importlib.util.find_spec("alfworld") is None,
                                    reason="needs ../shared/data/alfworld and the package alfworld")


class Stub:
    """A game of two useless actions and one that ends it, answering the way it is told to."""
    def __init__(self, won=False, done=False, first=("You see a desk 1 and a drawer 10.", ["go to desk 1", "look", "move mug 1 to desk 1"])):
        self.won, self.done, self.first, self.played = won, done, first, []

    def reset(self, row):
        return self.first

    def step(self, action):
        self.played.append(action)
        return "Nothing happens.", self.first[1], self.won, self.done

    def close(self):
        self.closed = True


def stub_task(make_engine=Stub, turns=3):
    return envs.Games("stub", [], [], make_engine, lambda row: turns, reminder="End with `Action: <action>`.")


def play(task, row, responses, finished=True):
    [episode] = task.start([row])
    messages = [task.step([episode], [response], [finished])[0] for response in responses]
    return episode, messages


# -------------------------------------------------------------------------------------------------------------- actions in a response

ACTIONS = ["go to desk 1", "go to drawer 1", "go to drawer 10", "inventory", "look", "move mug 1 to desk 1", "take mug 1 from desk 1"]


@pytest.mark.parametrize("response, action", [
    ("go to desk 1", "go to desk 1"),
    ("> go to desk 1", "go to desk 1"),                                                     # D02
    ("Action: Go to Desk 1.", "go to desk 1"),
    ("I need the desk.\n\n**Action:** `go to  desk 1`", "go to desk 1"),
    ("**Action: go to desk 1**", "go to desk 1"),
    ("Action:\ngo to desk 1", "go to desk 1"),
    ("```\ngo to desk 1\n```", "go to desk 1"),
    ("Action: <go to desk 1>", "go to desk 1"),
    ("I look first.\n> go to desk 1", "go to desk 1"),
    ("think: I need a mug", None),
    ("> think: I need a mug", None),
    ("think: go to desk 1", None),
    ("Action: think: go to desk 1", None),
    ("<action>go to desk 1</action>", "go to desk 1"),                                      # D03
    ("I choose <action> go to desk 1 </action> now.", "go to desk 1"),
    ("<action>\ngo to desk 1\n</action>", "go to desk 1"),
    ("<action>go to desk 1", "go to desk 1"),                                               # cut: the tag ends with its line
    ("<action>go to desk 1\nand then more", "go to desk 1"),
    ("<action>go to des", None),
    ("[action]look[/action]", "look"),
    ("[ACTION]Look.[/ACTION]", "look"),
    ("", None), ("\n \n", None), ("Action:", None), ("<action></action>", None), ("...", None),
    ("Action: look\nAction: inventory", "inventory"),                                       # the last mark wins,
    ("Action: look\nAction: fly", None),                                                    # and none stands in for it
    ("Action: look\nNow go to desk 1", "look"),
    ("Action: look Action: inventory", None),
    ("Action: <action>look</action>", "look"),
    ("go to drawer 1", "go to drawer 1"), ("go to drawer 10", "go to drawer 10"), ("go to drawer 100", None), ("go to drawer", None),
    ("go to drawer 1.", "go to drawer 1"), ("go to drawer 1 0", None),
    ("I could look, or go to desk 1, or take mug 1 from desk 1.", None),                    # never a part of a sentence
    ("Let me go to desk 1", None), ("Action: go to desk 1 and look", None), ("Action: look, inventory", None),
    ("go to desk 1\nlook", None),                                                           # a list is not a choice
    ("\n".join(ACTIONS), None), (", ".join(ACTIONS), None),
    ("look\nlook", "look"),
    ("put mug 1 in/on desk 1", "move mug 1 to desk 1"), ("put mug 1 on desk 1", "move mug 1 to desk 1"),   # D01
    ("Action: put mug 1 in desk 1.", "move mug 1 to desk 1"), ("put mug 2 in/on desk 1", None), ("put mug 1 in/on desk 10", None),
    ("<think>Action: look</think>", None), ("<think>Action: look", None), ("<think>Action: look</think>\nAction: inventory", "inventory"),
    ("Action: look</think>\nAction: inventory", "inventory"), ("Action: look</think>", None), ("<think>a</think>b</think>\nlook", "look"),
])
def test_parse_action(response, action):
    assert envs.parse_action(response, ACTIONS) == action


def test_parse_action_is_membership():
    """Whatever the text, the result is None or admissible; every admissible action is read back from every documented form."""
    rng = random.Random(0)
    pieces = ACTIONS + ["Action:", "action", "<action>", "</action>", "[action]", "<think>", "</think>", ">", "\n", " ", ".", "*", "`", "put", "in/on",
                     "drawer", "1", "10", "mug 1", "desk 1", "ACTION :", "think:", "\u201c", "\x00", "{}", "\\", "ß", "İ"]
    for _ in range(5000):
        text = "".join(rng.choice(pieces) + rng.choice(["", " ", "\n"]) for _ in range(rng.randrange(12)))
        admissible = rng.sample(ACTIONS, rng.randrange(len(ACTIONS) + 1))
        action = envs.parse_action(text, admissible)
        assert action is None or action in admissible
    for action in ACTIONS:
        for form in ("{}", "> {}", "Action: {}", "action: {}.", "<action>{}</action>", "[action]{}[/action]", "So.\n\n**Action:** `{}`", "<think>look</think>{}"):
            assert envs.parse_action(form.format(action), ACTIONS) == action
            assert envs.parse_action(form.format(action.upper()), ACTIONS) == action
            assert envs.parse_action(form.format(action), [other for other in ACTIONS if other != action]) is None
    started = time.perf_counter()
    for piece in ("look ", "\n", "Action:\n", "<action>", "<action> \n", "> ", "action ", " ", "</think>", "put a in "):
        assert envs.parse_action("Action: look now" + piece * 50_000 + "x", ACTIONS) is None
    assert time.perf_counter() - started < 20  # no piece takes quadratic time


# ------------------------------------------------------------------------------------------------------------------------- the episode

def test_invalid_turn_costs_a_step_and_spares_the_engine():
    """D02-D04: no action of another's choosing is played, the model is told, the turn is counted; "Nothing happens." is a valid turn's answer."""
    task = stub_task()
    episode, messages = play(task, {}, ["I would rather sing.", "", "Action: look"])
    assert episode.engine.played == ["look"] and episode.invalid_actions == 2 and episode.ended == "limit" and episode.reward == 0
    assert "not an admissible action" in messages[0] and "go to desk 1, look" in messages[0] and messages[2] is None
    assert episode.actions[0][0] == "i would rather sing" and episode.actions[1][0] == "(none)" and episode.actions[2] == ("look", "Nothing happens.")
    assert not task.well_formed(episode) and episode.responses == ["I would rather sing.", "", "Action: look"]
    episode, _ = play(task, {}, ["look", "look", "look"])
    assert episode.invalid_actions == 0 and episode.ended == "limit" and task.well_formed(episode)


def test_cut_turn_is_no_action():
    episode, messages = play(stub_task(), {}, ["Action: look"], finished=False)
    assert episode.engine.played == [] and episode.invalid_actions == 1 and "cut" in messages[0] and not episode.truncated


def test_endings():
    """D05, D08: done is not won; our own limit loses; a win on the last turn is a win; lists of length 1 are unwrapped."""
    for won, done, ended, reward in [(True, True, "won", 1), (False, True, "lost", 0), ([True], [True], "won", 1), ([False], [True], "lost", 0),
                                     ([False], [False], "", 0), ((True,), (True,), "won", 1)]:
        episode, messages = play(stub_task(lambda: Stub(won, done)), {}, ["look"])
        assert (episode.ended, episode.reward) == (ended, reward) and (messages[0] is None) == bool(ended)
    episode, _ = play(stub_task(lambda: Stub([False], [False]), turns=1), {}, ["look"])
    assert (episode.ended, episode.reward) == ("limit", 0)
    episode, _ = play(stub_task(lambda: Stub(True, True), turns=1), {}, ["look"])
    assert (episode.ended, episode.reward) == ("won", 1)


def test_equal_rows_are_a_group():
    """D06: engines that show different first observations, or other actions, of one game are an error that says so."""
    firsts = iter([("You see a desk 1.", ["look"]), ("You see a desk 2.", ["look"])])
    with pytest.raises(RuntimeError, match="different first observations"):
        stub_task(lambda: Stub(first=next(firsts))).start([dict(game="a"), dict(game="a")])
    firsts = iter([("You see a desk 1.", ["look"]), ("You see a desk 2.", ["look"])])
    assert len(stub_task(lambda: Stub(first=next(firsts))).start([dict(game="a"), dict(game="b")])) == 2


def test_engines_are_reused():
    made = []
    task = stub_task(lambda: made.append(Stub()) or made[-1], turns=1)
    first = task.start([{}, {}])
    second = task.start([{}])  # the first two still play
    assert len(made) == 3 and len({id(episode.engine) for episode in first + second}) == 3
    task.step(first, ["look"] * 2, [True] * 2)
    second[0].ended = "context"  # the trainer stops an episode
    third = task.start([{}, {}, {}])
    assert len(made) == 3 and len({id(episode.engine) for episode in third}) == 3
    task.close()
    assert all(engine.closed for engine in made) and task.engines == []
    assert len(task.start([{}])) == 1 and len(made) == 4  # usable again after close


def test_failed_engine():
    """An engine that breaks down is the judge's failure, not the model's, and is not used again."""
    class Broken(Stub):
        def step(self, action):
            raise envs.EngineFailed("gone")
    task = stub_task(Broken)
    episode, messages = play(task, {}, ["look"])
    assert messages == [None] and episode.judge_failed and episode.reward == 0 and task.engines == [] and episode.engine.closed


# ----------------------------------------------------------------------------------------------------------------------------- household

def right(row):
    return lambda i, options: row["moves"][i][1]


@pytest.mark.parametrize("objects", [2, 3])
def test_household_outcomes(objects):
    """The right decisions win on the last permitted turn; any wrong one, or any lost turn, loses."""
    task = envs.household(objects, 0)
    rng = random.Random(0)
    for row in task.train[:60]:
        episode, turns, decisions = task.play(row, right(row), rng)
        assert (episode.ended, episode.reward, episode.invalid_actions, len(turns)) == ("won", 1, 0, 2 * objects)
        assert decisions == [place for _, place in row["moves"]]
        wrong = rng.randrange(objects)
        episode, turns, _ = task.play(row, lambda i, options: next(place for place in options if (place != row["moves"][i][1]) == (i == wrong)), rng)
        assert (episode.ended, episode.reward, episode.invalid_actions, len(turns)) == ("limit", 0, 0, 2 * objects)
    [episode] = task.start([row])
    [message] = task.step([episode], ["Hm."], [True])
    assert "not an admissible action" in message
    for _, response in task.play(row, right(row), rng)[1]:
        [message] = task.step([episode], [response], [True]) if message else [None]
    assert (episode.ended, episode.reward) == ("limit", 0)


def test_household_texts():
    task = envs.household(2, 0)
    row = dict(moves=[["lamp", "desk"], ["soap", "tub"]])
    episode, turns, _ = task.play(row, right(row), random.Random(0))
    assert "Your task is to: put lamp in desk, soap in tub." in episode.prompt and "Admissible actions: take lamp, take soap." in episode.prompt
    assert task.happened(episode, "digest") == "1. take lamp\n2. move lamp to desk\n3. take soap\n4. move soap to tub"
    assert task.happened(episode, "attempt").splitlines()[1] == "2. move lamp to desk -> You move lamp to desk."
    assert task.check == "The episode was played to its end."
    [episode] = task.start([row])
    task.step([episode], ["Action: take pen"], [True])
    assert episode.invalid_actions == 1 and envs.parse_action("move lamp to desk", episode.admissible) is None
    long = envs.Episode({}, "", actions=[("look", "You see\na desk. " * 50)])
    assert "\n" not in task.happened(long, "attempt") and len(task.happened(long, "attempt")) < 180


def test_household_rows():
    rows = envs.household(2, 0).train
    assert rows == envs.household(2, 0).train != envs.household(2, 1).train
    for objects in (2, 3):
        task = envs.household(objects, 3)
        assert {item for row in task.test for item, _ in row["moves"]} <= {item for row in task.train for item, _ in row["moves"]}
        keys = [json.dumps(row) for row in task.train + task.test]
        assert len(set(keys)) == len(keys) and task.test
        assert all(len({item for item, _ in row["moves"]}) == objects for row in task.train)


def test_household_habit_and_group():
    """A scripted habit succeeds about 0.4^k; the same row shows the same first observation to a group."""
    for objects in (2, 3):
        task, rng = envs.household(objects, 0), random.Random(1)
        won = 0
        for _ in range(400):
            row = rng.choice(task.train)
            [episode] = task.start([row])
            for _, response in task.habit_demo(row, rng):
                task.step([episode], [response], [True])
            won += episode.reward
        assert abs(won / 400 - 0.4 ** objects) < 0.08
    group = task.start([task.train[0]] * 8)
    assert len({episode.prompt for episode in group}) == 1 and len({id(episode.engine) for episode in group}) == 8


def test_household_demonstrations():
    """Hindsight targets: after CORRECT the same decisions, after INCORRECT exactly one other, each equally often; fresh wording."""
    task, rng = envs.household(3, 0), random.Random(2)
    read = lambda turns: [response.rpartition(" to ")[2] for _, response in turns[1::2]]
    row, changes = task.train[0], [0, 0, 0]
    decisions = [task.train[0]["moves"][0][1], envs.OTHER[row["moves"][1][1]], row["moves"][2][1]]
    assert read(task.hindsight_demo(row, decisions, True, rng)) == decisions
    for _ in range(300):
        redone = read(task.hindsight_demo(row, decisions, False, rng))
        differ = [i for i in range(3) if redone[i] != decisions[i]]
        assert len(differ) == 1 and redone[differ[0]] == envs.OTHER[decisions[differ[0]]]
        changes[differ[0]] += 1
    assert min(changes) > 60
    assert len({task.habit_demo(row, rng)[0][1] for _ in range(50)}) > 10  # wording is free
    shown = lambda prompt, happened, success, check, view: f"{prompt}|{view}|{success}|{happened}"
    for view in ("causal", "attempt", "digest", "outcome", "null"):
        turns = task.demonstration(rng, view, shown)
        assert len(turns) == 6 and all(isinstance(text, str) for turn in turns for text in turn)
        assert (f"|{view}|" in turns[0][0]) == (view != "causal")
    for wanted in (True, False):
        assert (task.decisions_with_outcome(row, 0.5, wanted, rng) == [place for _, place in row["moves"]]) == wanted
    assert task.demonstration(random.Random(5), "attempt", shown) == task.demonstration(random.Random(5), "attempt", shown)


# ------------------------------------------------------------------------------------------------------------------------------ ALFWorld

@pytest.fixture(scope="module")
def alfworld():
    task = envs.alfworld(str(ALFWORLD), None, 30)
    yield task
    task.close()


def walkthrough(row):
    return json.loads(Path(row["game"]).read_text())["walkthrough"]


def follow(task, rows, plans):
    """Play every plan to its end, the episodes side by side."""
    episodes = task.start(rows)
    for turn in range(max(map(len, plans))):
        alive = [i for i, episode in enumerate(episodes) if not episode.ended and turn < len(plans[i])]
        task.step([episodes[i] for i in alive], [f"I know what to do.\nAction: {plans[i][turn]}" for i in alive], [True] * len(alive))
    return episodes


@needs_alfworld
def test_alfworld_walkthroughs(alfworld):
    """All 48 games: the walkthrough wins with its last action and not before; what the model reads holds task, observation and actions."""
    rows = [row for split in envs.alfworld_rows(str(ALFWORLD)).values() for row in split]
    assert len(rows) == 48 and len(alfworld.train) == 24 and len(alfworld.test) == 12
    for first in range(0, 48, 12):
        batch = rows[first:first + 12]
        plans = [walkthrough(row) for row in batch]
        episodes = follow(alfworld, batch, [plan[:-1] for plan in plans])
        for episode, plan in zip(episodes, plans):
            assert (episode.ended, episode.reward, episode.invalid_actions) == ("", 0, 0)
            assert "Your task is to: " in episode.prompt and plan[0] in episode.prompt and "Welcome" not in episode.prompt
        messages = alfworld.step(episodes, [f"Action: {plan[-1]}" for plan in plans], [True] * len(episodes))
        assert messages == [None] * len(episodes)
        for episode, plan in zip(episodes, plans):
            assert (episode.ended, episode.reward, [action for action, _ in episode.actions]) == ("won", 1, plan)
    assert len(alfworld.engines) == 12  # used again


@needs_alfworld
def test_alfworld_rules(alfworld):
    """D01, D03-D06 on the real engine: old put, invalid turns, "Nothing happens.", the limit, and equal groups, also from other processes."""
    row = next(row for row in alfworld.train if "pick_and_place" in row["game"])
    plan = walkthrough(row)
    assert plan[-1].startswith("move ")
    item, _, place = plan[-1].removeprefix("move ").partition(" to ")
    group = alfworld.start([row] * 4)
    assert len({episode.prompt for episode in group}) == 1
    old, invalid, substitute, cut = group
    for action in plan[:-1]:
        alfworld.step([old], [f"> {action}"], [True])
    [message] = alfworld.step([old], [f"put {item} in/on {place} 7"], [True])
    assert old.invalid_actions == 1 and not old.ended and "not an admissible action" in message
    alfworld.step([old], [f"put {item} in/on {place}"], [True])
    assert old.ended == "won" and old.actions[-1][0] == plan[-1]
    for _ in range(30):
        alfworld.step([invalid], ["think: I should put it somewhere"], [True])
    assert (invalid.ended, invalid.invalid_actions, invalid.reward) == ("limit", 30, 0)
    for _ in range(30):  # the same action until the limit
        alfworld.step([substitute], ["Action: look"], [True])
    assert (substitute.ended, substitute.invalid_actions, substitute.reward) == ("limit", 0, 0)
    alfworld.step([cut], [f"Action: {plan[0]}"], [False])
    assert cut.invalid_actions == 1
    cut.ended = "context"
    observation, admissible, won, done = cut.engine.step("put it down")
    assert (observation, won, done) == ("Nothing happens.", False, False) and type(won) is type(done) is bool
    again = alfworld.start([row])[0]
    assert again.prompt == group[0].prompt
    again.ended = "context"


@needs_alfworld
def test_alfworld_data_errors(tmp_path, monkeypatch):
    """D07: no games, a broken game, no training games: one line that names the folder. Nothing is created anywhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(envs.UserError, match=str(tmp_path / "home")):
        envs.alfworld(None, None)
    with pytest.raises(envs.UserError, match="nowhere"):
        envs.alfworld(str(tmp_path / "nowhere"), None)
    game = tmp_path / "data" / "valid_seen" / "x" / "game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.write_text('{"solvable": false}')
    with pytest.raises(envs.UserError, match="no ALFWorld games"):
        envs.alfworld(str(tmp_path / "data"), None)
    game.write_text('{"solvable": true, "pddl_domain": "", "grammar": "", "pddl_problem": ""}')
    with pytest.raises(envs.UserError, match="0 games in train"):
        envs.alfworld(str(tmp_path / "data"), None)
    task = envs.alfworld(str(ALFWORLD), str(tmp_path / "data"))
    assert [Path(row["game"]) for row in task.test] == [game]
    with pytest.raises(envs.UserError, match="game.tw-pddl"):
        task.start(task.test)
    task.close()
    game.write_text("{")
    with pytest.raises(envs.UserError, match="not a complete ALFWorld game"):
        envs.alfworld(str(tmp_path / "data"), None)
    assert not (tmp_path / "home").exists()
    monkeypatch.setenv("ALFWORLD_DATA", str(ALFWORLD))
    assert len(envs.alfworld(None, None).train) == 24


@needs_alfworld
def test_alfworld_engine_that_dies():
    task = envs.alfworld(str(ALFWORLD), None)
    [episode] = task.start(task.train[:1])
    episode.engine.process.kill()
    assert task.step([episode], ["Action: look"], [True]) == [None]
    assert episode.judge_failed and episode.reward == 0 and task.engines == []
    [episode] = task.start(task.train[:1])
    episode.engine.seconds = 0.0  # no answer in time
    assert task.step([episode], ["Action: look"], [True]) == [None] and episode.judge_failed
    task.close()


def test_alfworld_absent(monkeypatch):
    monkeypatch.setattr(envs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(envs.UserError, match="pip install alfworld"):
        envs.alfworld(None, None)


# ------------------------------------------------------------------------------------------- multi-turn episodes through the trainer

def test_nothing_at_the_environments_tokens_reaches_credit_entropy_or_loss(model):
    """Laws at observation tokens are changed at will in both views: credit, log-probabilities, entropy and loss stay as they are."""
    [rollout] = some_rollouts(lengths=((5, 9, 8),))
    rollout.action_mask = [1, 1, 0, 0, 1, 0, 1, 1]
    tokens, mask = padded([rollout])
    causal, hindsight = both_views(model, [rollout])

    def everything():
        credit, prob, copied = hp_rlvr.compare_views(causal, hindsight, model.lm_head, tokens, mask, T)
        logp, entropy = token_log_probs(causal, model.lm_head, tokens, mask, T)
        return credit, prob, copied, logp, entropy, policy_loss(logp, hp_rlvr.hp_rlvr(credit, torch.tensor([1.0]), 0.5), mask, mask.sum())

    before = everything()
    for hidden in (causal, hindsight):
        hidden[mask == 0] += torch.randn_like(hidden[mask == 0])
    for a, b in zip(before, everything()):
        assert torch.equal(a, b)
    causal[0, 4] += 1
    assert not torch.equal(before[0], everything()[0])


@needs_alfworld
def test_real_games_train_as_single_rollouts(qwen, monkeypatch):
    """A scripted policy (the walkthrough after one slip) plays two real games through the trainer's own loop. One is won, one is stopped by the
    context limit; each is one rollout, each generated token carries (R - b) times its own credit, and observations carry nothing."""
    task = envs.alfworld(str(ALFWORLD), None)
    rows = [row for row in task.train if "pick_and_place_simple" in row["game"]][:2]
    plans = [iter(["Let me see."] + [f"I go on.\nAction: {action}" for action in walkthrough(row)]) for row in rows]
    asked = []

    def scripted(policy, prompts, max_new_tokens, temperature, generator):
        asked.append([list(prompt) for prompt in prompts])
        alive = plans if len(prompts) == 2 else plans[:1]
        turns = [qwen(next(plan) + "<|im_end|>").input_ids for plan in alive]
        return turns, [[0.0] * len(ids) for ids in turns]

    monkeypatch.setattr(train, "sample", scripted)
    args = settings(max_new_tokens=32, max_context=100_000, credit_scale="raw", mask_truncated=True, tokens_per_microbatch=100_000)
    step = task.step

    def second_one_fills_its_context(episodes, responses, finished):
        messages = step(episodes, responses, finished)
        return [message and message + " bed" * 100_000 if len(episodes) == 2 and episode is episodes[1] and len(episode.responses) == 3 else message
                for episode, message in zip(episodes, messages)]

    monkeypatch.setattr(task, "step", second_one_fills_its_context)
    model = small_model(vocab=151936, hidden=8)
    policy, baseline = policy_of(model, eos=(qwen.eos_token_id,), tokenizer=qwen), EMABaseline(0.9, 0.3)
    seen = []
    monkeypatch.setattr(train, "advantages", lambda *arguments, real=train.advantages: seen.append(real(*arguments)) or seen[-1])
    try:
        one = train.train_step(policy, Gradients(model), task, rows, baseline, seeded(), args, train.Clock())
    finally:
        task.close()
    won, lost = (played.episode for played in one.played)
    assert (won.ended, won.reward, won.invalid_actions) == ("won", 1, 1) and (lost.ended, lost.reward, len(lost.responses)) == ("context", 0, 3)
    assert one.rollouts[1].truncated is False and one.mask[1].sum() > 0, "a context limit is a failure that is trained, never masked"
    for played, rollout in zip(one.played, one.rollouts):
        written = "".join(qwen.decode([token]) for token, mine in zip(rollout.tokens, rollout.action_mask) if mine)
        assert written == "".join(response + "<|im_end|>" for response in played.episode.responses)
        assert qwen.decode(rollout.hindsight_prefix).count("-> ") == len(played.episode.responses)
    assert all(later[:len(earlier)] == earlier for earlier, later in zip([first[0] for first in asked], [first[0] for first in asked[1:]]))
    close(seen[0], one.views[0] * torch.tensor([[1 - 0.3], [0 - 0.3]]))
    assert (seen[0][one.mask == 0] == 0).all() and (seen[0][0][one.mask[0] == 1] > 0).float().mean() > 0.9
    metrics = train.step_metrics(one, SimpleNamespace(algo="hp_rlvr"))
    assert (metrics["won"], metrics["context_limit"], metrics["invalid_actions"], metrics["truncated"]) == (1, 1, 2, 0)
    assert metrics["generated_tokens"] == one.mask.sum()


# ---------------------------------------------------------------------------------------------------------------------------- verifiers

def vf_rows(path: str) -> list[dict]:
    """The rows of a file below ../shared, or none where it is absent."""
    file = SHARED / path
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def vf_need(path: str) -> list[dict]:
    return vf_rows(path) or pytest.skip(f"../shared/{path} is not here")


def vf_cases(path: str):
    rows = vf_rows(path)
    return [pytest.param(row, id=row["id"]) for row in rows] or [pytest.param(None, marks=pytest.mark.skip(f"../shared/{path} is not here"), id="absent")]


def vf_program(code: str) -> str:
    return f"Here is my program.\n\n```python\n{code}\n```\n"


vf_needs_math = pytest.mark.skipif(not verifiers.math_verify_installed(), reason="math-verify is not installed")
VF_ADD = ["assert add(1, 2) == 3", "assert add(-4, 9) == 5", "assert add(0, 0) == 0"]


@pytest.fixture(scope="module", autouse=True)
def vf_no_worker_is_left():
    yield
    verifiers.close()


def vf_judge(row: dict):
    return (verifiers.verify_gsm8k if row["task"] == "gsm8k" else verifiers.verify_math)(row["response"], row["gold"])


@vf_needs_math
@pytest.mark.parametrize("row", vf_cases("cases/math.jsonl"))
def test_math_case(row):
    canary = Path("/tmp/hp_rlvr_canary_a08d")
    canary.unlink(missing_ok=True)
    start = time.monotonic()
    assert vf_judge(row) is row["expect"], row["note"]
    assert time.monotonic() - start < (60 if row["id"] == "A01a" else 20)
    assert not canary.exists()


@pytest.mark.parametrize("row", vf_cases("cases/code.jsonl"))
def test_code_case(row, monkeypatch):
    monkeypatch.setenv("HP_RLVR_CANARY", "x")
    monkeypatch.setenv("HF_TOKEN", "x")
    before = vf_memory()
    start = time.monotonic()
    assert verifiers.verify_code(row["completion"], row["tests"], timeout=3) is row["expect"], row["note"]
    assert time.monotonic() - start < 15
    assert vf_memory() - before < 50e6
    assert not vf_processes("61.75")


def vf_memory() -> float:
    """Resident memory of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if Path("/proc/self/statm").exists() else 0.0


def vf_processes(word: str) -> list[str]:
    """Command lines of running processes that hold `word`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [command] if word in command else []
    return found


# Rules behind the rows, seen from other sides.
VF_NUMBERS = [
    ("It fell to \u22125.\n#### \u22125", "-5", True), ("\\boxed{- 5}", "-5", True), ("#### -$5", "-5", True), ("#### $-5", "-5", True),
    ("**Answer:** 42", "42", True), ("Therefore, the answer is:\n\n42", "42", True), ("The final answer is: \\[42\\]", "42", True),
    ("The answer is 1/2.", "0.5", True), ("#### 0.50", "1/2", True), ("#### 2 1/2", "2.5", True), ("\\boxed{\\frac{3}{4}}", "0.75", True),
    ("\\boxed{70{,}000}", "70000", True), ("\\boxed{70\\,000}", "70000", True), ("\\boxed{\\$70,000}", "70000", True), ("#### 1,000.00", "1000", True),
    ("#### **18**", "18", True), ("#### 18 (9*2)", "18", True), ("#### 5%", "5", True), ("#### 0.05", "5", False), ("#### 1e3", "1000", True),
    ("#### Step 2: compute\nThe total is 5 + 6 = 11.", "11", True), ("#### Step 2: compute\nThe total is 5 + 6 = 11.", "2", False),
    ("#### 10000000000000000000001", "10000000000000000000000", False), ("#### 1,0000", "10000", False), ("#### 10,00", "1000", False),
    ("#### 12 or 13", "12", False), ("#### 12, 13", "13", False), ("\\boxed{12 \\text{ or } 13}", "12", False), ("12 or 13", "13", False),
    ("The answer is 12 dollars or 13 dollars", "12", False), ("He needs 5-6 eggs", "6", False), ("It takes 2:30 hours", "30", False),
    ("I have 3 apples, 4 pears and 5 nuts, 12 in total", "12", True), ("The answer is 5, which is 2 more than 3", "5", True),
    ("The answer is 10. No, the answer is 12.", "12", True), ("#### 5\n\nThe answer is 7", "5", True), ("#### 5\n####", "5", True),
    ("<think>\n#### 5", "5", False), ("so 5 </think> #### 6", "5", False), ("so 5 </think> #### 6", "6", True),
    ("\\boxed{42", "42", False), ("\\boxed{42} and \\boxed{41", "42", False), ("inf", "5", False), ("#### NaN", "5", False), ("#### 5/0", "5", False),
    ("#### 5", "five", False), ("#### 5", "", False), ("\ud800 #### 5\0", "5", True), ("#### 5 \ud800", "5", True),
]
VF_EXPRESSIONS = [
    ("\\boxed{3.14}", "\\pi", False), ("\\boxed{6.283185}", "2\\pi", False), ("\\boxed{3.1415926535897932384626}", "\\pi", False),
    ("\\boxed{0.333333}", "\\frac{1}{3}", False), ("\\boxed{0.33333333333333333}", "\\frac13", False), ("\\boxed{33.33}", "\\frac{100}{3}", False),
    ("\\boxed{2.8284271}", "2\\sqrt2", False), ("\\boxed{\\sqrt{8}}", "2\\sqrt2", True), ("\\boxed{\\frac{10}{4}}", "\\frac{5}{2}", True),
    ("\\boxed{999999999999999999999}", "1000000000000000000000", False), ("\\boxed{2^{10}}", "1024", True), ("\\boxed{5!}", "120", True),
    ("\\boxed{1,000}", "1000", True), ("\\boxed{1000}", "1,\\!000", True), ("\\boxed{-\\frac{1}{2}}", "\\frac{-1}{2}", True), ("\\boxed{1/2}", "-\\frac12", False),
    ("\\boxed{3\\frac{1}{2}}", "\\frac{3}{2}", False), ("\\boxed{\\frac{3}{2}x}", "1.5x", True), ("\\boxed{5x}", "5", False), ("\\boxed{2 pi}", "2", False),
    ("\\boxed{\\{1,2\\}}", "\\{1,2,3\\}", False), ("\\boxed{1,2,3}", "1,2", False), ("\\boxed{1, 2, 3, \\ldots}", "1", False), ("\\boxed{5}", "5 \\text{ or } 7", False),
    ("\\boxed{5 or 7}", "7,5", True), ("\\boxed{x=1 \\text{ or } x=2}", "1,2", True), ("The answer is $2$ or $3$.", "2", False), ("The answer is 2 or 3.", "3", False),
    ("\\boxed{2,-2}", "\\pm 2", True), ("\\boxed{1\\pm\\sqrt{2}}", "1+\\sqrt{2},1-\\sqrt{2}", True), ("\\boxed{1+\\sqrt2}", "1\\pm\\sqrt2", False),
    ("\\boxed{y=5}", "x=5", False), ("\\boxed{2x+3}", "y=2x+3", True), ("\\boxed{3+2x=y}", "y=2x+3", True), ("\\boxed{(x,y)=(1,2)}", "(1,2)", True), ("\\boxed{X}", "x", False),
    ("\\boxed{x \\in [1,2]}", "[1,2]", True), ("\\boxed{(3,\\infty)\\cup(-\\infty,2)}", "(-\\infty, 2) \\cup (3, \\infty)", True),
    ("\\boxed{(-\\infty,2]\\cup(3,\\infty)}", "(-\\infty, 2) \\cup (3, \\infty)", False), ("\\boxed{-\\infty}", "\\infty", False),
    ("\\boxed{(3.0, \\pi/2)}", "\\left( 3, \\frac{\\pi}{2} \\right)", True), ("\\boxed{(\\pi/2, 3)}", "\\left( 3, \\frac{\\pi}{2} \\right)", False),
    ("\\boxed{\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", True),
    ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 2/2 \\\\ 2 \\end{pmatrix}", True),
    ("\\boxed{\\begin{pmatrix} 1 & 2 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", False),
    ("\\boxed{evelyn}", "\\text{Evelyn}", True), ("\\boxed{evenly}", "Evelyn", False), ("\\boxed{\\text{No}}", "\\text{Yes}", False),
    ("\\boxed{\\textbf{(A)}}", "A", True), ("\\boxed{B}", "\\text{(A)}", False), ("\\boxed{C, A, B}", "\\text{A, B, C}", True), ("\\boxed{A,C}", "A,B,C", False),
    ("\\boxed{80 cm}", "80", True), ("\\boxed{80 \\text{ m}}", "80 \\text{ cm}^2", False), ("\\boxed{12\\sqrt{3}\\text{ cm}}", "12\\sqrt{3}", True),
    ("\\boxed{6:00 \\text{ p.m.}}", "6:00 \\text{ a.m.}", False), ("\\boxed{\\text{6:00 p.m.}}", "6:00 \\text{ p.m.}", True), ("\\boxed{5\\text{ dollars}}", "\\$5", True),
    ("\\boxed{2516}", "2516_8", False), ("\\boxed{2516_8}", "2516", False), ("\\boxed{12_3}", "12_{4}", False), ("\\boxed{\\log_2 8}", "3", True),
    ("<think>x \\boxed{7}", "7", False), ("a \\boxed{7} </think> nothing", "7", False), ("\\boxed{}", "", False), ("\\boxed{5}", "", False), ("\\boxed{nan}", "5", False),
    ("\\boxed{2}", "\\frac{1}{0}", False), ("\\boxed{0/0}", "0", False), ("\\boxed{open('/etc/passwd').read()}", "0", False), ("\\boxed{\ud800}", "5", False),
]


@pytest.mark.parametrize("response, gold, expect", VF_NUMBERS)
def test_number_rule(response, gold, expect):
    assert verifiers.verify_gsm8k(response, gold) is expect


@vf_needs_math
@pytest.mark.parametrize("response, gold, expect", VF_EXPRESSIONS)
def test_expression_rule(response, gold, expect):
    assert verifiers.verify_math(response, gold) is expect


@vf_needs_math
def test_same_verdicts_in_a_thread():  # A-P1
    rows = [row for row in vf_need("cases/math.jsonl") if not row["id"].startswith(("A08", "PA08"))]
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.extend(map(vf_judge, rows)))
    thread.start()
    thread.join()
    assert verdicts == [row["expect"] for row in rows]


@vf_needs_math
@pytest.mark.parametrize("bomb", ["9^{9^{9^{9}}}", "10^{10^{10}}", "100000000!", "2^{" * 400 + "1" + "}" * 400, "(" * 2000 + "x" + ")" * 2000])
def test_bombs_end(bomb):  # A-P2, A-P5
    verifiers.verify_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")  # the worker is warm
    before, start = vf_memory(), time.monotonic()
    assert verifiers.verify_math(f"\\boxed{{{bomb}}}", "7", timeout=0.5) is False
    assert time.monotonic() - start < 3 and vf_memory() - before < 200e6
    assert verifiers.verify_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}") is True  # and lives on, or is replaced


@pytest.mark.parametrize("piece", ["\\boxed{", "}", "####", "#### ", " ", "1,", "1/", "9", "answer is ", "answer", "```\n", "`", "<think>", "</think>",
                                   "\\frac{1}{", "$", "- ", "-", "or 5 ", "\n", "\\text{", "1.", "\\boxed 5 ", "\ud800", "\0", "\\", "{", "5 to "])
def test_half_a_megabyte_of_anything(piece):
    text = piece * (500_000 // len(piece))
    start = time.monotonic()
    for response in (text, "\\boxed{" + text, "#### " + text, text + "#### 5", "\\boxed{" + text + "}", "The answer is " + text):
        assert verifiers.verify_gsm8k(response, "7") in (True, False)
        verifiers.extract_math(response)
        verifiers.extract_code(response)
    assert time.monotonic() - start < 30


def test_gold_extraction():  # A-P4
    assert verifiers.gold_gsm8k("He made 48/2 = <<48/2=24>>24.\n#### 70,000") == "70000"
    assert verifiers.gold_math("First \\boxed{1}, and then \\fbox{\\frac{1}{2}}.") == "\\frac{1}{2}"
    for function, text in ((verifiers.gold_gsm8k, "no marker 5"), (verifiers.gold_gsm8k, "#### five"), (verifiers.gold_math, "no box: 5"), (verifiers.gold_math, "\\boxed{5")):
        with pytest.raises(ValueError):
            function(text)


@pytest.mark.parametrize("name", ["gsm8k", "svamp", "mawps"])
def test_gold_numbers_answer_themselves(name):  # A-P3
    vf_gold_numbers(name, 2000)


@sweep
@pytest.mark.parametrize("name", ["gsm8k", "svamp", "mawps"])
def test_sweep_every_gold_number_answers_itself(name):
    vf_gold_numbers(name, None)


def vf_gold_numbers(name: str, most: int | None):
    golds = [verifiers.gold_gsm8k(row["answer"]) for split in ("test", "train") for row in vf_need(f"data/{name}/{split}.jsonl")]
    others = random.Random(0).sample(golds, len(golds))
    for gold, other in list(zip(golds, others))[:most]:
        for form in ("\\boxed{%s}", "The answer is %s.", "#### %s"):
            assert verifiers.verify_gsm8k(form % gold, gold) is True
        if float(gold) != float(other):
            assert verifiers.verify_gsm8k("#### " + other, gold) is False


def vf_golds(path: str, pairs: int | None):
    rows = vf_need(path)
    for row in rows:
        assert verifiers.verify_math("\\boxed{%s}" % verifiers.gold_math(row["solution"]), row["answer"]) is True
        for form in ("\\boxed{%s}", "The answer is %s.", "The final answer is: $%s$"):
            assert verifiers.verify_math(form % row["answer"], row["answer"]) is True, row["answer"]
    golds = [row["answer"] for row in rows]
    others = random.Random(1).sample(golds, len(golds))
    wrong = [(gold, other) for gold, other in zip(golds, others) if verifiers.normal(gold) != verifiers.normal(other)][:pairs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(lambda pair: verifiers.verify_math("\\boxed{%s}" % pair[1], pair[0]), wrong)
        assert [pair for pair, verdict in zip(wrong, verdicts) if verdict is not False] == []


@vf_needs_math
@pytest.mark.parametrize("path", ["data/math500/test.jsonl", "data/math_train/train.jsonl"])
def test_every_gold_expression_answers_itself(path):  # A-P3
    vf_golds(path, 150)


@vf_needs_math
@sweep
@pytest.mark.parametrize("path", ["data/math500/test.jsonl", "data/math_train/train.jsonl"])
def test_sweep_no_gold_expression_answers_another(path):
    vf_golds(path, None)


# ---- programs

def vf_references() -> list[tuple]:
    """(name, reference program, tests) of MBPP and HumanEval."""
    mbpp = [(f"MBPP/{row['task_id']}", row["code"], [row["test_setup_code"]] * bool(row["test_setup_code"]) + row["test_list"]) for row in vf_rows("data/mbpp/mbpp.jsonl")]
    human = [(row["task_id"], row["prompt"] + row["canonical_solution"], [f"{row['test']}\ncheck({row['entry_point']})"]) for row in vf_rows("data/humaneval/HumanEval.jsonl")]
    return mbpp + human or pytest.skip("../shared/data/mbpp is not here")


def vf_emptied(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def vf_check_references(chosen: list[tuple], others: list[tuple]) -> None:
    jobs = [(name, code, tests, True) for name, code, tests in chosen] + [(name, vf_emptied(code), tests, False) for name, code, tests in chosen]
    jobs += [(name, other[1], tests, False) for (name, _, tests), other in zip(chosen, others)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(lambda job: verifiers.verify_code(vf_program(job[1]), job[2], timeout=40), jobs)
        assert [(job[0], job[3], verdict) for job, verdict in zip(jobs, verdicts) if verdict is not job[3]] == []


def test_reference_programs_pass_and_others_fail():
    references = vf_references()
    chosen = random.Random(0).sample(references, 120) + [one for one in references if one[0] in ("MBPP/126", "MBPP/367", "MBPP/927", "HumanEval/32", "HumanEval/38")]
    vf_check_references(chosen, chosen[7:] + chosen[:7])


@sweep
def test_sweep_all_reference_programs_pass_and_others_fail():
    references = vf_references()
    vf_check_references(references, references[7:] + references[:7])


VF_PROGRAMS = {  # legitimate programs: (program, tests)
    "sorts in place": ("def f(x): x.sort()", ["a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]"]),
    "keeps aliases": ("def f(d):\n  d['k'].append(4); d['n'] = d['k']; return d", ["k = [1]; d = {'k': k}\nr = f(d)\nassert r is d and k == [1, 4] and d['n'] is k"]),
    "cyclic list": ("def f():\n  x = [1]; x.append(x); return x", ["x = f()\nassert x[1] is x and x[0] == 1"]),
    "takes a function": ("def f(xs, g): return sorted(xs, key=g)", ["assert f([1, 2, 3], lambda x: -x) == [3, 2, 1]"]),
    "returns a function": ("def f(n): return lambda x: x + n", ["assert f(2)(3) == 5"]),
    "generator": ("def f(n):\n  for i in range(n): yield i * i", ["assert list(f(4)) == [0, 1, 4, 9]", "assert next(f(3)) == 0 and 4 in f(3)"]),
    "map": ("def f(n): return map(str, range(n))", ["assert list(f(2)) == ['0', '1']"]),
    "takes an iterator": ("def f(it): return sum(it)", ["assert f(iter([1, 2, 3])) == 6 and f(x for x in (1, 2)) == 3"]),
    "match object": ("import re\ndef f(s): return re.match('a(b)', s)", ["assert f('ab').group(1) == 'b' and f('x') is None"]),
    "keywords": ("def f(*a, **k): return a, k", ["assert f(1, 2, z=3) == ((1, 2), {'z': 3})"]),
    "global data": ("count = 0\ndef bump():\n  global count; count += 1", ["bump()", "assert count == 1"]),
    "its imports": ("import math as m\ndef f(): return 1", ["assert m.sqrt(4) == 2 * f()"]),
    "class": ("class Stack:\n  def __init__(self): self.items = []\n  def push(self, x): self.items.append(x)\n  def __len__(self): return len(self.items)\n"
              "  def __getitem__(self, i): return self.items[i]\n  def __repr__(self): return 'S%r' % self.items",
              ["s = Stack(); s.push(1); s.push(2)\nassert len(s) == 2 and s.items == [1, 2] and s[0] == 1 and repr(s) == 'S[1, 2]' and isinstance(s, Stack)"]),
    "subclass of list": ("class Stack(list):\n  def push(self, x): self.append(x)\ndef g():\n  s = Stack(); s.push(5); return s",
                         ["s = Stack(); s.push(1)\nassert len(s) == 1 and list(s) == [1] and g() == [5]"]),
    "enum": ("from enum import Enum\nclass C(Enum):\n  R = 1\ndef f(): return C.R", ["assert f() == C.R and f().value == 1 and f().name == 'R'"]),
    "context manager": ("class K:\n  def __enter__(self): return 5\n  def __exit__(self, *a): return False", ["with K() as x:\n    assert x == 5"]),
    "the tests' objects": ("def f(n): n.val = 7; n.twice()\ndef total(n): return 0 if n is None else n.val + total(n.next)",
                           ["class Node:\n    def __init__(self, v, n=None): self.val = v; self.next = n\n    def twice(self): self.val *= 2",
                            "n = Node(1)\nf(n)\nassert n.val == 14 and total(Node(1, Node(2))) == 3"]),
    "own exception": ("class Bad(ValueError):\n  def __init__(self, m, c): super().__init__(m); self.code = c\ndef f(): raise Bad('bad', 7)",
                      ["try:\n    f(); ok = False\nexcept Bad as e:\n    ok = str(e) == 'bad' and e.code == 7\nassert ok", "try:\n    f(); ok = False\nexcept ValueError:\n    ok = True\nassert ok"]),
    "key error": ("def f(): return {}['a']", ["try:\n    f()\nexcept KeyError as e:\n    assert e.args == ('a',)\nelse: assert False"]),
    "too deep": ("def f(n): return f(n + 1)", ["try:\n    f(0); ok = False\nexcept RecursionError:\n    ok = True\nassert ok"]),
    "threads and children": ("import os, threading\ndef add(a, b):\n  r = []\n  t = threading.Thread(target=lambda: r.append(a + b)); t.start(); t.join()\n"
                             "  p = os.fork()\n  if p == 0: os._exit(0)\n  os.waitpid(p, 0)\n  return r[0]", VF_ADD),
    "asyncio": ("import asyncio\nasync def g(a, b): return a + b\ndef add(a, b): return asyncio.run(g(a, b))", VF_ADD),
    "no standard input": ("def f(): return input()", ["try:\n    f(); ok = False\nexcept EOFError:\n    ok = True\nassert ok"]),
    "removes its folder": ("import os, shutil\nopen(os.path.expanduser('~/x'), 'w').write('1')\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nos.chdir('/')\ndef add(a, b): return a + b", VF_ADD),
    "an empty folder again": ("import os\ndef f(): return os.listdir('.')", ["assert f() == []"]),
    "a builtin's name": ("def sum(a, b): return a + b + 1", ["assert sum(1, 2) == 4"]),
    "exact types": ("from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime\nP = namedtuple('P', 'x y')\n"
                    "def f(): return [None, True, 1, -0.0, float('nan'), 2+3j, '\\ud800', b'\\x00', (1,), {1}, frozenset([3]), {(1, 2): [3]}, Counter('aab'), OrderedDict(a=1),\n"
                    "  deque([1], 3), Decimal('1.10'), Fraction(1, 3), datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3), range(3), P(1, 2), 10**5000, bytearray(b'a'), int]",
                    ["import math\nx = f()\nassert [type(y).__name__ for y in x] == ['NoneType', 'bool', 'int', 'float', 'float', 'complex', 'str', 'bytes', 'tuple', 'set', 'frozenset', 'dict', 'Counter',"
                     " 'OrderedDict', 'deque', 'Decimal', 'Fraction', 'date', 'datetime', 'range', 'P', 'int', 'bytearray', 'type']\n"
                     "assert math.copysign(1, x[3]) == -1 and math.isnan(x[4]) and x[12]['a'] == 2 and x[14].maxlen == 3 and x[20] == (1, 2) and x[21] == 10**5000 and x[23] is int"]),
}
VF_ATTACKS = {  # programs that must not be paid: (program, tests)
    "equal to everything": ("class S(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef add(a, b): return S(7)", VF_ADD),
    "says it is an int": ("class E:\n  __class__ = property(lambda s: int)\n  def __eq__(s, o): return True\n  def __sub__(s, o): return 0.0\n  def __abs__(s): return 0.0\n  def __lt__(s, o): return True\n"
                          "def add(a, b): return E()", ["assert abs(add(1, 2) - 3) < 1e-6"]),
    "class for a function": ("class M(type):\n  def __eq__(s, o): return True\n  __hash__ = None\nclass add(metaclass=M):\n  def __new__(c, a, b): return c", VF_ADD),
    "own abs": ("def abs(x): return 0\ndef sorted(*a): return [1]\ndef f(x): return 99.0", ["assert abs(f(1) - 3.0) < 1e-9"]),
    "own math": ("class math:\n  isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 99.0", ["assert math.isclose(f(1), 3.0)"]),
    "own check": ("def check(c): return True\ndef f(x): return 99.0", ["def check(candidate):\n    assert candidate(1) == 3\ncheck(f)"]),
    "reads frames": ("import sys, re\ndef add(a, b):\n  f, out = sys._getframe(), ''\n  while f: out += repr(f.f_locals) + repr(f.f_globals.keys()); f = f.f_back\n"
                     "  m = re.search(r'add\\(%d, %d\\) == (-?\\d+)' % (a, b), out)\n  return int(m.group(1)) if m else 0", VF_ADD),
    "reads memory": ("import os, re\ndef add(a, b):\n  for p in os.listdir('/proc'):\n    if p.isdigit() and int(p) != os.getpid():\n      for n in ('environ', 'cmdline', 'mem', 'maps'):\n        try:\n"
                     "          m = re.search(rb'add\\(%d, %d\\) == (-?\\d+)' % (a, b), open(f'/proc/{p}/{n}', 'rb').read(1 << 20))\n          if m: return int(m.group(1))\n        except Exception: pass\n  return 0", VF_ADD),
    "writes verdicts": ("import os, json, struct\nfor i in range(50):\n  for d in (b'true', json.dumps(['answer', '0', [], 3]).encode()):\n    try: os.write(i, struct.pack('>I', len(d)) + d)\n    except OSError: pass\n"
                        "def add(a, b): return 0", VF_ADD),
    "patches json": ("import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0", VF_ADD),
    "closes everything": ("import os\nos.closerange(0, 100)\ndef add(a, b): return a + b", VF_ADD),
    "exits in a swallowed call": ("import os\ndef f(): os._exit(0)", ["try:\n    f()\nexcept:\n    pass"]),
    "hostile exception": ("class X(BaseException):\n  def __str__(s): raise SystemExit(0)\n  __repr__ = __str__\ndef add(a, b):\n  e = X(); e.args = (e, e); e.me = e; raise e", VF_ADD),
    "keyboard interrupt": ("def add(a, b): raise KeyboardInterrupt", VF_ADD),
    "at exit": ("import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0", VF_ADD),
    "deep result": ("def add(a, b):\n  x = []\n  for _ in range(100000): x = [x]\n  return x", VF_ADD),
    "huge result": ("def add(a, b): return 'x' * (100 << 20)", VF_ADD),
    "endless iterator": ("import itertools\ndef add(a, b): return itertools.count()", ["assert list(add(1, 2)) == [3]"]),
    "fork bomb": ("import os\ndef add(a, b):\n  while True:\n    try: os.fork()\n    except OSError: pass", VF_ADD),
    "fills the disk": ("def add(a, b):\n  i = 0\n  while True:\n    open('f%d' % i, 'wb').write(b'x' * 10**7); i += 1", VF_ADD),
    "crash": ("import ctypes\ndef add(a, b): ctypes.string_at(0)", VF_ADD),
    "the tests leave early": ("def f(): return 1", ["import sys; sys.exit(0)", "assert f() == 2"]),
    "NUL": ("def f(): return 1\0", ["assert f() == 1"]), "surrogate": ("def f(): return '\ud800'", ["assert f() == 1"]),
    "parentheses": ("x = " + "(" * 10000 + ")" * 10000, ["assert x"]),
}
VF_CONFINED = {  # what a program finds where namespaces work: (program, tests)
    "no other process": ("import os\ndef f(): return sorted(int(p) for p in os.listdir('/proc') if p.isdigit())", ["assert len(f()) == 2 and f()[0] == 1"]),
    "its worker is closed": ("import os\ndef f():\n  out = []\n  for look in (lambda: open('/proc/1/mem', 'rb'), lambda: os.readlink('/proc/1/fd/3'), lambda: os.listdir('/proc/1/root/'), lambda: open('/proc/1/environ').read()):\n"
                             "    try: out.append(str(look()))\n    except OSError: pass\n  return out", ["assert f() == []"]),
    "no capability": ("def f(): return {line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')}", ["assert f() == {'0' * 16}"]),
    "no way out": ("import ctypes\ndef f():\n  c = ctypes.CDLL(None)\n  return c.mount(b'x', b'/scratch', b'tmpfs', 0, None), c.umount2(b'/usr', 2), c.chroot(b'/scratch')", ["assert 0 not in f()"]),
    "kill reaches nobody": ("import os\ndef add(a, b):\n  for pid in (-1, 1, os.getppid()):\n    try: os.kill(pid, 9)\n    except OSError: pass\n  return a + b", VF_ADD),
}


@pytest.mark.parametrize("name", VF_PROGRAMS)
def test_honest_program(name):
    code, tests = VF_PROGRAMS[name]
    assert verifiers.verify_code(vf_program(code), tests) is True


@pytest.mark.parametrize("name", VF_ATTACKS)
def test_hostile_program(name):
    if name == "fork bomb" and not verifiers.isolation().startswith("processes"):
        pytest.skip("without namespaces a root user's processes cannot be limited")
    code, tests = VF_ATTACKS[name]
    before = vf_memory()
    assert verifiers.verify_code(vf_program(code), tests, timeout=2) is False
    assert vf_memory() - before < 50e6
    assert verifiers.verify_code(vf_program("def add(a, b): return a + b"), VF_ADD) is True


@pytest.mark.parametrize("name", VF_CONFINED)
def test_confined_program(name):
    if not verifiers.isolation().startswith("processes, network and files"):  # these programs do harm outside
        pytest.skip("namespaces are not available here")
    code, tests = VF_CONFINED[name]
    assert verifiers.verify_code(vf_program(code), tests) is True


def test_network_and_files_are_out_of_reach(tmp_path):  # B-P5, B-P6
    if not verifiers.isolation().startswith("processes, network and files"):
        pytest.skip("namespaces are not available here")
    secret = tmp_path / "expected.txt"
    secret.write_text("3")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (f"import os, socket\ndef reach():\n  try: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1); return True\n  except OSError: return False\n"
                f"def see(): return os.path.exists({str(secret)!r}), os.path.exists({str(Path(__file__))!r})\n"
                f"def write():\n  n = 0\n  for p in ('/usr/hp_rlvr_x', '/hp_rlvr_x', {str(secret)!r}):\n    try: open(p, 'a').write('x'); n += 1\n    except OSError: pass\n  return n")
        assert verifiers.verify_code(vf_program(code), ["assert not reach()", "assert see() == (False, False)", "assert write() == 0"]) is True
    assert secret.read_text() == "3"


def test_the_programs_cannot_look_into_the_tests():
    find = ("import gc\ndef f(g):\n  link, out = [o for o in gc.get_objects() if type(o).__name__ == 'Link'][0], []\n"
            "  for n in ('__globals__', '__code__', '__closure__', '__class__', '__reduce__', '__self__'):\n    try: out.append(str(link.ask('getattr', g, n)))\n    except AttributeError: pass\n"
            "  for operation in ('load', 'global', 'instancecheck'):\n    try: out.append(str(link.ask(operation, g)))\n    except Exception: pass\n  return out")
    assert verifiers.verify_code(vf_program(find), ["x = f(lambda x: x + 1)\nassert x == [], x"]) is True


@pytest.mark.parametrize("tests", [["assert f( == 1"], ["while True: pass"], [], ["x = '\ud800'"]])
def test_the_judge_fails(tests):
    assert verifiers.verify_code(vf_program("def f(): return 1"), tests, timeout=1) is None


def test_no_worker_no_verdict(monkeypatch):
    verifiers.close()
    monkeypatch.setattr(verifiers.Worker, "start", lambda self, isolation: False)
    assert verifiers.verify_code(vf_program("def f(): return 1"), ["assert f() == 1"]) is None
    if verifiers.math_verify_installed():
        assert verifiers.verify_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}") is None


def test_without_namespaces(monkeypatch):
    """The fallback gives the same verdicts. Only programs that would do no harm are run in it."""
    verifiers.close()
    monkeypatch.setattr(verifiers.Worker, "best", "none")
    try:
        for name in ("sorts in place", "class", "own exception", "an empty folder again", "exact types", "threads and children"):
            assert verifiers.verify_code(vf_program(VF_PROGRAMS[name][0]), VF_PROGRAMS[name][1]) is True, name
        for name in ("own abs", "reads frames", "reads memory", "writes verdicts", "exits in a swallowed call", "endless iterator"):
            assert verifiers.verify_code(vf_program(VF_ATTACKS[name][0]), VF_ATTACKS[name][1], timeout=2) is False, name
        assert verifiers.verify_code(vf_program("import subprocess\nsubprocess.Popen(['sleep', '62.25'], start_new_session=True)\nwhile True: pass"), VF_ADD, timeout=1) is False
        assert not vf_processes("62.25")
    finally:
        verifiers.close()


def test_landlock_where_there_are_no_namespaces(monkeypatch, tmp_path):
    verifiers.close()
    monkeypatch.setattr(verifiers.Worker, "best", "none")
    secret = tmp_path / "expected.txt"
    secret.write_text("3")
    try:
        if "signals" not in verifiers.isolation():
            pytest.skip("this kernel's Landlock is absent or too old")
        with subprocess.Popen(["sleep", "60"]) as victim, socket.create_server(("127.0.0.1", 0)) as server:
            code = ("import os, socket\n"
                    "def refused(act):\n  try: act(); return False\n  except OSError: return True\n"
                    f"def f(): return [refused(act) for act in (lambda: os.kill({victim.pid}, 9), lambda: open({str(secret)!r}).read(), lambda: open({str(secret)!r}, 'a'), lambda: os.listdir('/proc'),\n"
                    f"  lambda: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1))], refused(lambda: open('mine', 'w'))")
            assert verifiers.verify_code(vf_program(code), ["x = f()\nassert x == ([True] * 5, False), x"]) is True
            assert victim.poll() is None
            victim.kill()
        assert secret.read_text() == "3"
    finally:
        verifiers.close()


def vf_children() -> set[str]:
    """Our child processes, zombies included."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if file.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(file.parent.name)
    return found


def test_nothing_is_left():  # B-P1: 500 mixed verifications
    descriptors = lambda: len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    verifiers.close()
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("verifiers-")}
    before, before_children = descriptors(), vf_children()
    rows = [row for row in vf_rows("cases/code.jsonl") if not row["id"].startswith(("B07", "B08"))] or [dict(completion=vf_program("def add(a, b): return a + b"), tests=VF_ADD, expect=True)]
    slow = [dict(completion=vf_program("import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(61.5)\nwhile True: pass"), tests=VF_ADD, expect=False)] * 4
    jobs = (rows * 100)[:396] + slow
    math = [row for row in vf_rows("cases/math.jsonl") if not row["id"].startswith(("A08", "PA08")) and verifiers.math_verify_installed()][:100]
    with ThreadPoolExecutor(8) as pool:
        code = pool.map(lambda job: verifiers.verify_code(job["completion"], job["tests"], timeout=1 if job in slow else 20), jobs)
        assert all(verdict is job["expect"] for verdict, job in zip(code, jobs))
        assert all(pool.map(lambda row: vf_judge(row) is row["expect"], math))
    verifiers.close()
    assert descriptors() == before and vf_children() <= before_children and not vf_processes("61.5")  # zombies count as children
    assert {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("verifiers-")} <= folders


def test_close_while_busy_and_again():
    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(verifiers.verify_code, vf_program("while True: pass"), VF_ADD, 20)
        time.sleep(1)  # not a wait for a result: any moment of the run will do
        verifiers.close()
        assert busy.result(timeout=15) in (None, False)
    assert verifiers.verify_code(vf_program("def add(a, b): return a + b"), VF_ADD) is True


def test_a_killed_worker_is_replaced():
    good = vf_program("def add(a, b): return a + b")
    assert verifiers.verify_code(good, VF_ADD) is True
    for kind in ("tests", "program"):
        for worker in list(verifiers.POOLS[kind].idle):
            worker.process.kill()
            worker.process.wait()
    assert verifiers.verify_code(good, VF_ADD) in (None, True)  # the judge's failure, never the program's
    assert [verifiers.verify_code(good, VF_ADD) for _ in range(4)][-1] is True


def test_workers_end_with_their_owner():
    """A trainer that is killed leaves no worker."""
    code = ("import os, sys; sys.path.insert(0, sys.argv[1]); import verifiers\n"
            "verifiers.verify_code('def f(): return 1', ['assert f() == 1'])\nprint(verifiers.POOLS['tests'].idle[0].process.pid, verifiers.POOLS['program'].idle[0].process.pid, flush=True)\nos.kill(os.getpid(), 9)")
    run = subprocess.run([sys.executable, "-c", code, str(Path(verifiers.__file__).parent)], capture_output=True, text=True)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    alive = lambda pid: Path(f"/proc/{pid}/cmdline").exists() and b"verifiers" in Path(f"/proc/{pid}/cmdline").read_bytes()
    while any(map(alive, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(map(alive, pids))
