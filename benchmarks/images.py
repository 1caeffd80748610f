"""Rows with images: batchgen beside transformers' `generate`, vLLM and OpenVINO GenAI on the CPU, in tokens per second.

    bash benchmarks/setup_engines.sh ENGINES vllm openvino-images
    python -m benchmarks.images --engines ENGINES
    python -m benchmarks.images --engines ENGINES --part 0.05 --repeats 1 --batch-sizes 4    # a short run

Three workloads: 100 images with ten questions each, shuffled; 200 images with one question each; and 20 pages, larger images with one question each. The
images are JPEG files of 640 x 480 pixels, and the pages of 1,200 x 1,600; the model has the shape of Qwen2.5-VL, about 50 million parameters and random
weights. Each measurement is a process of its own; the engines take turns. The time begins with the rows and ends with the last token: it contains reading
and preparing the images, and not loading the model. transformers runs rows of similar length together, in batches of each of the sizes. With `--part`, the others run on the first images only; rates are compared, and the answers to
the same rows. An engine that fails is left out of that workload.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from batchgen.process.machine import usable_cores
from benchmarks.engines.images import now, since
from benchmarks.harness import WORDS
from benchmarks.machine import in_words, machine_facts
from benchmarks.models import CONTEXT, WEIGHT_STD, shared_tokenizer
from benchmarks.programs import EngineFailed, Launcher, last_json, run

TOKENS = 32
WORKLOADS = {
    "ten questions": (100, 10, (640, 480)),
    "one question": (200, 1, (640, 480)),
    "pages": (20, 1, (1200, 1600)),
}
"""Images, questions about each, width and height."""
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>QUESTION<|im_end|>\n<|im_start|>assistant\n"
"""What `TEMPLATE` writes."""
PEERS = {"vllm": "vllm", "openvino": "openvino-images"}
"""By name in `benchmarks.engines.images`: the folder of the engine's environment."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "model_type": "qwen2_5_vl_text", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1408, "max_position_embeddings": CONTEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "depth": 8, "hidden_size": 384, "num_heads": 6, "intermediate_size": 1024, "out_hidden_size": 512, "patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [3, 7],
}  # fmt: skip


def model_that_sees(work: Path, dtype: str) -> Path:
    """Returns the model's folder under `work`. Makes the model if it is missing."""
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = work / "models" / f"sees-50m-{dtype}"
    if (folder / "config.json").exists():
        return folder
    tokenizer = shared_tokenizer(work)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MARKS[2:]))
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=TEXT | {"vocab_size": len(tokenizer)}, vision_config=VISION, image_token_id=image,
        video_token_id=video, vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    Qwen2VLImageProcessorPil().save_pretrained(unfinished)
    (unfinished / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    unfinished.rename(folder)
    return folder


def rows_of(work: Path, workload: str, limit: int) -> list[tuple[str, str]]:
    """Returns the image file and the question of each row, and makes the files. `limit`: the number of images, at most."""
    import numpy as np
    from PIL import Image

    images, questions, size = WORKLOADS[workload]
    folder = work / "pictures of {}x{}".format(*size)
    folder.mkdir(parents=True, exist_ok=True)
    rnd = random.Random(5)
    rows = []
    for i in range(min(images, limit)):
        path = folder / f"{i}.jpg"
        if not path.exists():
            coarse = np.random.default_rng(i).integers(0, 256, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
        rows += [(str(path), " ".join(rnd.choice(WORDS) for _ in range(8)) + "?") for _ in range(questions)]
    rnd.shuffle(rows)
    return rows


def batchgen_seconds(model: Path, dtype: str, rows: list[tuple[str, str]]) -> dict[str, Any]:
    from batchgen import LLM, SamplingParams

    prompts = [
        [{"role": "user", "content": [{"type": "image", "path": path}, {"type": "text", "text": question}]}]
        for path, question in rows
    ]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(model), device="cpu", dtype=dtype) as llm:
        started = now()
        results = llm.generate(prompts, params)
        spent = since(started)
        assert all(result.error_message is None and len(result.token_ids) == TOKENS for result in results)
        stats = llm.engine.stats
        texts = [result.text for result in results]
        return spent | {"texts": texts, "images_encoded": stats.images_encoded, "prefill_tokens": stats.prefill_tokens}


def generate_seconds(model: Path, dtype: str, rows: list[tuple[str, str]], size: int) -> dict[str, Any]:
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    # Without its part for videos, which needs torchvision.
    kind: Any = type("Processor", (Qwen2_5_VLProcessor,), {"check_argument_for_proper_class": lambda *_: None})
    processor = kind(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(model), tokenizer=tokenizer, video_processor=None
    )
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    whole.generation_config.eos_token_id = None
    started = now()
    texts: dict[tuple[str, str], str] = {}
    ordered = sorted(rows, key=lambda row: len(row[1]))
    with torch.inference_mode():
        for i in range(0, len(ordered), size):
            batch = ordered[i : i + size]
            inputs = processor(
                images=[Image.open(path) for path, _ in batch], text=[PROMPT.replace("QUESTION", q) for _, q in batch],
                padding=True, return_tensors="pt",
            )  # fmt: skip
            inputs["pixel_values"] = inputs["pixel_values"].to(whole.dtype)
            out = whole.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
            assert out.shape == (len(batch), inputs["input_ids"].shape[1] + TOKENS)
            made = tokenizer.batch_decode(out[:, -TOKENS:], skip_special_tokens=True)
            texts |= dict(zip(batch, made, strict=True))
    return since(started) | {"texts": [texts[row] for row in rows]}


def measured(args: argparse.Namespace, model: Path, workload: str, engine: str) -> dict[str, Any]:
    """Runs one measurement in a process of its own. Returns its figures, its number of rows, and the answers by image and question."""
    ours = engine == "batchgen"
    images = min(args.limit, WORKLOADS[workload][0] if ours else max(1, round(WORKLOADS[workload][0] * args.part)))
    rows = rows_of(args.work, workload, images)
    launcher = Launcher(args.engines or args.work, usable_cores())
    if engine in PEERS:
        work = args.work / "rows.json"
        work.write_text(
            json.dumps({"rows": [(path, PROMPT.replace("QUESTION", q)) for path, q in rows], "tokens": TOKENS})
        )
        python = launcher.engines_folder / PEERS[engine] / "bin" / "python"
        command = [str(python), "-m", "benchmarks.engines.images", engine, "--model", str(model), "--dtype", args.dtype]
        command += ["--input", str(work)]
    else:
        command = [sys.executable, "-m", "benchmarks.images", "--one", json.dumps([workload, engine])]
        command += ["--work", str(args.work), "--dtype", args.dtype, "--limit", str(images)]
    program = engine if ours or engine in PEERS else "transformers-generate"
    found = last_json(engine, run(engine, command, launcher.environment(program), None))
    answers = dict(zip(map(tuple, rows), found.pop("texts"), strict=True))
    print(
        f"{workload}, {engine}, {len(rows)} rows: {found['seconds']:.1f} s, {found['processor_seconds']:.1f} s of a processor",
        flush=True,
    )
    return found | {"rows": len(rows), "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], help="of transformers")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=1000, help="images of each workload, at most")
    parser.add_argument(
        "--part", type=float, default=1.0, help="the share of the images that the others are measured on (%(default)s)"
    )
    parser.add_argument("--engines", type=Path, help="the folder of setup_engines.sh with vllm and openvino-images")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--out", type=Path, default=None, help="write the figures there, as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = model_that_sees(args.work, args.dtype)
    if args.one:
        workload, engine = json.loads(args.one)
        rows = rows_of(args.work, workload, args.limit)
        if engine == "batchgen":
            print(json.dumps(batchgen_seconds(model, args.dtype, rows)))
        else:
            print(json.dumps(generate_seconds(model, args.dtype, rows, int(engine.rpartition(" ")[2]))))
        return
    figures: dict[str, Any] = {"machine": machine_facts(), "dtype": args.dtype, "part": args.part}
    others = [f"transformers {size}" for size in args.batch_sizes]
    others += [name for name, folder in PEERS.items() if args.engines and (args.engines / folder / "ready").exists()]
    for workload in args.workloads:
        runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ["batchgen", *others]}
        for _ in range(args.repeats):
            for engine in list(runs):
                try:
                    runs[engine].append(measured(args, model, workload, engine))
                except EngineFailed as e:
                    if engine == "batchgen":
                        raise
                    print(f"{workload}, left out: {e}", flush=True)
                    del runs[engine]
        speed = {e: of[0]["rows"] * TOKENS / statistics.median(r["seconds"] for r in of) for e, of in runs.items()}
        ours = runs["batchgen"][0].pop("answers")
        for engine, of in runs.items():
            theirs = of[0].pop("answers", ours)
            equal = sum(ours.get(row) == text for row, text in theirs.items())
            print(
                f"{workload}, {engine}: {speed[engine]:,.0f} completion tokens/s, {equal} of {len(theirs)} answers equal batchgen's",
                flush=True,
            )
            for one in of:
                one.pop("answers", None)
        if best := max(runs.keys() - {"batchgen"}, key=speed.__getitem__, default=None):
            ratio = speed["batchgen"] / speed[best]
            print(f"{workload}: {ratio:.2f} times {best}; the others ran {args.part:.0%} of the images", flush=True)
        figures[workload] = runs
    print(f"{in_words(figures['machine'])}, {usable_cores()} threads, {figures['machine']['date'][:10]}")
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
