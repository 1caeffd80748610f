"""The report of a job or a plan: one HTML page that needs no network."""

from batchgen.report.job_data import default_report_file, report_job
from batchgen.report.page import ReportPage, check_report_file, report_plan

__all__ = ["ReportPage", "check_report_file", "default_report_file", "report_job", "report_plan"]
