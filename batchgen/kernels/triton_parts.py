"""Triton kernels for parts of a model on a CUDA device: norms, rotary embeddings, gates. `device_parts.py` calls them.

Each rounds where the modules of transformers round.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, factor, y, rows, eps,
    SIZE: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Root mean square norm of a block of rows of x [rows, SIZE], both contiguous; `factor` [SIZE] is float32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * SIZE + at[None, :]
    numbers = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, 1) / SIZE
    numbers = numbers * (1.0 / tl.sqrt(mean + eps))[:, None]
    if ROUNDS_FIRST:
        numbers = numbers.to(y.dtype.element_ty).to(tl.float32)
    numbers = numbers * tl.load(factor + at, mask=inside, other=0.0)[None, :]
    tl.store(y + place, numbers.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, tokens, q_head, q_token, k_head, k_token, cos_token,
    H: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotary embeddings of a block of tokens and the head `program_id(1)`: a head of the queries, or after them of the keys."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.program_id(1)
    real = token < tokens
    token = token.to(tl.int64)
    angles = (token * cos_token)[:, None]
    if head < H:
        _rotate(
            q + head.to(tl.int64) * q_head, q_out + head * SIZE, cos + angles, sin + angles, token * q_token,
            token * (H * SIZE), real, SIZE, TURNED, BLOCK,
        )  # fmt: skip
    else:
        _rotate(
            k + (head - H).to(tl.int64) * k_head, k_out + (head - H) * SIZE, cos + angles, sin + angles, token * k_token,
            token * (K * SIZE), real, SIZE, TURNED, BLOCK,
        )  # fmt: skip


@triton.jit
def _rotate(x, y, cos, sin, begin, to, real, SIZE: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr):
    """The first TURNED numbers are rotated, the others copied. A product is rounded to the type of cos and sin."""
    HALF: tl.constexpr = TURNED // 2
    half = tl.arange(0, BLOCK)
    mask = real[:, None] & (half < HALF)[None, :]
    at = x + begin[:, None] + half[None, :]
    place = y + to[:, None] + half[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    product = cos.dtype.element_ty
    angle = half[None, :]
    a = (first * tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)).to(product).to(tl.float32)
    b = (second * tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)).to(product).to(tl.float32)
    tl.store(place, (a - b).to(y.dtype.element_ty), mask=mask)
    a = (second * tl.load(cos + angle + HALF, mask=mask, other=0.0).to(tl.float32)).to(product).to(tl.float32)
    b = (first * tl.load(sin + angle + HALF, mask=mask, other=0.0).to(tl.float32)).to(product).to(tl.float32)
    tl.store(place + HALF, (a + b).to(y.dtype.element_ty), mask=mask)
    for rest in tl.static_range(TURNED, SIZE, BLOCK):
        mask = real[:, None] & (rest + half < SIZE)[None, :]
        tl.store(place + rest, tl.load(at + rest, mask=mask, other=0.0), mask=mask)


@triton.jit
def gate_kernel(gate, up, y, gate_row, up_row, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """act(gate) * up for a block of the row `program_id(0)` of y [rows, SIZE]; act is GELU's approximation by tanh, or SiLU."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    g = tl.load(gate + row * gate_row + at, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        g = g * tl.sigmoid(2.0 * inner)  # (1 + tanh(x)) / 2
    else:
        g = g * tl.sigmoid(g)
    g = g.to(y.dtype.element_ty).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * SIZE + at, (g * u).to(y.dtype.element_ty), mask=mask)
