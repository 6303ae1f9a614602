"""Generation of a request, from its validation to its last text: admission, tokens, forms and streaming."""
