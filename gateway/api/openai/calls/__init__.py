"""Tool calls: the formats of model families, parsers of calls, and grammars that constrain calls."""
