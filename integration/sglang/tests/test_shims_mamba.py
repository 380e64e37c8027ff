# SPDX-License-Identifier: Apache-2.0
"""The shims' gated delta nets are those of the formulas, in chunks and token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from integration.sglang.shims.sgl_kernel import mamba, operators

HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 8, 6
SLOTS, CHANNELS, WIDTH = 5, 12, 4
LENGTHS = [70, 3, 130]
PLACES = torch.tensor([4, 1, 2], dtype=torch.int32)
UNUSED = [0, 3]
BIAS = torch.linspace(-1, 1, CHANNELS)
CALLS = [([0, 0, 0], LENGTHS), ([0, 0, 0], [64, 2, 1]), ([64, 2, 1], LENGTHS)]
"""Prompts in one chunk; and their first and second chunk."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)


def joined(parts: list[torch.Tensor], begins: list[int], ends: list[int]) -> torch.Tensor:
    """These tokens of all prompts, one after the other."""
    taken = zip(parts, begins, ends, strict=True)
    return torch.cat([part[begin:end] for part, begin, end in taken])


class Convolution:
    """Prompts of random inputs, and what a causal convolution makes of them."""

    def __init__(self, bias: torch.Tensor | None) -> None:
        self.bias = bias
        self.weight = torch.randn(CHANNELS, WIDTH)
        self.inputs = [torch.randn(length, CHANNELS) for length in LENGTHS]
        self.wanted = [
            self._whole(functional.pad(each.T, (WIDTH - 1, 0))).T for each in self.inputs
        ]
        self.states = torch.full((SLOTS, CHANNELS, WIDTH - 1), 7.0)

    def _whole(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.unsqueeze(1)
        return functional.silu(functional.conv1d(inputs, weight, self.bias, groups=CHANNELS))

    def extend(self, begins: list[int], ends: list[int]) -> torch.Tensor:
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return mamba.causal_conv1d_fn_cpu(
            joined(self.inputs, begins, ends).T,
            self.weight,
            self.bias,
            activation="silu",
            conv_states=self.states,
            has_initial_state=torch.tensor(begins) > 0,
            cache_indices=PLACES,
            query_start_loc=starts_of(lengths),
            seq_lens_cpu=lengths,
        ).T


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_prompts_are_convolved_in_one_chunk_and_in_two(bias: torch.Tensor | None) -> None:
    convolution = Convolution(bias)
    for begins, ends in CALLS:
        found = convolution.extend(begins, ends)
        torch.testing.assert_close(found, joined(convolution.wanted, begins, ends))
    for slot, inputs in zip(PLACES.tolist(), convolution.inputs, strict=True):
        assert torch.equal(convolution.states[slot], inputs[1 - WIDTH :].T)
    assert torch.equal(convolution.states[UNUSED], torch.full((2, CHANNELS, WIDTH - 1), 7.0))


def test_a_token_is_convolved_as_in_a_prompt() -> None:
    convolution = Convolution(BIAS)
    last = [length - 1 for length in LENGTHS]
    whole = joined(list(convolution.extend([0, 0, 0], LENGTHS).split(LENGTHS)), last, LENGTHS)
    convolution.extend([0, 0, 0], last)
    found = mamba.causal_conv1d_update_cpu(
        joined(convolution.inputs, last, LENGTHS),
        convolution.states,
        convolution.weight,
        BIAS,
        "silu",
        conv_state_indices=PLACES,
    )
    assert torch.equal(found, whole)
    for slot, inputs in zip(PLACES.tolist(), convolution.inputs, strict=True):
        assert torch.equal(convolution.states[slot], inputs[1 - WIDTH :].T)


class DeltaRule:
    """Prompts of random projections, and what the recurrence makes of them in 64 bits."""

    def __init__(self) -> None:
        self.a_log, self.dt_bias = torch.randn(VALUE_HEADS) - 3, torch.rand(VALUE_HEADS)
        self.q, self.k, self.v = (
            [torch.randn(length, *shape) for length in LENGTHS]
            for shape in ((HEADS, KEY), (HEADS, KEY), (VALUE_HEADS, VALUE))
        )
        self.a, self.b = (
            [torch.randn(length, VALUE_HEADS) for length in LENGTHS] for _ in range(2)
        )
        self.states = torch.zeros(SLOTS, VALUE_HEADS, VALUE, KEY)
        self.states[UNUSED] = 7.0
        self.wanted, self.wanted_states = zip(*map(self._run, range(len(LENGTHS))), strict=True)

    def _run(self, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of a prompt, and the state before each token and after the last."""
        length = LENGTHS[prompt]
        outputs = torch.zeros(length, VALUE_HEADS, VALUE, dtype=torch.float64)
        states = torch.zeros(length + 1, VALUE_HEADS, VALUE, KEY, dtype=torch.float64)
        for head in range(VALUE_HEADS):
            shared = head * HEADS // VALUE_HEADS
            for token in range(length):
                q, k = (x[prompt][token, shared].double() for x in (self.q, self.k))
                q, k = q / q.norm() / KEY**0.5, k / k.norm()
                step = torch.log1p(torch.exp((self.a[prompt][token] + self.dt_bias)[head].double()))
                decay = torch.exp(-torch.exp(self.a_log[head].double()) * step)
                share = 1 / (1 + torch.exp(-self.b[prompt][token, head].double()))
                forget = torch.eye(KEY, dtype=torch.float64) - share * torch.outer(k, k)
                written = share * torch.outer(self.v[prompt][token, head].double(), k)
                state = decay * states[token, head] @ forget + written
                states[token + 1, head] = state
                outputs[token, head] = state @ q
        return outputs, states

    def extend(self, begins: list[int], ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        q, k, v, a, b = (joined(x, begins, ends) for x in (self.q, self.k, self.v, self.a, self.b))
        g, beta = torch.ops.sgl_kernel.fused_gdn_gating_cpu(self.a_log, a, b, self.dt_bias)
        out, _, before_chunks = mamba.chunk_gated_delta_rule_cpu(
            q=q[None],
            k=k[None],
            v=v[None],
            g=g,
            beta=beta,
            initial_state=self.states,
            cu_seqlens=starts_of(lengths),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=PLACES,
        )
        return out[0], before_chunks[0]

    def decode(self, places: list[int]) -> torch.Tensor:
        """Compute the token at one place of each prompt."""
        ends = [place + 1 for place in places]
        q, k, v, a, b = (joined(x, places, ends) for x in (self.q, self.k, self.v, self.a, self.b))
        out: torch.Tensor = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            q=q[None],
            k=k[None],
            v=v[None],
            a=a,
            b=b,
            initial_state_source=self.states,
            initial_state_indices=PLACES,
            cu_seqlens=starts_of([1] * len(places)),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )
        return out[0]


@pytest.fixture
def rule() -> DeltaRule:
    return DeltaRule()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)


def check_states(rule: DeltaRule) -> None:
    for slot, wanted in zip(PLACES.tolist(), rule.wanted_states, strict=True):
        close(rule.states[slot], wanted[-1])
    assert torch.equal(rule.states[UNUSED], torch.full((2, VALUE_HEADS, VALUE, KEY), 7.0))


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS[1:]], ids=["one chunk", "two chunks"])
def test_prompts_update_their_states(
    rule: DeltaRule, calls: list[tuple[list[int], list[int]]]
) -> None:
    for begins, ends in calls:
        found, _ = rule.extend(begins, ends)
        close(found, joined(list(rule.wanted), begins, ends))
    check_states(rule)


def test_a_prompt_offers_its_state_before_each_chunk(rule: DeltaRule) -> None:
    _, found = rule.extend([0, 0, 0], LENGTHS)
    first, second, third = rule.wanted_states
    wanted = [first[0], first[64], second[0], third[0], third[64], third[128]]
    close(found, torch.stack(wanted))


def test_tokens_update_the_states_as_in_a_prompt(rule: DeltaRule) -> None:
    last = [length - 1 for length in LENGTHS]
    rule.extend([0, 0, 0], last)
    close(rule.decode(last), joined(list(rule.wanted), last, LENGTHS))
    check_states(rule)


def test_a_state_is_bit_identical_however_its_prompt_is_cut(rule: DeltaRule) -> None:
    whole, _ = rule.extend([0, 0, 0], LENGTHS)
    states = rule.states.clone()
    rule.states[PLACES] = 0
    last = [length - 1 for length in LENGTHS]
    for begins, ends in (([0, 0, 0], [33, 1, 65]), ([33, 1, 65], last)):
        rule.extend(begins, ends)
    assert torch.equal(rule.decode(last), joined(list(whole.split(LENGTHS)), last, LENGTHS))
    assert torch.equal(rule.states, states)


def test_queries_and_keys_are_normed_and_gates_are_split_off() -> None:
    tokens, kv_heads = 5, 1
    q, gate = torch.randn(2, tokens, HEADS, KEY)
    k = torch.randn(tokens, kv_heads * KEY)
    q_scale, k_scale = torch.randn(2, KEY)
    mixed = torch.stack([q, gate], dim=2).view(tokens, -1)
    found = operators.fused_qk_gemma_rmsnorm_with_gate_cpu(
        mixed, k, q_scale, k_scale, 1e-6, KEY, HEADS
    )
    wanted = [
        functional.rms_norm(x.view(-1, KEY), (KEY,), 1 + scale, 1e-6)
        for x, scale in ((q, q_scale), (k, k_scale))
    ]
    torch.testing.assert_close(found, (*wanted, gate.view(-1, KEY)))
    flat = q.view(tokens, -1)
    alone = operators.fused_qk_gemma_rmsnorm_cpu(flat, k, q_scale, k_scale, 1e-6, KEY)
    torch.testing.assert_close(alone, tuple(wanted))


def test_a_gate_scales_in_place() -> None:
    x, gate = torch.randn(2, 3, 8)
    wanted = x / (1 + torch.exp(-gate))
    operators.fused_sigmoid_mul_cpu(x, gate.view(3, 2, 4))
    torch.testing.assert_close(x, wanted)


def test_projections_are_split() -> None:
    q, k = torch.randn(2, 3, HEADS * KEY)
    v, z = torch.randn(2, 3, VALUE_HEADS * VALUE)
    b, a = torch.randn(2, 3, VALUE_HEADS)
    found = operators.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat([q, k, v, z], dim=1), torch.cat([b, a], dim=1), HEADS, VALUE_HEADS, KEY, VALUE
    )
    wanted = torch.cat([q, k, v], dim=1), z.view(3, VALUE_HEADS, VALUE), b, a
    assert all(map(torch.equal, found, wanted))
