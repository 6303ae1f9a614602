"""Tools to choose, check, fit and train drafts. The server never imports them."""
