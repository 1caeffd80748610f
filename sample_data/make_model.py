"""Trains the sample model from scratch and writes `model/`: tokenizer, chat template, config and weights.

    python sample_data/make_model.py

The text comes from `office_tasks`; no other data, nothing downloaded. A training step runs a desk's prefix once and all of its
questions after that one stored prefix, which is what batchgen does with prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from office_tasks import ROOT, TASKS, Question, Task, desk_text, draw_questions, example_lines, input_text, prefix_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "model"
SEED = 20
LEARNING_RATE = 6e-3
QUESTIONS = 16
"""Questions to one prefix in a training step."""
VOCAB_SIZE = 2048
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
SPLIT = r"\p{Lu}+\p{Ll}*|[^\r\n\p{L}\p{N}]?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Single digits, line breaks, words with the sign before them; but a word with a capital is the same tokens with a space before
it or without, so that a name is copied from a sentence to the start of an answer token by token."""
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The roles are system, user and assistant, not ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- eos_token if message['role'] == 'assistant' else '<|end|>' -}}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def corpus(rng: Random, desks: int) -> Iterator[str]:
    """Text as the prompts have it, for the tokenizer."""
    for number in range(desks):
        task = TASKS[number % len(TASKS)]
        desk = task.desk(rng)
        yield prefix_text(ROOT, task.rules, desk_text(rng, desk))
        for question in draw_questions(rng, desk, 10, held_out=False):
            yield f"{input_text(question)}\n{question.answer}"


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text has tokens, none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(Random(SEED), 2000), trainer)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Encoder:
    """Makes token ids of prompts in two pieces, the prefix and the rest, which are exactly those of the whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.eos = int(tokenizer.eos_token_id)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prefix(self, text: str) -> list[int]:
        return self.ids(f"<bos><|user|>\n{text}")

    def question(self, question: Question) -> list[int]:
        return self.ids(f"{input_text(question)}<|end|>\n<|assistant|>\n")

    def answer(self, question: Question) -> list[int]:
        return [*self.ids(question.answer), self.eos]

    def check(self, prefix: str, question: Question) -> None:
        messages = [{"role": "user", "content": prefix + input_text(question)}]
        whole = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert whole == self.prefix(prefix) + self.question(question), "the prefix does not end at a token's end"


def step_loss(
    model: LlamaForCausalLM, encoder: Encoder, prefix: list[int], questions: list[Question]
) -> tuple[torch.Tensor, int, int]:
    """The loss over the answers of questions that follow one prefix; how many answers were right to the letter; tokens run."""
    pieces = [(encoder.question(question), encoder.answer(question)) for question in questions]
    width = max(len(asked) + len(answer) for asked, answer in pieces)
    inputs = torch.full((len(pieces), width), encoder.eos)
    labels = torch.full((len(pieces), width), -100)
    for row, (asked, answer) in enumerate(pieces):
        inputs[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        labels[row, len(asked) - 1 : len(asked) + len(answer) - 1] = torch.tensor(answer)
    cache = DynamicCache(config=model.config)
    model.model(input_ids=torch.tensor([prefix]), past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(pieces))
    positions = torch.arange(len(prefix), len(prefix) + width)[None]
    hidden = model.model(input_ids=inputs, past_key_values=cache, position_ids=positions, use_cache=True)
    wanted = labels != -100
    logits = model.lm_head(hidden.last_hidden_state[wanted])
    loss = torch.nn.functional.cross_entropy(logits.float(), labels[wanted], reduction="sum") / len(pieces)
    with torch.no_grad():
        wrong = torch.zeros_like(wanted)
        wrong[wanted] = logits.argmax(-1) != labels[wanted]
        right = int((~wrong.any(1)).sum())
    return loss, right, len(prefix) + inputs.numel()


def copies(rng: Random) -> tuple[str, list[Question]]:
    """Inputs to be said again, whole. A model that can copy learns the tasks many times sooner."""
    inputs = [question for task in TASKS for question in draw_questions(rng, task.desk(rng), 10, held_out=False)]
    return "", [Question(question.text, question.text, "easy") for question in inputs]


def short_prompts(rng: Random, task: Task) -> tuple[str, list[Question]]:
    """Questions to a prefix that has little more than the form of the answer: quick to run."""
    desk = task.desk(rng)
    if rng.random() < 0.2:
        prefix = prefix_text(desk_text(rng, desk))
    else:
        prefix = prefix_text("\n".join([desk.form, *example_lines(rng, desk, rng.choice((0, 0, 1, 2)))]))
    return prefix, draw_questions(rng, desk, QUESTIONS, held_out=False)


def whole_prompts(rng: Random, task: Task, *, held_out: bool = False) -> tuple[str, list[Question]]:
    """Questions to a prefix as the prompts have it."""
    desk = task.desk(rng)
    prefix = prefix_text(ROOT, task.rules, desk_text(rng, desk))
    return prefix, draw_questions(rng, desk, QUESTIONS, held_out=held_out)


def train(model: LlamaForCausalLM, encoder: Encoder, copy_steps: int, short_steps: int, whole_steps: int) -> None:
    """First copies, then short prompts, then whole ones. Muon for the matrices, AdamW for the rest; the rate falls to a tenth."""
    rng = Random(SEED + 1)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    steps = copy_steps + short_steps + whole_steps
    log = Log(steps)
    for step in range(steps):
        rate = LEARNING_RATE * min((step + 1) / 30, 1.0, 1.1 - step / steps)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        if step < copy_steps:
            draws = [("copies", *copies(rng))]
        else:
            draw = short_prompts if step < copy_steps + short_steps else whole_prompts
            draws = [(task.name, *draw(rng, task)) for task in TASKS]
        for name, prefix, questions in draws:
            loss, right, tokens = step_loss(model, encoder, encoder.prefix(prefix), questions)
            torch.autograd.backward(loss / len(draws))
            log.add(name, loss.item() / len(draws), right, len(questions), tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        log.step_done(step + 1)


class Log:
    """Prints a line every 25 steps: the loss of an answer, and how many answers of each kind were right to the letter."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.tokens = steps, time.monotonic(), 0
        self.loss, self.counts = 0.0, dict[str, tuple[int, int]]()

    def add(self, name: str, loss: float, right: int, asked: int, tokens: int) -> None:
        before = self.counts.get(name, (0, 0))
        self.counts[name] = (before[0] + right, before[1] + asked)
        self.loss, self.tokens = self.loss + loss, self.tokens + tokens

    def step_done(self, step: int) -> None:
        if step % 25 and step != self.steps:
            return
        shares = "  ".join(f"{name} {right / asked:4.0%}" for name, (right, asked) in self.counts.items())
        head = f"step {step:4}/{self.steps}  {time.monotonic() - self.began:4.0f} s  {self.tokens / 1e6:.2f} M tokens"
        print(f"{head}  loss {self.loss / (step % 25 or 25):7.3f}  {shares}", flush=True)
        self.loss, self.counts = 0.0, {}


@torch.no_grad()
def held_out_accuracy(model: LlamaForCausalLM, encoder: Encoder, desks: int = 4) -> dict[str, float]:
    """The share of questions not in the training text that greedy decoding answers to the letter, task by task."""
    rng = Random(SEED + 2)
    accuracy = {}
    for task in TASKS:
        right = 0
        for _ in range(desks):
            prefix, questions = whole_prompts(rng, task, held_out=True)
            encoder.check(prefix, questions[0])
            right += step_loss(model, encoder, encoder.prefix(prefix), questions)[1]
        accuracy[task.name] = right / (desks * QUESTIONS)
    return accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains the sample model from scratch.")
    parser.add_argument("--copy-steps", type=int, default=40)
    parser.add_argument("--short-steps", type=int, default=520)
    parser.add_argument("--whole-steps", type=int, default=360)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write (model/)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    encoder = Encoder(tokenizer)
    model = new_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, a vocabulary of {len(tokenizer)} tokens")
    train(model, encoder, args.copy_steps, args.short_steps, args.whole_steps)
    model.to(torch.bfloat16)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    accuracy = held_out_accuracy(model, encoder)
    total = sum(accuracy.values()) / len(accuracy)
    print("held-out questions right:", "  ".join(f"{name} {share:.1%}" for name, share in accuracy.items()))
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"wrote {args.out}, {size / 1e6:.1f} MB; {total:.1%} of the held-out questions are right")
    return 0 if total >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
