"""Calls of tools: how families of models write them, how they are read and how they are held to a form."""
