"""The report: result lines as one self-contained HTML page that needs no network."""

from dropkv.bench.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
