"""The command ``outrider``: one module for each of its commands."""
