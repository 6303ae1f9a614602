"""Tenants of a service: named API keys, the limits of their requests, and their usage."""
