"""A run folder as one page: learning curves, flights, evaluations, where time went, what storage saved.

It reads files only, never live objects; the page needs nothing but a browser.
"""

from __future__ import annotations

from slipstream.report.page import render_page, save_page, write_report
from slipstream.report.run import Run, read_run

__all__ = ["Run", "read_run", "render_page", "save_page", "write_report"]
