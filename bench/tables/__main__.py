from bench.tables.pages import PAGES, updated

if __name__ == "__main__":
    for path in PAGES:
        path.write_text(updated(path.read_text()))
