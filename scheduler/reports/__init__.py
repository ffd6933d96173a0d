"""What a run was like, in numbers, tables, files and pictures: `summarise` first, then one of the writers.

Everything is a pure function of a `RunResult`: the same run gives the same bytes.
"""

from scheduler.reports.comparison import Cell, Comparison, Row, compare
from scheduler.reports.csv_report import write_metrics_csv, write_requests_csv
from scheduler.reports.fairness import Fairness
from scheduler.reports.html_report import write_html
from scheduler.reports.metrics import COMPARED, GROUP_METRICS, RUN_METRICS, Metric
from scheduler.reports.objectives import Objective, Objectives, attains
from scheduler.reports.perfetto import write_trace
from scheduler.reports.statistics import (
    Distribution,
    Interval,
    confidence_interval,
    jain_index,
    paired_difference,
    percentile,
    t_quantile,
)
from scheduler.reports.summary import Counts, GroupSummary, Summary, summarise
from scheduler.reports.table import comparison_table, run_table
from scheduler.reports.timeline import Timeline, timeline

__all__ = [
    "COMPARED",
    "GROUP_METRICS",
    "RUN_METRICS",
    "Cell",
    "Comparison",
    "Counts",
    "Distribution",
    "Fairness",
    "GroupSummary",
    "Interval",
    "Metric",
    "Objective",
    "Objectives",
    "Row",
    "Summary",
    "Timeline",
    "attains",
    "compare",
    "comparison_table",
    "confidence_interval",
    "jain_index",
    "paired_difference",
    "percentile",
    "run_table",
    "summarise",
    "t_quantile",
    "timeline",
    "write_html",
    "write_metrics_csv",
    "write_requests_csv",
    "write_trace",
]
