"""What happens when batchgen's kernels for a GPU fail in the middle of a job: plain torch takes over.

After an error of a kernel they are switched off at once. Logits that are not numbers may be the model's own: plain torch runs the same rows,
and the kernels are switched off only if it gives numbers.
"""

from __future__ import annotations

from batchgen.engine.executor import NO_NUMBERS, KernelsFailed, StepExecutor
from batchgen.errors import DevicesLost
from batchgen.model.runner import Runner
from batchgen.scheduling.batch import SequenceUpdate


class KernelFallback:
    """Decides whether the kernels run. The engine starts the unfinished rows again after `pause`."""

    def __init__(self, runner: Runner, executor: StepExecutor, notes: list[str]) -> None:
        self._runner, self._executor, self._notes = runner, executor, notes
        self.suspects: set[int] = set()
        """Rows whose logits were not numbers while our kernels ran, until plain torch has run them too."""

    def pause(self, failed: KernelsFailed) -> None:
        """Lets plain torch attend from now on. Raises `DevicesLost` if the device runs nothing more in this process."""
        device = self._runner.model.device
        try:
            self._runner.pause_kernels()
        except RuntimeError as e:
            verdict = self._runner.model.verdict.without("triton", str(failed))
            kept = f", as {verdict.file} says" if verdict.file is not None else " with --attention torch"
            raise DevicesLost(
                f"{device}: {failed}; the device runs nothing more in this process",
                f"run the same command again: it continues in plain torch{kept}",
            ) from e
        if not failed.rows:
            self._switch_off(failed)
        self.suspects = set(failed.rows)

    def examine(self, update: SequenceUpdate) -> None:
        """Finds out whether the kernels are the cause of logits that are not numbers. Raises `KernelsFailed` if plain torch has to run the row first."""
        seq, token, reason, error = update
        row = seq.request.row
        no_numbers = error is not None and error.type == "numerical_error"
        if reason == "scored":
            no_numbers = not all(score.is_number for score in seq.text_scores)
            if no_numbers and self._runner.attention == "triton" and self._executor.doubts_numbers:
                raise KernelsFailed(NO_NUMBERS, frozenset({row}))
        if row in self.suspects and (token is not None or reason is not None or error is not None):
            self.suspects.remove(row)
            if no_numbers:  # plain torch agrees, so the model is the cause and the row fails
                self.suspects.clear()
                self._executor.doubts_numbers = False
                self._runner.resume_kernels()
            elif not self.suspects:
                self._switch_off(KernelsFailed(NO_NUMBERS))

    def keep_suspects(self, rows: set[int]) -> None:
        """Drops the suspects that are not in `rows`. If none is left, the cause can no longer be found, and the kernels run again."""
        self.suspects &= rows
        if not self.suspects:
            self._runner.resume_kernels()

    def _switch_off(self, failed: KernelsFailed) -> None:
        """Switches the kernels off, for this run and the next ones."""
        self._runner.drop_kernels()
        self._notes.append(self._runner.model.verdict.without("triton", str(failed)).note("triton"))
