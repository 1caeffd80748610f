"""How many blocks and state slots an engine has, and defaults for each kind of device. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.config import EngineConfig
from batchgen.scheduling.batch import Limits

BATCH_SIZE = {"cpu": 256, "mps": 256, "cuda": 1024}
BATCH_TOKENS = {"cpu": 2048, "mps": 2048, "cuda": 8192}
SCORED_LOGITS = 1 << 25
"""Maximum number of logits (tokens times vocabulary) of texts that are scored in one forward."""
STREAMED_LOGITS = 1 << 27
"""Maximum number of logits of the sequences that decode at once when every step reads the weights again. A step is as large as that allows."""
AUTO_SHARE = {"cpu": 0.5, "mps": 0.5}
"""Share of the memory that is free once the model is loaded. The rest is for activations and other programs. On CUDA it is measured."""
SNAPSHOTS = 32
"""Number of state slots beside those of the running sequences: for the nodes above them, and for nodes that later windows begin with."""
STATE_SHARE = 0.5
"""Largest share of the memory for state slots in a model that has KV too."""
MAX_BLOCKS = 1 << 20
"""Number of blocks for a model whose KV takes no memory."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The memory of a device, and the bytes of a block and of a state slot on it."""

    room: int
    block: int
    state_slot: int

    def state_slots(self, batch_size: int) -> int:
        """Returns the number of state slots for so many running sequences."""
        wanted, share = batch_size + SNAPSHOTS, STATE_SHARE if self.block else 1
        return min(wanted, int(self.room * share) // self.state_slot) if self.state_slot else wanted

    def blocks(self, num_state_slots: int) -> int:
        """Returns the number of blocks that fit beside the state slots."""
        return max(0, self.room - num_state_slots * self.state_slot) // self.block if self.block else MAX_BLOCKS


def sufficient_memory(kv: int, state_slot: int, batch_size: int) -> int:
    """Returns an amount of memory that `MemoryShare` divides so that KV of `kv` bytes fits beside the state slots, of which there are at least two."""
    if not state_slot:
        return kv
    state_slots = min(kv, (batch_size + SNAPSHOTS) * state_slot)  # half of the memory, or all that a full batch needs
    return max(kv + state_slots, int(2 * state_slot / (STATE_SHARE if kv else 1)))


def memory_option(count: int) -> str:
    """Returns the smallest `--kv-memory` in whole units that is at least `count` bytes."""
    unit, name = (2**30, "GiB") if count >= 2**32 else (2**20, "MiB") if count >= 2**22 else (2**10, "KiB")
    return f"{-(-count // unit)}{name}"


def limits_for(config: EngineConfig, device: str, vocab_size: int, *, streamed: bool = False) -> Limits:
    """Returns the limits of steps on a kind of device: cpu, mps or cuda. `streamed`: every step reads the weights again, whatever its size."""
    batch_tokens = config.max_batch_tokens or BATCH_TOKENS[device]
    batch_size = max(BATCH_SIZE[device], STREAMED_LOGITS // vocab_size) if streamed else BATCH_SIZE[device]
    return Limits(
        batch_size=min(config.batch_size or batch_size, batch_tokens),
        max_batch_tokens=batch_tokens,
        max_prefill_tokens=min(config.max_prefill_tokens or batch_tokens, batch_tokens),
        max_scored_tokens=max(1, SCORED_LOGITS // vocab_size),
    )


def max_useful_blocks(limits: Limits, context_length: int, block_size: int) -> int:
    """Returns twice the number of blocks of a full batch of the longest sequences. More blocks would be of no use."""
    return 2 * limits.batch_size * -(-context_length // block_size)
