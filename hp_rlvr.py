"""Hindsight-Privileged RLVR: token credit from a single rollout. The method, in torch alone.

Prompt x, sampled response y (one per prompt), verdict R in {0, 1}, the same weights for both views, T the sampling temperature:

    P_t = softmax(z(x, y<t) / T)                          causal view
    Q_t = softmax(z(H(x, y, R), y<t) / T)                 hindsight view: H also shows the whole attempt and its verdict
    c_t = [KL(P_t || M_t) + KL(Q_t || M_t)] / (2 ln 2)    credit, M_t = (P_t + Q_t) / 2, in [0, 1]
    A   = R - b                                           b: moving average of earlier rewards
    L   = - sum_t stopgrad(A c_t) log P_t(y_t) / Z        Z: number of trained tokens in the whole batch

The sign comes from the outcome, the size from the divergence.

What is left out, and why. No critic and no reference solution: that is the point. No importance ratio, no clipping and no KL penalty: each
batch is sampled, used for one update and thrown away, so the ratio is 1 and a clip would never bind. No per-response normalisation of the
credit: a response in which nothing mattered must be allowed to say so.

What to know before believing it. If the hindsight view merely copies the attempt that it was shown, Q_t is one-hot on y_t and c_t is, exactly,
a function of surprisal (`surprisal_credit`); the verdict then plays no part. The diagnostics at the end of the file measure how far a model
is from that. And c_t depends on the sampled token, so the baseline no longer cancels in expectation as it does in REINFORCE.

Shapes: B rollouts, T response tokens (padded), D hidden size, V vocabulary. Hidden states are those that *predict* a token: index t belongs
to tokens[t] in both views. Softmax, divergence and loss are fp32 whatever the forward pass ran in.
"""
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 256  # positions projected through the LM head at once: 256 x 151,936 logits are 156 MB in fp32, a whole 2,048-token view is 1.25 GB


# ------------------------------------------------------------------------------------------------------------------------------ data

@dataclass
class Rollout:
    """One finished attempt. All ids are as they were sampled: never decode and re-encode, a tokenizer's round trip may change them.

    Both views score the same `tokens` after two different prefixes. A single-turn answer is one run of generated tokens; in a multi-turn
    episode the environment's tokens stand in between, with `action_mask` 0.
    """
    causal_prefix: list[int]     # what the policy saw when it sampled
    hindsight_prefix: list[int]  # the same message with the attempt and its verdict, for scoring only
    tokens: list[int]
    action_mask: list[int]       # 1 where the policy generated the token (the EOS included), 0 where the environment wrote it
    reward: float
    truncated: bool              # no EOS within the limit
    group: int                   # rollouts of one prompt share a number
    flipped_prefix: list[int] = field(default_factory=list)  # hindsight_prefix with the other verdict, where credit is taken between verdicts


# ----------------------------------------------------------------------------------------------------------------- the hindsight view

def hindsight_prompt(prompt: str, happened: str, success: bool, check: str, mode: str) -> str:
    """User message of the hindsight view, H(x, y, R): the task, what happened, and the verdict as the last thing read.

    `happened` is the attempt's text (mode "attempt") or what it did (mode "digest"); mode "outcome" gives the verdict alone, and mode "null"
    gives nothing at all: its credit is the floor that any change of prompt produces. Only the verdict word differs between outcomes.
    The attempt is quoted inside the user message, never put in as an assistant turn, since chat templates rewrite those.

    >>> print(hindsight_prompt("2 + 2?", "It is 5.", False, "A verifier checked its final answer.", "attempt"))
    2 + 2?
    <BLANKLINE>
    ### Hindsight
    Here is one complete earlier attempt:
    <attempt>
    It is 5.
    </attempt>
    A verifier checked its final answer. Result: INCORRECT.
    """
    verdict = "CORRECT" if success else "INCORRECT"
    # An attempt must not be able to close its own quotation and forge a verdict. Replaced, not removed: what stands around could close up.
    quoted = happened.replace("</attempt>", "[/attempt]")
    text = {
        "attempt": f"Here is one complete earlier attempt:\n<attempt>\n{quoted}\n</attempt>\n{check} Result: {verdict}.",
        "digest": f"Here is one complete earlier attempt:\n<attempt>\n{quoted}\n</attempt>\n{check} Result: {verdict}.",
        "outcome": f"Result of the attempt that follows: {verdict}.",
        "null": "Nothing is known about any earlier attempt.",
    }[mode]
    return f"{prompt}\n\n### Hindsight\n{text}"


def view_hidden(model, prefixes: list[list[int]], responses: list[list[int]]) -> Tensor:
    """Hidden states that predict each response token after its prefix: [B, T, D], one forward pass over the batch, no logits.

    Rows are padded on the right alone: a causal model never sees what comes later, so no mask and no positions are needed, and a row costs no
    more than the longest row, however its length is shared between prefix and response.
    """
    device = next(model.parameters()).device
    rows = [prefix + response for prefix, response in zip(prefixes, responses)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    # The body without its LM head: logits of the prefix are never computed, those of the response only a chunk at a time.
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    first = torch.tensor([len(prefix) - 1 for prefix in prefixes], device=device)  # a token is predicted one column before its own
    columns = first[:, None] + torch.arange(max(map(len, responses)), device=device)
    return hidden[torch.arange(len(rows), device=device)[:, None], columns.clamp(max=width - 1)]


def log_law(hidden: Tensor, lm_head, temperature: float) -> Tensor:
    """log softmax(z / T) over the vocabulary, fp32: [..., D] -> [..., V]. The law that is sampled is the law that is scored."""
    return F.log_softmax(lm_head(hidden).float() / temperature, dim=-1)


def map_chunks(function, chunk: int, mask: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Apply `function` to `chunk` unmasked positions at a time; scatter its outputs back to [B, T], zero elsewhere.

    inputs: [B, T, ...]; function: slices [n, ...] -> tuple of [n]. Nothing of size [B, T, V] ever exists: without gradients each chunk's
    logits are freed at once, with gradients they are recomputed in the backward pass (checkpoint).
    """
    index = mask.flatten().nonzero().squeeze(1)
    flat = [tensor.flatten(0, 1) for tensor in inputs]
    results = []
    for part in index.split(chunk):
        pieces = [tensor[part] for tensor in flat]
        if torch.is_grad_enabled():
            results.append(checkpoint(function, *pieces, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(function(*pieces))
    columns = [torch.cat(column) for column in zip(*results)]
    return [torch.zeros(mask.numel(), dtype=column.dtype, device=column.device).index_put((index,), column).view(mask.shape)
            for column in columns]


# ------------------------------------------------------------------------------------------------------------------------------ credit

def jensen_shannon(logp: Tensor, logq: Tensor) -> Tensor:
    """Jensen-Shannon divergence over the last axis, divided by ln 2: log-probabilities [..., V] -> [...] in [0, 1].

    JS = [KL(P || M) + KL(Q || M)] / (2 ln 2) with M = (P + Q) / 2. Symmetric; 0 for equal laws, 1 for disjoint ones.

    >>> round(jensen_shannon(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()).item(), 6)
    0.311278
    """
    # -inf (a forbidden token) would give 0 * inf = NaN in value and gradient; e^-100 is 0 in fp32 and 100 e^-100 as good as 0.
    logp, logq = logp.clamp(min=-100), logq.clamp(min=-100)
    logm = torch.logaddexp(logp, logq) - math.log(2)
    both = (logp.exp() * (logp - logm) + logq.exp() * (logq - logm)).sum(-1)
    return (both / (2 * math.log(2))).clamp(0, 1)  # rounding can leave -1e-8


def token_credit(hidden_causal: Tensor, hidden_hindsight: Tensor, lm_head, mask: Tensor, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
    """c_t for every unmasked token: hidden states [B, T, D] of two views and the LM head -> [B, T] fp32 in [0, 1], zero where masked.

    Exact over the full vocabulary. Call it without gradients: credit is a constant of the loss.
    """
    def divergence(hidden_p, hidden_q):
        return (jensen_shannon(log_law(hidden_p, lm_head, temperature), log_law(hidden_q, lm_head, temperature)),)
    return map_chunks(divergence, chunk, mask, hidden_causal, hidden_hindsight)[0]


def compare_views(hidden_causal: Tensor, hidden_hindsight: Tensor, lm_head, tokens: Tensor, mask: Tensor, temperature: float = 1.0,
                  chunk: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """c_t, P_t(y_t) and Q_t(y_t) from one projection of each view: like `token_credit`, three [B, T] tensors. Q_t(y_t) shows copying."""
    def compare(hidden_p, hidden_q, tokens):
        logp, logq = log_law(hidden_p, lm_head, temperature), log_law(hidden_q, lm_head, temperature)
        prob, copy = (log.gather(-1, tokens[:, None]).squeeze(-1).exp() for log in (logp, logq))
        return jensen_shannon(logp, logq), prob, copy
    credit, prob, copy = map_chunks(compare, chunk, mask, hidden_causal, hidden_hindsight, tokens)
    return credit, prob, copy


def token_log_probs(hidden: Tensor, lm_head, tokens: Tensor, mask: Tensor, temperature: float = 1.0, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """log P_t(y_t), differentiable, and the entropy of P_t in nats, detached: hidden [B, T, D], tokens [B, T] -> two [B, T] fp32."""
    def score(hidden, tokens):
        logp = log_law(hidden, lm_head, temperature)
        with torch.no_grad():
            entropy = torch.special.entr(logp.exp()).sum(-1)
        return logp.gather(-1, tokens[:, None]).squeeze(-1), entropy
    logp, entropy = map_chunks(score, chunk, mask, hidden, tokens)
    return logp, entropy


def surprisal_credit(prob: Tensor) -> Tensor:
    """g(p) = 1 + [p ln p - (1 + p) ln(1 + p)] / (2 ln 2): the credit of a token of probability p if the hindsight view copies.

    It is the Jensen-Shannon divergence between P and the one-hot law on y_t, whatever the rest of P. As `--algo surprisal` it is the control
    that needs no hindsight pass; as the other half of `pearson` it tells how much of the credit is this and nothing else.

    >>> [round(surprisal_credit(torch.tensor(p)).item(), 4) for p in (0.0, 0.5, 1.0)]
    [1.0, 0.3113, 0.0]
    """
    return 1 + (torch.xlogy(prob, prob) - torch.xlogy(1 + prob, 1 + prob)) / (2 * math.log(2))


def scale_credit(credit: Tensor, mask: Tensor, scale: str) -> Tensor:
    """Token weights from credit [N, T] of the WHOLE batch (unmasked tokens count): raw, batch or mixed.

    raw: c. batch: w = min(c / max(mean c, 1e-3), 5). mixed: (1 + w) / 2. The floor 1e-3 keeps a dead signal small: a purely relative scale
    would make prompt noise look like healthy credit. Not per response: that would erase that one response mattered more than another.
    """
    if scale == "raw":
        return credit * mask
    mean = (credit * mask).sum() / mask.sum().clamp(min=1)
    weight = (credit / mean.clamp(min=1e-3)).clamp(max=5)
    return {"batch": weight, "mixed": 0.5 + 0.5 * weight}[scale] * mask


# ----------------------------------------------------------------------------------------------------------- baseline and advantages

@dataclass
class EMABaseline:
    """b <- d b + (1 - d) mean(R), one update per optimiser step, from b = 1/2. A step uses the value from BEFORE its own rewards.

    >>> baseline = EMABaseline()
    >>> baseline.update(1.0)
    >>> round(baseline.value, 3)
    0.55
    """
    decay: float = 0.9
    initial: float = 0.5

    def __post_init__(self):
        self.value = self.initial

    def update(self, mean_reward: float) -> None:
        self.value = self.decay * self.value + (1 - self.decay) * mean_reward


def hp_rlvr(weight: Tensor, reward: Tensor, baseline: float) -> Tensor:
    """A_t = c_t (R - b): token weights [N, T] and rewards [N] -> per-token advantages [N, T]. With weight g(P(y)) it is `surprisal`."""
    return weight * (reward - baseline)[:, None]


def reinforce(mask: Tensor, reward: Tensor, baseline: float) -> Tensor:
    """A_t = R - b on every token: the control that shows what the divergence adds."""
    return mask * (reward - baseline)[:, None]


def grpo(mask: Tensor, reward: Tensor, group: Tensor) -> Tensor:
    """A_t = (R - mean of the group) / its population standard deviation; exactly 0 in a group whose rewards are all equal.

    >>> grpo(torch.ones(4, 1), torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).squeeze(1).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    advantage = torch.zeros_like(reward)
    for members in (group == number for number in group.unique()):
        spread = reward[members].std(correction=0)
        if spread > 0:
            advantage[members] = (reward[members] - reward[members].mean()) / spread
    return mask * advantage[:, None]


def homogeneous_groups(reward: Tensor, group: Tensor) -> float:
    """Share of groups whose rewards are all equal, so that GRPO learns nothing from them."""
    spreads = [reward[group == number].std(correction=0) for number in group.unique()]
    return sum(float(spread) == 0 for spread in spreads) / len(spreads)


# -------------------------------------------------------------------------------------------------------------------------------- loss

def policy_loss(logp: Tensor, advantage: Tensor, mask: Tensor, normaliser: float) -> Tensor:
    """L = - sum_t m_t A_t log P_t(y_t) / Z, a scalar: three [B, T] tensors, logp from `token_log_probs`.

    Z is the number of unmasked tokens of the WHOLE batch, known before its first micro-batch, so that losses of micro-batches add up to the
    loss of the batch. With responses of varying length Z depends on the sample: dividing by it favours short responses when A > 0 and long
    ones when A < 0, at order 1/N.
    """
    return -(mask * advantage.detach() * logp).sum() / normaliser


# ------------------------------------------------------------------------------------------------------------------------- diagnostics

def pearson(x: Tensor, y: Tensor) -> float | None:
    """Correlation of two vectors; None where one of them does not vary."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = (x.norm() * y.norm()).item()
    return (x @ y).item() / scale if scale > 1e-12 else None


def top_share(credit: Tensor, share: float = 0.2) -> float | None:
    """Part of the total credit that the largest `share` of the tokens hold: [n] -> number in [share, 1]; None without credit."""
    total = credit.sum().item()
    largest = credit.topk(max(1, round(share * credit.numel()))).values
    return largest.sum().item() / total if total > 0 else None
