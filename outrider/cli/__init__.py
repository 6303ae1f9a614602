"""The command ``outrider``: one module for each thing to do with a deployment."""
