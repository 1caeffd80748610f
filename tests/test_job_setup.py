"""What a command asks of a job reaches it."""

from __future__ import annotations

from batchgen import JobConfig, ModelConfig
from batchgen.job_setup import check_command, set_up_job
from batchgen.process.signals import Signals
from batchgen.progress import Silent, Tracker
from batchgen.stats import versions


def test_the_options_of_a_job_are_what_its_store_is_asked_for(tiny_model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    options = {
        "limit": 3,
        "order": "done",
        "work_dir": str(tmp_path),
        "overwrite": True,
        "flush_every": 1.5,
        "prune": True,
    }
    command = check_command(
        JobConfig(
            inputs=tmp_path / "rows.jsonl",
            model=ModelConfig(model=tiny_model_dir),
            output=str(tmp_path / "o.jsonl"),
            retry=("errors", "length"),
            **options,  # type: ignore[arg-type]
        )
    )
    with Signals(grace=0.0) as signals:
        setup, store = set_up_job(command, signals, Tracker(Silent()))
        with store:
            pass
    assert {name: getattr(setup.spec, name) for name in options} == options
    assert setup.spec.retry == ["errors", "length"]
    assert setup.spec.digest == command.digest != ""
    assert (setup.spec.input, setup.spec.output) == (command.source, str(tmp_path / "o.jsonl"))
    assert setup.spec.mentions == versions()
