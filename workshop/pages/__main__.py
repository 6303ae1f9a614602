"""Rewrites the tables of settings and metrics in the docs: ``python -m workshop.pages``."""

from workshop.pages import metrics_tables, settings_tables
from workshop.pages.marks import DOCS

if __name__ == "__main__":
    for name, text in (settings_tables.pages() | metrics_tables.pages()).items():
        (DOCS / name).write_text(text)
