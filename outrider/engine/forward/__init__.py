"""Forward pass of one step over a paged cache: decoder, attention, linear layers, graphs."""
