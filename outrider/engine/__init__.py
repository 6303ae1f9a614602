"""Engine: one model, target or draft, and the sequences that it works on."""
