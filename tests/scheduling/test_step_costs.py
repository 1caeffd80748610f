"""What a step costs is learned from the steps that have run."""

import json
import random

import numpy as np
import pytest

from batchgen.request import IMAGE_IDS
from batchgen.scheduling.batch import StepSize
from batchgen.scheduling.rehearsal import run_steps, scheduler_of
from batchgen.scheduling.step_costs import KEPT, StepCosts
from support.models import engine_for, make_requests, packed_model, run


def true_seconds(size):
    """A machine that reads weights for 5 ms, computes a token in 60 µs, and needs something for rows, keys and pairs."""
    forward = max(5e-3, 6e-5 * size.tokens) if size.tokens else 0.0
    return 2e-4 + forward + 1e-5 * size.logit_rows + 2e-8 * size.keys + 1e-9 * size.pairs


def steps(seed, count=600):
    """Steps of a job that decodes up to 256 sequences of 1,000 shared tokens, and now and then prefills beside."""
    rng = random.Random(seed)
    for i in range(count):
        decoding = rng.randint(1, 256)
        prompt = rng.randint(300, 2048) if i % 8 == 0 else 0
        own = decoding * rng.randint(1, 200)
        yield StepSize(decoding + prompt, decoding, 1000 + own + prompt, decoding * 1000 + own + prompt**2 // 2)


def observed(sizes, seconds=true_seconds, file=None):
    costs = StepCosts(file)
    for size in sizes:
        costs.measured.append((size, seconds(size)))
    return costs


SIZES = [
    StepSize(1, 1, 1050, 1050),
    StepSize(8, 8, 1400, 8400),
    StepSize(90, 90, 5000, 95_000),
    StepSize(256, 256, 26_600, 281_600),
    StepSize(1500, 40, 3500, 1_200_000),
]


@pytest.mark.parametrize("size", SIZES)
def test_estimates_are_right_for_sizes_that_were_not_measured(size):
    assert observed(steps(0)).seconds(size) == pytest.approx(true_seconds(size), rel=0.1)


@pytest.mark.parametrize("size", SIZES)
def test_noise_and_pauses_of_the_machine_hardly_matter(size):
    rng = random.Random(1)

    def measured(size):
        return true_seconds(size) * rng.uniform(0.8, 1.2) * (30 if rng.random() < 0.02 else 1)

    assert observed(steps(0), measured).seconds(size) == pytest.approx(true_seconds(size), rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_a_larger_step_never_costs_less(seed):
    rng = random.Random(seed)
    costs = observed(steps(seed, 40), lambda _: rng.uniform(1e-3, 1e-1))
    size = StepSize(1, 1, 1, 1)
    for _ in range(200):
        larger = StepSize(*(n + rng.choice((0, 1, n)) for n in size))
        assert costs.seconds(size) <= costs.seconds(larger) * (1 + 1e-9)
        size = larger if larger.tokens < 1 << 40 else StepSize(1, 1, 1, 1)


def test_a_token_costs_what_it_costs_in_the_nearest_steps_where_none_was_measured():
    costs = observed(
        [StepSize(n, 0, 0, 0) for n in (*range(60, 64), *range(512, 530))], lambda size: 1e-4 * size.tokens
    )
    for tokens in (100, 200, 400, 1024, 100_000):
        assert costs.seconds(StepSize(tokens, 0, 0, 0)) == pytest.approx(1e-4 * tokens, rel=0.05)


@pytest.mark.parametrize("slow", [0.8, 1.0, 1.25])
def test_the_few_steps_of_a_measurement_tell_what_larger_ones_cost(slow):
    """Two prefill steps, of which one was slow or fast, and as many decode steps as a completion has tokens."""

    def seconds(size):
        return 4e-3 + 7e-4 * size.tokens + 1e-4 * size.logit_rows + 1e-8 * size.pairs

    first, second = StepSize(1025, 0, 1025, 525_825), StepSize(1273, 32, 2298, 1_333_307)
    decoding = [StepSize(32, 32, 2330 + 32 * i, 34_105 + 32 * i) for i in range(63)]
    costs = observed([first, second, *decoding], lambda size: seconds(size) * (slow if size == first else 1))
    for size in (StepSize(2048, 92, 5121, 2_150_408), StepSize(222, 222, 15_000, 240_000)):
        assert costs.seconds(size) == pytest.approx(seconds(size), rel=0.2)


def test_what_encoding_images_takes_is_not_taken_for_the_cost_of_text():
    """Most of a prompt of images is images. Where steps of both kinds ran, those of a job of text cost what they cost."""

    def with_encoder(size):
        return true_seconds(size) + 1e-3 * size.image_tokens

    rng = random.Random(2)
    sizes = [
        size._replace(image_tokens=int((size.tokens - size.logit_rows) * rng.uniform(0.7, 0.95))) for size in steps(2)
    ]
    costs = observed(sizes, with_encoder)
    for size in SIZES:
        assert costs.seconds(size) == pytest.approx(true_seconds(size), rel=0.15)
        seen = size._replace(image_tokens=size.tokens // 2)
        assert costs.seconds(seen) == pytest.approx(with_encoder(seen), rel=0.15)


def test_nothing_is_known_before_two_steps():
    costs = observed(SIZES[:1])
    assert (costs.known, costs.seconds(SIZES[0])) == (False, 0.0)
    costs.measured.append((SIZES[1], 1.0))
    assert costs.known
    assert costs.seconds(SIZES[0]) > 0


def test_later_runs_know_what_was_saved(tmp_path):
    file = tmp_path / "folder" / "costs.json"
    first = observed(steps(0), file=file)
    first.save()
    second = StepCosts(file)
    assert [second.seconds(size) for size in SIZES] == pytest.approx([first.seconds(size) for size in SIZES], rel=1e-3)


def test_newer_steps_take_the_place_of_older_ones_of_their_kind(tmp_path):
    file = tmp_path / "costs.json"
    observed(steps(0), file=file).save()
    observed(steps(1), lambda size: 3 * true_seconds(size), file=file).save()
    assert StepCosts(file).seconds(SIZES[2]) == pytest.approx(3 * true_seconds(SIZES[2]), rel=0.2)


@pytest.mark.parametrize("busy", [0.4, 1.0, 2.5])
def test_steps_of_a_run_on_a_busier_machine_are_taken_at_the_pace_of_the_newest_run(tmp_path, busy):
    """The earlier run had steps of all sizes, the newest one only small steps, as a measurement of 32 rows has."""
    file = tmp_path / "costs.json"
    observed(steps(0), lambda size: busy * true_seconds(size), file=file).save()
    now = observed([StepSize(32, 32, 1032 + 32 * i, 32_000 + 32 * i) for i in range(90)], file=file)
    now.save()
    for costs in (now, StepCosts(file)):
        for size in SIZES[1:]:
            assert costs.seconds(size) == pytest.approx(true_seconds(size), rel=0.2)


def test_one_slow_step_at_the_start_of_a_run_hardly_changes_what_is_known(tmp_path):
    file = tmp_path / "costs.json"
    observed(steps(0), file=file).save()
    first = observed(SIZES[2:3], lambda size: 3 * true_seconds(size), file=file)
    assert first.seconds(SIZES[3]) == pytest.approx(true_seconds(SIZES[3]), rel=0.25)


def test_the_file_does_not_grow_with_the_run_and_keeps_the_kinds_of_other_runs(tmp_path):
    file = tmp_path / "costs.json"
    observed([StepSize(1000, 0, 0, 0)] * 3, file=file).save()
    other = observed([StepSize(5, 5, 50, 50)], file=tmp_path / "none.json")
    other.file = file
    for _ in range(1000):
        other.measured.append((StepSize(5, 5, 50, 50), 0.1))
    other.save()
    assert (
        sorted(size for *size, _ in json.loads(file.read_text()))
        == [[5, 5, 50, 50, 0]] * KEPT + [[1000, 0, 0, 0, 0]] * 3
    )


@pytest.mark.parametrize(
    "content",
    ["", "null", "[[1, 2, 3, 4]]", '[["1", 1, 1, 1, 0.1]]', "[[1, 1, 1, 1, NaN]]", "[[-1, 1, 1, 1, 0.1]]", "\x00\xff"],
)
def test_a_damaged_file_is_ignored_and_replaced(tmp_path, content):
    file = tmp_path / "costs.json"
    file.write_bytes(content.encode("latin-1"))
    costs = observed(SIZES, file=file)
    costs.save()
    assert [size for *size, _ in json.loads(file.read_text())] == [list(size) for size in SIZES]


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    observed(SIZES, file=tmp_path / "file" / "costs.json").save()


def sizes_of_steps(scheduler):
    sizes = []

    def launch(batch):
        sizes.append(batch.size)
        return lambda: [0] * len(batch.samples)

    run_steps(scheduler, launch)
    return sizes


def test_the_size_of_a_step_counts_the_keys_of_a_prefix_once():
    shared = list(range(64))
    scheduler = scheduler_of([np.array([*shared, 100, 101]), np.array([*shared, 200])], 3, 32, 1000)
    assert sizes_of_steps(scheduler) == [
        StepSize(64, 0, 64, 64 * 65 // 2),
        StepSize(3, 2, 64 + 2 + 1, 65 + 66 + 65),
        StepSize(2, 2, 64 + 3 + 2, 67 + 66),
        StepSize(2, 2, 64 + 4 + 3, 68 + 67),
    ]


def test_the_size_of_a_step_counts_the_tokens_of_images():
    scheduler = scheduler_of([np.array([1, 2, *[IMAGE_IDS + 5] * 7, 3])], 3, 32, 6)
    assert [(size.tokens, size.image_tokens) for size in sizes_of_steps(scheduler)] == [(6, 4), (4, 3), (1, 0), (1, 0)]


def test_an_engine_keeps_what_its_steps_cost(tmp_path):
    engine = engine_for(packed_model("llama"))
    engine.costs.file = tmp_path / "costs.json"
    run(engine, make_requests([[1, 2, 3], [1, 2, 4]], [2, 5]))
    assert len(json.loads(engine.costs.file.read_text())) == engine.stats.steps
