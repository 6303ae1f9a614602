"""Interfaces for clients: the HTTP and gRPC APIs, the page and the documentation of the API."""
