"""Planning before a model is loaded: its memory, the costs of its steps, and the promise that it keeps."""
