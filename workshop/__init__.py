"""What a team does around a server: choose, check, fit and train drafts. No server imports it."""
