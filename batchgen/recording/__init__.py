"""What a job records for its report, in bounded size: figures over time, the prefix tree in outline, and sums over its rows."""

from batchgen.recording.agreement import Agreement
from batchgen.recording.job_record import JobRecord, RunRecorder, tree_record
from batchgen.recording.row_figures import RowFigures

__all__ = ["Agreement", "JobRecord", "RowFigures", "RunRecorder", "tree_record"]
