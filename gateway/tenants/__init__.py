"""Tenants of a service: keys with names, the limits of their requests, and what each has used."""
