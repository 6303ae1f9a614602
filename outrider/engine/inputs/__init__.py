"""Inputs of a step: numbers that are laid out on the host and copied to the device."""
