"""Pages of run directories that tests share."""

from cases.report_pages import page_of  # noqa: F401
