"""Workers that exist, and the streams of sequences to them."""
