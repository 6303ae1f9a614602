"""Rewrites the tables of settings, metrics and models in the docs: ``python -m workshop.pages``."""

from workshop.pages import families_tables, metrics_tables, settings_tables
from workshop.pages.marks import DOCS

if __name__ == "__main__":
    tables = (settings_tables, metrics_tables, families_tables)
    for name, text in (page for of_kind in tables for page in of_kind.pages().items()):
        (DOCS / name).write_text(text)
